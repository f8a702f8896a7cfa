-- models/llama7b.lua: LLaMA-7B at 4096 tokens in bf16.  One GPU of 141 GB holds it: 108 GB of states and two
-- sequences at a time.  Tokens come from data/*.bin; where there are none, they are drawn at random, for timing.
--   pgrun models/llama7b.lua --data.batch=16 --steps=20
--   pgrun -n 8 models/llama7b.lua --layout.zero=1
local llama = require "models.llama"
local files = #pg.fs.glob "data/*.bin" > 0

return {
  model     = llama "7b",
  layout    = { dp = "rest", pp = 1, tp = 1, zero = 0 },
  precision = "bf16",
  data      = { tokens = files and "data/*.bin" or nil, random = not files, context = 4096, batch = 1024 },
  micro     = 2,
  recompute = "norms",
  optim     = { "adamw", betas = { 0.9, 0.95 }, decay = 0.1, clip = 1.0,
                rate = pg.rate.cosine { peak = 3e-4, warmup = 2000 } },
  steps     = 100000,
  save      = { every = 1000, keep = 3, at_end = false },
}
