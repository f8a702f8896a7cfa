-- models/gpt2_124m.lua: GPT-2 of 124 million parameters at 1024 tokens in bf16, 524,288 tokens a step as the
-- usual reproduction has it.  Tokens come from data/*.bin (pgrun tokenize), else they are drawn at random.
--   pgrun models/gpt2_124m.lua --steps=100
local gpt2 = require "models.gpt2"
local model = gpt2 "124m"
model.head_chunk = 0 -- all logits at once: there is room, and nothing is computed twice
local files = #pg.fs.glob "data/*.bin" > 0

return {
  model     = model,
  layout    = { dp = "rest" },
  precision = "bf16",
  data      = { tokens = files and "data/*.bin" or nil, random = not files, context = 1024, batch = 512 },
  micro     = 64,
  optim     = { "adamw", betas = { 0.9, 0.95 }, decay = 0.1, clip = 1.0,
                rate = pg.rate.cosine { peak = 6e-4, warmup = 700 } },
  steps     = 19073, -- 10 billion tokens
  save      = { every = 5000 },
}
