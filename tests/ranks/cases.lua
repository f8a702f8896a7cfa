-- ranks: 2
-- Uneven ranks: labels that count on one rank only or nowhere (C02), a last batch of unequal shares, a branch that one
-- rank uses (C15), weights that differ (C16).  Each is compared with what one process would do, written out here.
local check = require "tests.check"
local rank = pg.rank()
local IGNORE = -100

local function near(got, want, what)
  local fine = math.abs(got - want) <= 1e-6 * math.max(1, math.abs(want))
  if not fine then -- or not a number
    error(("%s is %.9g, not %.9g"):format(what, got, want), 2)
  end
end
local function numbers(t) return t:view({ t.count }, 0):totable() end
local function all_near(got, want, what)
  assert(#got == #want, what)
  for i = 1, #want do near(got[i], want[i], ("%s[%d]"):format(what, i)) end
end

-- ---- C02 ----
local llama = require "models.llama" { blocks = 1, width = 16, heads = 2, vocab = 11, context = 4 }
local model = pg.build(llama)
local tokens = { { 1, 2, 3, 4 }, { 5, 6, 7, 8 } }
local function batch(rows, targets)
  return { tokens = pg.tensor(rows, "i32"), targets = pg.tensor(targets, "i32"), ignore = IGNORE, share = true }
end
local function gradients()
  local out = {}
  for _, s in ipairs(model.segments) do
    s:zero_unused()
    for _, g in ipairs(numbers(s.grad)) do out[#out + 1] = g end
    s:fresh()
  end
  return out
end
-- Loss and gradients of both rows in one batch: what any placing of the rows must give.
local function alone(targets)
  local loss = model:loss(batch(tokens, targets))
  loss:backward()
  return loss:item(), gradients()
end
-- The same, a row on each rank, through a batch of one's own.
local function apart(targets)
  local mine = batch({ tokens[rank + 1] }, { targets[rank + 1] })
  mine.share = nil
  local loss = model:loss(mine)
  loss:backward()
  require("pg.parallel.reducer").average(model.segments)
  return loss:item(), gradients()
end
for _, targets in ipairs { { { 2, 3, 4, 5 }, { 6, 7, 8, 9 } },
                           { { IGNORE, IGNORE, IGNORE, 5 }, { 6, 7, 8, 9 } },
                           { { IGNORE, IGNORE, IGNORE, IGNORE }, { 6, 7, IGNORE, 9 } },
                           { { 2, 3, 4, 5 }, { IGNORE, IGNORE, IGNORE, IGNORE } },
                           { { IGNORE, IGNORE, IGNORE, IGNORE }, { IGNORE, IGNORE, IGNORE, IGNORE } } } do
  local want, wants = alone(targets)
  local got, gots = apart(targets)
  near(got, want, "loss")
  all_near(gots, wants, "gradient")
end
local loss = apart { { IGNORE, IGNORE, IGNORE, IGNORE }, { IGNORE, IGNORE, IGNORE, IGNORE } }
assert(loss == 0, "nothing counts, and the loss is " .. loss)

-- ---- a last batch of unequal shares ----

-- Rows of four: one process has all, or rank 0 the first three and rank 1 the last.
local four = { { 1, 2, 3, 4 }, { 5, 6, 7, 8 }, { 9, 10, 0, 1 }, { 2, 4, 6, 8 } }
local marks = { { 2, 3, 4, IGNORE }, { 6, IGNORE, 8, 9 }, { 10, 0, 1, 2 }, { 4, 6, 8, 10 } }
local function shares(zero, micro)
  pg.mesh.dp, pg.mesh.pp, pg.mesh.tp = nil, nil, nil
  local run = pg.parallel(llama, { zero = zero }, { micro = micro })
  local first, last = rank == 0 and 1 or 4, rank == 0 and 3 or 4
  local mine = { tokens = pg.tensor({ unpack(four, first, last) }, "i32"),
                 targets = pg.tensor({ unpack(marks, first, last) }, "i32") }
  local value = run:gradients(mine)
  return value, pg.optim.sgd(run:parameters(), { rate = 0 }):step()
end
local together = pg.build(llama)
local whole = together:loss(batch(four, marks))
whole:backward()
local square = 0
for _, p in ipairs(together:parameters()) do
  for _, g in ipairs(numbers(p.grad)) do square = square + g * g end
end
for zero = 0, 3 do
  for _, micro in ipairs { 3, 1 } do -- 3: as many as there are
    if zero >= 2 and micro == 1 then
      check.throws(function() shares(zero, micro) end,
                   ("this rank's batch makes %d micro-batches, that of another rank of dp more or fewer; "
                    .. "layout.zero = %d"):format(rank == 0 and 3 or 1, zero))
    else
      local value, norm = shares(zero, micro < 3 and micro or nil)
      near(value, whole:item(), "the loss of unequal shares")
      near(norm, math.sqrt(square), "its gradient's norm")
    end
  end
end
pg.mesh.build {}

-- ---- C15 ----
local Branch = pg.nn.class "Branch"
function Branch:init()
  self.always = self:add("always", pg.nn.Linear { inputs = 3, outputs = 3 })
  self.some = self:add("some", pg.nn.Linear { inputs = 3, outputs = 3 })
  self.never = self:add("never", pg.nn.Linear { inputs = 3, outputs = 3 })
end
function Branch:forward(x, branch)
  local y = self.always(x)
  return branch and pg.add(y, self.some(x)) or y
end
local x = pg.tensor { { 1, 2, 3 }, { 4, 5, 6 } }
local forked = pg.build(Branch())
local function use(branch) pg.sum(pg.square(forked(x, branch))):backward() end
local function branch_gradients(stepped)
  local out = {}
  for _, s in ipairs(forked.segments) do
    if not stepped then s:zero_unused() end
    for _, p in ipairs { forked.always.weight, forked.some.weight, forked.never.weight } do
      if p.segment == s then out[p.name] = numbers(p.grad) end
    end
    s:fresh()
  end
  return out
end
use(true)
local with = branch_gradients()
use(false)
local without = branch_gradients()
use(rank == 0)
local optim = pg.optim.sgd(forked:parameters(), { rate = 0.01 })
optim:step()
local shared = branch_gradients(true)
assert(next(with) and #with["always.weight"] == 9)
for name, g in pairs(with) do
  local want = {}
  for i = 1, #g do want[i] = (g[i] + without[name][i]) / 2 end -- unused: gradient 0
  all_near(shared[name], want, name)
end
assert(shared["some.weight"][1] ~= 0 and shared["never.weight"][1] == 0)
require("pg.parallel.same_weights").check(forked.segments)

-- ---- C16 ----
local other = pg.build(llama, { seed = rank })
local ids = batch({ tokens[rank + 1] }, { { 2, 3, 4, 5 } })
other:loss(ids):backward()
local before = numbers(other.segments[1].value)
local function step_of(m) return function() pg.optim.adamw(m:parameters(), { rate = 1e-3 }):step() end end
check.throws(step_of(other), "start from different weights; first tensor that differs: model.embed_tokens.weight")
all_near(numbers(other.segments[1].value), before, "a weight after the refusal")
-- one number in one tensor of one rank is enough
local third = pg.build(llama)
if rank == 1 then third.layers.items[3].weight:view({ 1 }, 5):fill(0.5) end
check.throws(step_of(third), "first tensor that differs: lm_head.weight")
pg.barrier()
