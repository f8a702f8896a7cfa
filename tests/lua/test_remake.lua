-- recompute = "norms": what norms and activations made is made again in backward, with the same bits.
local tape = require "pg.tape"
local check = require "tests.check"

local tests = {}

local sizes = { blocks = 2, width = 64, heads = 4, vocab = 50, context = 32 }

-- Gradients of a model of this kind, and the bytes that its records hold before backward.
local function train(model, remake)
  local ids = {}
  for b = 1, 4 do
    ids[b] = {}
    for t = 1, sizes.context do ids[b][t] = (b * 31 + t * 7) % sizes.vocab end
  end
  local batch = { tokens = pg.tensor(ids, "i32"), targets = pg.tensor(ids, "i32") }
  for _, s in ipairs(model.segments) do s:fresh() end
  local before, held = pg.memory().in_use, nil
  tape.remake = remake
  pg.scope(function()
    local loss = model:loss(batch)
    held = pg.memory().in_use - before
    loss:backward()
  end)
  tape.remake = false
  local gradients = {}
  for i, s in ipairs(model.segments) do gradients[i] = s.grad:totable() end
  return gradients, held
end

for _, name in ipairs { "llama", "gpt2" } do
  tests["test_" .. name] = function()
    local model = pg.build(require("models." .. name)(sizes))
    local kept, all = train(model, false)
    local again, less = train(model, true)
    check.equal(again, kept)
    check.is_true(less < 0.75 * all, ("%s: %d bytes held with remake, %d without"):format(name, less, all))
  end
end

check.run(tests)
