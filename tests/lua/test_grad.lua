-- test_grad.lua: the gradient of every op by central differences in f64, from the table in cases.lua.
-- For each case, L = sum(w . f(inputs)) with random w:
--   every input along random directions and at single elements, by differences;
--   walked twice without a reset, each gradient is doubled: rules write, then add;
--   asked for alone, each input's gradient is the same;
--   in f32, the gradient is that of f64.
local check = require "tests.check"
local cases = require "tests.lua.cases"
local tape = require "pg.tape"
local tests = {}

local H = 1e-5 -- step of the differences: their error is about H^2 and 1e-16 / H
local DIRECTIONS, ELEMENTS = 3, 3

local function weight_of(y, name) return pg.randn(y.shape, { key = name .. " upstream", dtype = "f32" }):to(y.dtype) end

-- Gradients of L for the inputs named in `wanted` (all where nil), added to what they hold already.
local function walk(case, inputs, wanted)
  for i, t in ipairs(inputs) do t.requires_grad = wanted == nil or wanted == i end
  local y = case.f(unpack(inputs))
  if y.record then tape.backward({ y }, { weight_of(y, case.name) }) end
  for _, t in ipairs(inputs) do t.requires_grad = nil end
end

local function value(case, inputs)
  return pg.scope(pg.no_grad, function()
    local y = case.f(unpack(inputs))
    return pg.sum(pg.mul(y, weight_of(y, case.name))):item()
  end)
end

-- (L(x + H v) - L(x - H v)) / 2H, x = input i.
local function difference(case, inputs, i, v)
  local x = inputs[i]
  local moved = { unpack(inputs) }
  moved[i] = x + v * H
  local above = value(case, moved)
  moved[i] = x - v * H
  return (above - value(case, moved)) / (2 * H)
end

local function direction(x, case, i, k)
  if k <= DIRECTIONS then return pg.randn(x.shape, { key = case.name .. i .. k, dtype = "f64" }) end
  local numbers = {}
  for j = 1, x.count do numbers[j] = 0 end
  numbers[1 + (7919 * k + i) % x.count] = 1
  return pg.tensor(numbers, "f64"):view(x.shape)
end

local function zeros_like(x) return pg.zeros(x.shape, x.dtype) end

local function differences(case, inputs)
  for i, x in ipairs(inputs) do
    local got, want = {}, {}
    for k = 1, DIRECTIONS + ELEMENTS do
      local v = direction(x, case, i, k)
      got[k] = pg.sum(pg.mul(x.grad or zeros_like(x), v)):item()
      want[k] = difference(case, inputs, i, v)
    end
    check.close(got, want, check.f64)
  end
end

local function judge(case)
  local inputs = cases.inputs(case, "f64")
  walk(case, inputs)
  differences(case, inputs)
  local first = {}
  for i, x in ipairs(inputs) do first[i] = (x.grad or zeros_like(x)):clone() end
  walk(case, inputs)
  for i, x in ipairs(inputs) do check.close(x.grad or zeros_like(x), pg.scale(first[i], 2), check.double) end
  for i in ipairs(inputs) do
    local fresh = cases.inputs(case, "f64")
    walk(case, fresh, i)
    for j, x in ipairs(fresh) do
      if i == j then check.close(x.grad or zeros_like(x), first[i], check.double)
      else check.equal(x.grad, nil) end
    end
  end
  local single = cases.inputs(case, "f32")
  walk(case, single)
  for i, x in ipairs(single) do check.close(x.grad or zeros_like(x), first[i], check.f32) end
end

for _, case in ipairs(cases.list) do
  if not case.still then tests["test_" .. case.name] = function() judge(case) end end
end

function tests.test_ops_without_gradient_record_nothing()
  for _, case in ipairs(cases.list) do
    if case.still then
      local inputs = cases.inputs(case, "f64")
      for _, t in ipairs(inputs) do t.requires_grad = true end
      check.equal(case.f(unpack(inputs)).record, nil)
    end
  end
end

function tests.test_every_op_has_a_case()
  local missing = cases.ops()
  for _, case in ipairs(cases.list) do missing[case.op] = nil end
  for name, file in pairs(missing) do error(("%s of lua/pg/ops/%s has no case in tests/lua/cases.lua"):format(name,
    file)) end
end

pg.step.block() -- lives as long as the process
pg.step.set { INV_TOKENS = 0.125, RANDOM = 12345 }
check.run(tests)
