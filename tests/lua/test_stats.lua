-- test_stats.lua: t:stats() for every dtype and beyond one piece; gradients and activations by name.
local check = require "tests.check"
local equal, close = check.equal, check.close
local tests = {}

local function holds(text, part) check.is_true(tostring(text):find(part, 1, true) ~= nil, tostring(text)) end

function tests.test_values()
  for _, dtype in ipairs { "f32", "f64", "bf16", "f16", "i32", "i64", "i16", "u8" } do
    local s = pg.tensor({ { 1, 2, 3 }, { 4, 5, 9 } }, "f32"):to(dtype):stats()
    close(s.mean, 4, check.f64)
    close(s.std, math.sqrt(40 / 6), check.f64)
    equal({ s.min, s.max, s.nonfinite, s.count, s.dtype }, { 1, 9, 0, 6, dtype })
    holds(s, "[2,3] " .. dtype .. "  mean 4  std 2.582  min 1  max 9  |")
  end
end

function tests.test_not_finite()
  local s = pg.tensor({ 1, 0 / 0, 3, math.huge, -math.huge }):stats()
  equal({ s.mean, s.std, s.min, s.max, s.nonfinite }, { 2, 1, 1, 3, 3 })
  holds(s, "NOT FINITE 3")
  s = pg.tensor({ 0 / 0 }):stats()
  equal({ s.nonfinite, s.mean }, { 1, nil })
  equal(tostring(s), "[1] f32  NOT FINITE 1")
  equal(tostring(pg.empty { 0, 3 }:stats()), "[0,3] f32  empty")
  check.throws(function() pg.stats(3) end, "stats: a tensor is wanted, got number")
end

-- More than a piece, with the largest in the last one.
function tests.test_pieces()
  local n = 2^20 + 1000
  local t = pg.randn({ n }, { key = "stats", mean = 5 }):to "bf16"
  local last = t:view({ 1 }, n - 1)
  last:fill(64)
  last:free()
  local s = t:stats()
  check.is_true(math.abs(s.mean - 5) < 0.01 and math.abs(s.std - 1) < 0.01, tostring(s))
  equal(s.max, 64)
  local sum = 0
  for _, k in ipairs(s.histogram) do sum = sum + k end
  check.is_true(sum >= 16384 and sum <= 17000)
end

function tests.test_histogram()
  local s = pg.tensor({ 0, 0, 0, 0, 0, 0, 0, 23.9 / 23.9 }):stats()
  holds(s, "|█" .. (" "):rep(22) .. "▂|")
  holds(pg.full({ 10 }, 7):stats(), "mean 7  std 0  min 7  max 7")
end

local function small()
  return pg.build(require "models.llama" { blocks = 1, width = 16, heads = 2, vocab = 11, context = 8 })
end

local function step(model)
  local ids = pg.tensor({ { 1, 2, 3, 4, 5, 6, 7, 8 } }, "i32")
  pg.scope(function() model:loss { tokens = ids, targets = ids }:backward() end)
end

function tests.test_gradients()
  local model = small()
  step(model)
  local name = model:named()[1].name
  local g = model:gradient(name)
  equal(g.shape, model:named()[1].piece.shape)
  local list = pg.gradients(model, name)
  equal(#list, 1)
  equal(tostring(list[1].stats), tostring(g:stats()))
  equal(#pg.gradients(model), #model:named())
  holds(pg.gradients(model, "no such"), "no gradient has such a name")
  check.throws(function() model:gradient(name .. "x") end, "did you mean " .. name .. "?")
end

function tests.test_activations()
  local model = small()
  local seen = pg.watch_activations(model)
  holds(seen, "nothing has run yet")
  step(model)
  check.is_true(#seen > 5)
  local text = tostring(seen)
  holds(text, "mean")
  check.is_true(not text:find("not seen", 1, true), text)
  step(model)
  equal(tostring(seen), text) -- once
  check.throws(function() pg.watch_activations(model, "zzz") end, 'no module has "zzz" in its name')
  check.throws(function() pg.watch_activations(3) end, "a model is wanted, got number")
end

check.run(tests)
