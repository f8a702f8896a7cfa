-- ranks: 4
-- Over stages as over dp: what one rank of a training meets, all hear; resuming keeps the bits; who is slow is named.
local busy = require "pg.busy"
local mesh = require "pg.mesh"
local training = require "tests.training"
local rank = pg.rank()

local function changes(more)
  local all = { model = require "models.llama" { blocks = 4, width = 32, heads = 2, vocab = 259, context = 32 },
                layout = { pp = 2, zero = 1 }, micro = 2 }
  for k, v in pairs(more or {}) do all[k] = v end
  return all
end
local function fails(text, more, name) training.fails(text, changes(more), name) end

-- ---- one rank's mistake ----

-- Ranks 2 and 3 are the last stage.
fails("step 1, rank 3: the loss is nan", { loss = function(model, batch)
  return pg.scale(model:loss(batch), rank == 3 and 0 / 0 or 1)
end }, "nan")

local explode = pg.op { name = "explode", forward = function(_, x) return x:clone() end,
                        grad = function(_, dy) return pg.scale(dy, rank == 3 and 1 / 0 or 1) end }
local function bad_gradient(model, batch) return explode((model:loss(batch))) end
fails("step 1, rank 3: the gradient norm is nan; first bad gradient: ", { loss = bad_gradient }, "bad-gradient")

-- ---- resumed ----

local optim = training.recipe().optim
optim.rate = pg.rate.cosine { peak = 1e-3, warmup = 3, steps = 6 }
for _, layout in ipairs { { pp = 2, zero = 1 }, { pp = 4, schedule = "zb-h1" }, { pp = 2, tp = 2 } } do
  local want = training.run(changes { layout = layout }, "whole")
  training.run(changes { layout = layout, steps = 3, save = {}, optim = optim }, "resumed")
  local got = training.run(changes { layout = layout }, "resumed", { "--resume" })
  for step = 1, 6 do
    for _, key in ipairs { "step", "loss", "rate", "grad_norm", "tokens" } do
      local a, b = got[step][key], want[step][key]
      assert(a == b, ("pp %d, step %d: %s is %.9g, not %.9g"):format(layout.pp, step, key, a, b))
    end
  end
  training.forget "whole"
  training.forget "resumed"
end

-- ---- who is slow ----

local b = busy.new()
pg.barrier()
for _ = 1, 3 do
  local start = pg.time()
  repeat until pg.time() - start >= (rank == 2 and 0.3 or 0.1) -- seconds
  local numbers = { 7 }
  b:add(numbers)
  numbers = mesh.world:sum_numbers(numbers)
  b:note(numbers)
  assert(numbers[1] == 28 and #numbers == 5)
end
local said = b:slowest()
assert(said and said:find "^slowest rank 2 %(%+%d+ %%%)$", tostring(said))
b:reset()
assert(b:slowest() == nil)
pg.barrier()
