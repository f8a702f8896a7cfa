-- models/gpt2_1.5b.lua: GPT-2 of 1.5 billion parameters at 1024 tokens in bf16.  Tokens come from data/*.bin, else
-- they are drawn at random.
--   pgrun models/gpt2_1.5b.lua --data.batch=128 --steps=20
local gpt2 = require "models.gpt2"
local model = gpt2 "1.5b"
model.head_chunk = 0 -- all logits at once: there is room, and nothing is computed twice
local files = #pg.fs.glob "data/*.bin" > 0

return {
  model     = model,
  layout    = { dp = "rest" },
  precision = "bf16",
  data      = { tokens = files and "data/*.bin" or nil, random = not files, context = 1024, batch = 512 },
  micro     = 32,
  optim     = { "adamw", betas = { 0.9, 0.95 }, decay = 0.1, clip = 1.0,
                rate = pg.rate.cosine { peak = 2e-4, warmup = 700 } },
  steps     = 50000,
  save      = { every = 1000 },
}
