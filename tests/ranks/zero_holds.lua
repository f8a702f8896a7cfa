-- ranks: 4
-- What ZeRO keeps in memory at each level, and what it does in bad moments: touching numbers that are elsewhere, an
-- inf on one rank (C17), a branch that one rank uses (C15), other weights on one rank (C16).
local mesh = require "pg.mesh"
local pieces = require "tests.pieces"
local reducer = require "pg.parallel.reducer"
local step = require "pg.step"
local zero = require "pg.parallel.zero"
local c = require "pg.c"
local check = require "tests.check"
local nn = pg.nn
local rank, size = pg.rank(), pg.ranks()

local function same(got, want, what)
  for name, w in pairs(want) do
    local g = got[name]
    assert(#g == #w and #w > 0)
    for i = 1, #w do
      if g[i] ~= w[i] then error(("%s: %s[%d] is %.9g, not %.9g"):format(what, name, i, g[i], w[i])) end
    end
  end
end

-- The same where sums of more than two addends are made in one order: a GPU's order is that of places in a message.
local function alike(got, want, what)
  if c.device() ~= "cuda" then return same(got, want, what) end
  for name, w in pairs(want) do check.close(got[name], w, check.f32) end
end

-- A step as a trainer makes it, from a function that gives a loss.
local function trainer_step(optim, loss_of)
  local sending = reducer.new(optim.segments, true)
  pg.scope(function() loss_of():backward(nil, { done = sending:hook(true) }) end)
  sending:after(true)
  sending:finish()
  return optim:step { reduced = true, bad = sending.bad }
end
local function plain_step(optim, loss_of)
  pg.scope(function() loss_of():backward() end)
  return optim:step()
end

-- ---- what is held ----

local llama = require "models.llama" { blocks = 6, width = 64, heads = 2, vocab = 64, context = 8 }
local BLOCK = 0.2 -- MiB: a block, the first and the last with what is beside them

local function held(tag)
  for _, h in ipairs(pg.memory().holders) do
    if h.tag == tag then return h.bytes end
  end
  return 0
end

-- Bytes after a step, and the most during one, beyond what was there before.
local function measure(level, dtype)
  jit.flush() -- a compiled trace may hold what a closure has captured
  c.collect()
  c.collect()
  mesh.build { dp = size, zero = level }
  local before = { weights = held "weights", gradients = held "gradients", moments = held "moments",
                   masters = held "masters" }
  c.C.pg_mem_reset_peak()
  local at_start = pg.memory().in_use
  local model = pg.build(llama, { dtype = dtype, bucket = BLOCK })
  local birth = pg.memory().peak - at_start
  local optim = pg.optim.adamw(model:parameters(), { rate = 1e-3 })
  local function loss() return (model:loss { tokens = pg.tensor({ { 1, 2, 3, 4 } }, "i32"), share = true,
                                             targets = pg.tensor({ { 2, 3, 4, 5 } }, "i32") }) end
  trainer_step(optim, loss)
  c.C.pg_mem_reset_peak()
  trainer_step(optim, loss)
  local out = { peak = pg.memory().peak - at_start, birth = birth, count = 0, loss = loss():item() }
  zero.gather_values(model.segments)
  for tag, bytes in pairs(before) do out[tag] = held(tag) - bytes end
  for _, s in ipairs(model.segments) do out.count = out.count + s.count end
  return out
end

-- A block of the pool is up to an eighth larger than what was asked.
local function holds(got, want, what)
  assert(got >= want and got <= want * 1.125 + 1024, ("%s: %d bytes, %d are wanted"):format(what, got, want))
end
local most = {}
for level = 0, 3 do
  for _, dtype in ipairs { "f32", "bf16" } do
    local m, what = measure(level, dtype), ("zero %d, %s: "):format(level, dtype)
    local n, width = m.count, dtype == "f32" and 4 or 2
    holds(m.weights, width * n / (level == 3 and size or 1), what .. "weights")
    holds(m.gradients, 4 * n / (level >= 2 and size or 1), what .. "gradients")
    holds(m.moments, 8 * n / (level >= 1 and size or 1), what .. "moments")
    holds(m.masters, dtype == "f32" and 0 or 2 * n / (level >= 1 and size or 1), what .. "masters")
    most[#most + 1] = m
    if #most > 4 then -- level 2 and 3 against the level before, of the same dtype
      local other = most[#most - 2]
      assert(m.peak < other.peak, ("%s: peak %d, a level below %d"):format(what, m.peak, other.peak))
    end
    if level == 3 then assert(m.birth < 4 * n, ("%s: the whole model was here, %d bytes"):format(what, m.birth)) end
  end
end
assert(most[1].loss ~= most[2].loss)
for i = 3, #most do assert(most[i].loss == most[i - 2].loss, "the same training in other layouts") end

-- ---- numbers that are elsewhere ----

mesh.build { dp = size, zero = 3 }
local model = pg.build(llama, { bucket = BLOCK })
assert(#zero.outside(model.segments) == 0)
check.throws(function() model.layers.items[4].mlp.down.weight:totable() end,
             "the numbers of model.layers.2 are not here now")
check.throws(function() model.segments[#model.segments].grad:totable() end,
             "the numbers of the gradient of model.layers.5 to head are not here now")
pg.no_grad(function() -- once more after a walk through the model
  model:forward(pg.tensor({ { 1, 2, 3 } }, "i32"))
end)
check.throws(function() model.segments[1].value:totable() end,
             "the numbers of model.embed_tokens to model.layers.0 are not here now")

-- ---- numbers that are under way ----

-- A trainer's step is over before the others' windows have come; whoever reads a parameter then gets those of now.
local ways = {
  function(p) return unpack(p:totable(), 1, 50) end,
  function(p) return pg.sum(p):item(), p:at(0, 0), p:view({ 1 }, p.count - 1):item() end,
  function(p) return p:stats().mean, tostring(p) end,
  function(p) return unpack(pg.matmul(pg.ones { 1, p.shape[1] }, p):totable()) end,
  function(p) return pg.sum(pg.add(p, 0.5)):item(), pg.sum(pg.concat({ p, p }, 1)):item() end,
}
for level = 1, 2 do
  mesh.build { dp = size, zero = level }
  local m = pg.build(llama, { bucket = BLOCK })
  local optim = pg.optim.adamw(m:parameters(), { rate = 1e-2 })
  local down = m.layers.items[5].mlp.down.weight
  local part = down:view({ down.shape[1] / 2, down.shape[2] }, down.count / 2)
  for i, read in ipairs(ways) do
    trainer_step(optim, function() return (m:loss { tokens = pg.tensor({ { 1, 2, 3, 4 } }, "i32"), share = true,
                                                    targets = pg.tensor({ { 2, 3, 4, 5 } }, "i32") }) end)
    if rank == size - 1 then require("pg.host").nap(0.05) end
    local t = i % 2 == 0 and part or down
    local got = { read(t) }
    zero.ready(m.segments)
    for k, x in ipairs { read(t) } do
      assert(got[k] == x, ("zero %d, way %d: read too early: %s, %s"):format(level, i, tostring(got[k]), tostring(x)))
    end
  end
end

-- ---- C17: an inf on one rank ----

local SPOILER = 2
local spoiling = false
local spoil = pg.op { name = "spoil", forward = function(_, x) return x:clone() end, grad = function(_, dy)
  local g = dy:clone()
  if spoiling and rank == SPOILER then g:view({ 1 }, 5):fill(1 / 0) end
  return g
end }
local Spoilt = nn.class "Spoilt"
function Spoilt:init() self.shift = self:param("shift", { 8 }) end
function Spoilt:forward(x) return pg.add(x, spoil(self.shift)) end

local Chain = nn.class "Chain"
function Chain:init(middle)
  self.layers = self:add("", nn.Sequential { { "a", nn.Linear { inputs = 8, outputs = 8, std = 0.3 } },
                                             { "b", middle }, { "c", nn.Linear { inputs = 8, outputs = 8 } } })
end
function Chain:forward(x) return self.layers(x) end

local function chain(level, middle, step_of, optim_of, bucket)
  mesh.build { dp = size, zero = level }
  local m = pg.build(Chain(middle), { bucket = bucket })
  local optim = optim_of(m:parameters())
  local function loss() return pg.sum(pg.square(m(pg.full({ 3, 8 }, rank + 1)))) end
  return m, function() return step_of(optim, loss) end
end
local function adamw(list) return pg.optim.adamw(list, { rate = 1e-2 }) end

for _, step_of in ipairs { trainer_step, plain_step } do
  local want
  for level = 0, 7 do -- each level with all in one segment, then with a segment for each tensor
    local m, take = chain(level % 4, Spoilt(), step_of, adamw, level > 3 and 0 or nil)
    take()
    local before = pieces.weights(m)
    spoiling = true
    check.throws(take, "step 2, rank 2: the gradient norm is inf; first bad gradient: b.shift; nothing was updated")
    spoiling = false
    same(pieces.weights(m), before, "after the refused step")
    take()
    want = want or pieces.weights(m)
    alike(pieces.weights(m), want, ("zero %d, after an inf"):format(level % 4))
  end
end

-- ---- C15: a branch that one rank uses ----

local Fork = nn.class "Fork"
function Fork:init()
  self.always = self:add("always", nn.Linear { inputs = 8, outputs = 8, std = 0.3 })
  self.some = self:add("some", nn.Linear { inputs = 8, outputs = 8, std = 0.3 })
  self.never = self:add("never", nn.Linear { inputs = 8, outputs = 8 })
end
function Fork:forward(x)
  local y = self.always(x)
  return rank == 0 and pg.add(y, self.some(x)) or y
end
local function sgd(list) return pg.optim.sgd(list, { rate = 1e-3 }) end
for _, step_of in ipairs { trainer_step, plain_step } do
  local want
  for level = 0, 7 do
    local m, take = chain(level % 4, Fork(), step_of, sgd, level > 3 and 0 or nil)
    for _ = 1, 3 do take() end
    want = want or pieces.weights(m)
    alike(pieces.weights(m), want, ("zero %d, a branch on one rank"):format(level % 4))
  end
end

-- ---- sums over other axes ----

-- Gradients of which ranks of tp, or two stages, make parts each: the sum over all ranks, as dp over all gives it.
local function clipped(list) return pg.optim.adamw(list, { rate = 1e-2, clip = 1 }) end
local function two_axes(layout, prepare)
  mesh.build(layout)
  local m = pg.build(Chain(nn.Linear { inputs = 8, outputs = 8, bias = true }))
  for _, s in ipairs(m.segments) do prepare(s) end
  local optim = clipped(m:parameters())
  local norms = {}
  for i = 1, 3 do
    norms[i] = trainer_step(optim, function() return pg.sum(pg.square(m(pg.full({ 3, 8 }, rank + i)))) end)
  end
  return norms, pieces.weights(m)
end
local norms, numbers = two_axes({ dp = size }, function() end)
local function near(got, want)
  for i, x in ipairs(want) do assert(math.abs(got[i] - x) <= 1e-5 * math.max(math.abs(x), 0.1)) end
end
local prepare = {}
function prepare.tp(s)
  s.sums = { { first = 0, count = 64, axis = mesh.tp }, { first = 64, count = s.count - 64, axis = mesh.tp } }
end
function prepare.pp(s)
  s.tied = mesh.pp
  for _, p in ipairs(s.params) do p.stages = 2 end
end
for level = 0, 3 do
  for _, axis in ipairs { "tp", "pp" } do
    local n, w = two_axes({ dp = 2, [axis] = 2, zero = level, sequence = false }, prepare[axis])
    near(n, norms)
    for name, list in pairs(numbers) do near(w[name], list) end
  end
end

-- ---- C16: other weights on one rank ----

for level = 1, 3 do
  mesh.build { dp = size, zero = level }
  local m = pg.build(llama, { seed = rank == 1 and 1 or 0 })
  local optim = pg.optim.adamw(m:parameters(), { rate = 1e-3 })
  check.throws(function() optim:step() end, "first tensor that differs: model.embed_tokens.weight")
end

-- ---- looking at gradients ----

for level = 0, 3 do
  mesh.build { dp = size, zero = level }
  local m, count, here = pg.build(llama), 0, 0
  plain_step(pg.optim.adamw(m:parameters(), { rate = 1e-3 }), function()
    return m:loss { tokens = pg.tensor({ { rank, 2 } }, "i32"), targets = pg.tensor({ { 2, 3 } }, "i32") }
  end)
  for _, s in ipairs(m.segments) do
    for _, p in ipairs(s.params) do count = count + p.count end
  end
  for _, g in ipairs(pg.gradients(m)) do here = here + g.stats.count end
  assert(mesh.dp:sum_numbers({ here })[1] == (level == 0 and size or 1) * count)
  local ok, g = pcall(m.gradient, m, "model.norm.weight")
  assert(ok == (level == 0) and (ok or g:find("no rank has that of model.norm.weight whole", 1, true)))
end

-- ---- the plan ----

local messages = { 1, 2, 4, 9 } -- one segment
local per = { 2 * 4, 4 + 4, 3 * 4 + 4, 3 * 4 + 2 * 3 * 4 } -- bytes a number, 3 micro-batches
for level = 0, 3 do
  mesh.build { dp = size, zero = level }
  local m = pg.build(llama)
  local count = 0
  for _, s in ipairs(m.segments) do count = count + s.count end
  local bytes, calls = zero.sent(m.segments, 3)
  assert(bytes == per[level + 1] * count * (size - 1) / size and calls == messages[level + 1])
end
step.set { INV_TOKENS = 0 }
pg.barrier()
