-- ranks: 4
-- A layout's bucket decides how many messages there are and when they go, and nothing else: the same bits for every
-- size in each layout, with a frozen parameter, one that is never used, a tied head, one on a branch of rank 0.
local check = require "tests.check"
local mesh = require "pg.mesh"
local pieces = require "tests.pieces"
local reducer = require "pg.parallel.reducer"
local nn = pg.nn
local rank, size = pg.rank(), pg.ranks()
local VOCAB, CONTEXT, ROWS, STEPS = 23, 8, 4, 3
local KIB = 1 / 1024 -- MiB

-- ---- the same training ----

local Fork = nn.class "Fork" -- holds a weight that only rank 0 uses and one that nobody does
function Fork:init(o)
  self.always, self.some = self:add("always", nn.Linear { inputs = o.width, outputs = o.width, bias = true }),
                           self:add("some", nn.Linear { inputs = o.width, outputs = o.width })
  self.never = self:param("never", { 5, 3 })
end
function Fork:forward(x)
  local y = pg.add(x, self.always(x))
  return mesh.dp.rank == 0 and mesh.tp.size == 1 and pg.add(y, self.some(x)) or y
end

local Model = nn.class("Model", nn.LM)
function Model:init()
  local width = 12
  self.vocab, self.context = VOCAB, CONTEXT
  local embedding = nn.Embedding { entries = VOCAB, width = width, std = 0.5 }
  local items = { { "embed", embedding }, { "fork", Fork { width = width } } }
  for i = 1, 3 do
    items[#items + 1] = { "block" .. i, nn.Block {
      norm1 = { "norm1", nn.RMSNorm { width = width } }, norm2 = { "norm2", nn.RMSNorm { width = width } },
      attention = { "attention", nn.Attention { width = width, heads = 2, std = 0.3 } },
      mlp = { "mlp", nn.GatedMLP { width = width, ffn = 10, std = 0.3 } } } }
  end
  items[#items + 1] = { "", nn.Head { norm = { "norm", nn.RMSNorm { width = width } }, width = width, vocab = VOCAB,
                                      std = 0.5, tied = embedding }, "head" }
  self.layers = self:add("", nn.Sequential(items))
  self.spare = self:param("spare", { VOCAB }) -- in no item
end

-- This rank's share of a step's batch; some targets do not count.
local function batch(number)
  local tokens, targets = {}, {}
  for i = 1, ROWS do
    tokens[i], targets[i] = {}, {}
    for t = 1, CONTEXT do
      local at = ((number * mesh.dp.size + mesh.dp.rank) * ROWS + i) * CONTEXT + t
      tokens[i][t] = at * at % VOCAB
      targets[i][t] = at % 5 == 0 and -100 or (at * at + 2 * at + 1) % VOCAB
    end
  end
  return { tokens = pg.tensor(tokens, "i32"), targets = pg.tensor(targets, "i32") }
end

-- STEPS steps -> every number that comes of them, by name; how many segments.
local function train(fields, micro)
  mesh.dp, mesh.pp, mesh.tp = nil, nil, nil
  local run = pg.parallel(Model(), fields, { micro = micro, seed = 5 })
  for _, entry in ipairs(run.model:named()) do
    if entry.name == "block2.norm1.weight" then entry.parameter.requires_grad = false end
  end
  local optim = pg.optim.adamw(run:parameters(), { rate = 1e-2, betas = { 0.9, 0.95 }, decay = 0.1, clip = 0.5 })
  local out = {}
  for number = 1, STEPS do
    out["loss " .. number] = run:gradients(batch(number))
    out["norm " .. number] = optim:step()
  end
  assert(out["loss 3"] < out["loss 1"] and out["norm 1"] > 0.5)
  for name, list in pairs(pieces.weights(run.model)) do
    for i, x in ipairs(list) do out[name .. " " .. i] = x end
  end
  return out, #run.model.segments
end

