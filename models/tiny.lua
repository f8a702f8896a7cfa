-- models/tiny.lua: a small Llama that learns to write like a text; two minutes on two cores.
-- The text is data.text, by default the one that `make demo` fetches.
return {
  model  = require "models.llama" { blocks = 4, width = 128, heads = 4, vocab = 259, context = 128, std = 0.05 },
  layout = { dp = "rest" },
  data   = { batch = 32, held_out = 0.1 }, -- sequences a step, over all ranks
  optim  = { "adamw", betas = { 0.9, 0.95 }, decay = 0.1, clip = 1.0,
             rate = pg.rate.cosine { peak = 1e-3, warmup = 30 } },
  steps  = 300,
  eval   = { batches = 8 },
  sample = { prompt = "The ", tokens = 300 },
  save   = { at_end = true },
}
