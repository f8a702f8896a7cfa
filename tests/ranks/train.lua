-- ranks: 2
-- What one rank of a training meets, all hear: a bad loss, a failed save; and resuming keeps the bits.
local c = require "pg.c"
local checkpoint = require "pg.checkpoint"
local engine = require "pg.parallel.engine"
local elementwise = require "pg.ops.elementwise"
local fs = require "pg.fs"
local random = require "pg.random"
local training = require "tests.training"
local fails, rank = training.fails, pg.rank()

-- Only rank 1 has a bad loss, and both name it.
fails("step 1, rank 1: the loss is nan", { loss = function(model, batch)
  return pg.scale(model:loss(batch), rank == 1 and 0 / 0 or 1)
end }, "nan")

-- Only rank 1 has a bad gradient under a finite loss; the sum would spread it.
local explode = pg.op { name = "explode", forward = function(_, x) return x:clone() end,
                        grad = function(_, dy) return pg.scale(dy, rank == 1 and 1 / 0 or 1) end }
local function bad_gradient(model, batch) return explode((model:loss(batch))) end
local says = "step 1, rank 1: the gradient norm is nan; first bad gradient: "
fails(says, { loss = bad_gradient }, "bad-gradient")

-- As on GPUs: nothing is looked at on the way, and the step is made again to find the one to blame.
local looks = engine.looks
for zero = 0, 3 do
  engine.looks = function() return false end
  fails(says, { loss = bad_gradient, layout = { zero = zero } }, "bad-gradient-" .. zero)
  engine.looks = looks
end

-- Made again, it draws the same numbers, those without a key too.
local function bad_draw(model, batch)
  local loss = pg.add(model:loss(batch), pg.scale(pg.sum(pg.rand({ 1 })), 0))
  pg.dropout(pg.tensor { 1 }, 0.5)
  return elementwise.dropout_calls == 1 and random.calls == 1 and explode(loss) or loss
end
elementwise.dropout_calls, random.calls = 0, 0
engine.looks = function() return false end
fails(says, { loss = bad_draw }, "bad-draw")

-- Without dp nothing has been summed: the stage that has the bad gradient names it, and the other does not wait for it.
local function bad_head(model, batch)
  local list = model.segments[#model.segments].params
  local nothing = pg.scale(pg.sum(explode(list[#list])), 1e-30)
  return pg.add(model:loss(batch), nothing)
end
fails("step 1, rank 1: the gradient norm is inf; first bad gradient: model.norm", {
  loss = bad_head, layout = { pp = 2 },
  model = require "models.llama" { blocks = 2, width = 32, heads = 2, vocab = 259, context = 32 } }, "bad-stage")
engine.looks = looks

-- Rank 0 cannot write: both stop, or both go on.
local function full(state)
  if state.step ~= 2 or rank ~= 0 then return end
  c.collect() -- or the files of a run before are closed, and fail, in place of the save
  c.C.pg_fs_fail_after(1)
end
fails("No space left on device", { on_step = full, save = { every = 1 } }, "stops")
local records, folder = training.run({ on_step = full, save = { every = 1, keep = 9, on_error = "go on" } }, "goes-on")
assert(#records == 6 and #checkpoint.list(folder) == 5)

-- Stopped after 3 steps and resumed: the same bits.
local want = training.run({}, "whole")
local first = training.recipe().optim
first.rate = pg.rate.cosine { peak = 1e-3, warmup = 3, steps = 6 }
training.run({ steps = 3, save = {}, optim = first }, "resumed")
local got = training.run({}, "resumed", { "--resume" })
for step = 1, 6 do
  for _, key in ipairs { "step", "loss", "rate", "grad_norm", "tokens" } do
    local a, b = got[step][key], want[step][key]
    assert(a == b, ("step %d: %s is %.9g, not %.9g"):format(step, key, a, b))
  end
end

-- Rank 0 takes longer to read what it goes on from than ranks usually wait for one another.
local hash, usual, slowest = fs.hash, c.C.pg_comm_timeout(2), checkpoint.slowest
function fs.hash(...)
  local till = pg.time() + 1.2
  while pg.time() < till do end
  return hash(...)
end
checkpoint.slowest = 1000
training.run({ save = {} }, "resumed", { "--resume" })
fs.hash, checkpoint.slowest = hash, slowest
c.C.pg_comm_timeout(usual)

-- What rank 0 finds wrong with a run is raised on both.
fails("holds a run already", {}, "whole")
pg.barrier() -- a rank that left would not be waited for