-- On a GPU the order in which more than two ranks' addends are summed is that of their place in a message.
local function near(got, want, what)
  local list, expected = {}, {}
  for name, x in pairs(want) do list[#list + 1], expected[#expected + 1] = got[name], x end
  local off = check.error(list, expected)
  if off > check.f32 then error(("%s: off by %.3g"):format(what, off)) end
end

-- The norm is a sum in double, over the segments: its last bits are of their order.
local function same(got, want, what)
  if mesh.dp.size > 2 and require("pg.c").device() == "cuda" then return near(got, want, what) end
  for name, x in pairs(want) do
    local y = got[name]
    if not (y == x or name:find "^norm" and math.abs(y - x) <= 1e-14 * x) then
      error(("%s: %s is %.17g, not %.17g"):format(what, name, y or 0 / 0, x))
    end
  end
end

local function text(fields)
  local words = {}
  for _, key in ipairs { "dp", "pp", "tp", "zero", "schedule", "bucket" } do
    if fields[key] then words[#words + 1] = key .. " " .. tostring(fields[key]) end
  end
  return table.concat(words, ", ")
end

for _, fields in ipairs { { dp = 4 }, { dp = 2, pp = 2, schedule = "zb-h1" }, { dp = 2, tp = 2 },
                          { dp = 2, pp = 2, schedule = "interleaved" } } do
  for zero = 0, 3 do
    for _, micro in ipairs(fields.dp == 4 and { 4, 1 } or { 1 }) do -- 1: accumulated
      fields.zero, fields.bucket = zero, 100
      local want, least = train(fields, micro)
      local before = least
      for _, bucket in ipairs { 256, 0.1, 0.001, 0 } do -- the default first, which is not said
        fields.bucket = bucket < 256 and bucket or nil
        local got, segments = train(fields, micro)
        same(got, want, ("%s, micro %d"):format(text(fields), micro))
        assert(segments >= before)
        before = segments
      end
      assert(before > 2 * least, "small buckets make more segments")
    end
  end
end

-- ---- how many messages, and when ----

local calls -- kinds of what is begun and waited for later, in order
local function listen(axis)
  for _, kind in ipairs { "all_reduce", "reduce_scatter", "all_gather" } do
    local call = axis[kind]
    axis[kind] = function(self, a, b, c, d)
      local async = d or kind == "all_reduce" and c or kind == "all_gather" and c
      if async then calls[#calls + 1] = kind end
      return call(self, a, b, c, d)
    end
  end
end

local first = pg.op { name = "first", forward = function(_, x) return x:clone() end, grad = function(_, dy)
  calls[#calls + 1] = "the first item"
  return dy:clone()
end }
local Begin = nn.class "Begin"
function Begin:init(o) self.w = self:param("w", { o.width, o.width }) end
function Begin:forward(x) return pg.linear(x, first(self.w)) end

-- What a step of `micro` micro-batches begins, on a chain of items, in order.
local function step_of(level, bucket, items, micro)
  mesh.build { dp = size, zero = level }
  listen(mesh.dp)
  local Chain = nn.class "Chain"
  function Chain:init() self.layers = self:add("", nn.Sequential(items())) end
  function Chain:forward(x) return self.layers(x) end
  local model = pg.build(Chain(), { bucket = bucket })
  local optim = pg.optim.sgd(model:parameters(), { rate = 1e-3 })
  for _ = 1, 2 do -- the second counts: before the first, weights are compared
    calls = {}
    local sending = reducer.new(optim.segments)
    for i = 1, micro do
      pg.scope(function()
        pg.sum(pg.square(model(pg.full({ 2, 8 }, rank + i)))):backward(nil, { done = sending:hook(i == micro) })
      end)
      sending:after(i == micro)
    end
    sending:finish()
    optim:step { reduced = true, bad = sending.bad }
  end
  return calls
end

local function count(list, kind)
  local n = 0
  for _, call in ipairs(list) do if call == kind then n = n + 1 end end
  return n
end

local function many()
  local items = {}
  for i = 1, 200 do items[i] = { "item" .. i, nn.Linear { inputs = 8, outputs = 8, std = 0.3 } } end
  return items
end
local function counted(level, bucket, micro)
  local list = step_of(level, bucket, many, micro)
  return { count(list, "all_reduce"), count(list, "reduce_scatter"), count(list, "all_gather") }
end
local function equal(got, want, what)
  for i = 1, 3 do
    if got[i] ~= want[i] then
      error(("%s: %s, not %s"):format(what, table.concat(got, " "), table.concat(want, " ")))
    end
  end
end
-- 200 items of 256 bytes: one message, or 13 of 16 items (the sixteenth more makes it 17, and 12 of them).
equal(counted(0, nil, 2), { 1, 0, 0 }, "zero 0")
equal(counted(0, 0, 2), { 200, 0, 0 }, "zero 0, each tensor")
equal(counted(0, 4 * KIB, 2), { 12, 0, 0 }, "zero 0, 4 KiB")
equal(counted(1, nil, 2), { 0, 1, 1 }, "zero 1")
equal(counted(1, 4 * KIB, 2), { 0, 12, 12 }, "zero 1, 4 KiB")
equal(counted(2, nil, 2), { 0, 2, 1 }, "zero 2")
equal(counted(2, 4 * KIB, 2), { 0, 24, 12 }, "zero 2, 4 KiB")
equal(counted(3, nil, 2), { 0, 2, 1 }, "zero 3: what is here stays until another is wanted, or it is updated")
local list = counted(3, 4 * KIB, 2) -- each in turn, and back; the last and the first are wanted twice in a row
equal(list, { 0, 24, 12 + 11 + 11 + 11 }, "zero 3, 4 KiB")

-- A large item is sent in parts, each as soon as backward has made it, before it is through with the item (but for
-- level 3, where what is sent goes item by item).
local function large()
  return { { "large", nn.Sequential { { "begin", Begin { width = 8 }, "large" },
                                      { "middle", nn.Linear { inputs = 8, outputs = 8, std = 0.3 }, "large" },
                                      { "last", nn.Linear { inputs = 8, outputs = 8, std = 0.3 }, "large" } } } }
end
for level, kind in ipairs { "all_reduce", "reduce_scatter", "reduce_scatter" } do
  local whole, parts = step_of(level - 1, nil, large, 1), step_of(level - 1, KIB / 4, large, 1)
  assert(whole[1] == "the first item" and count(whole, kind) == 1, table.concat(whole, ", "))
  assert(count(parts, kind) == 3, table.concat(parts, ", "))
  assert(parts[1] == kind and parts[2] == kind and parts[3] == "the first item", table.concat(parts, ", "))
end
pg.barrier()
