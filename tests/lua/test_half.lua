-- test_half.lua: every op of cases.lua in bf16 and f16 against f64 from the same inputs, value and gradient;
-- f32 gradients beside bf16 leaves (mixed); what norms do with a gradient that came past them (based).
local check = require "tests.check"
local cases = require "tests.lua.cases"
local tape = require "pg.tape"
local c = require "pg.c"
local equal, is_true = check.equal, check.is_true
local tests = {}

local function upstream(y, case, dtype)
  return pg.randn(y.shape, { key = case.name .. " upstream" }):to(dtype):to(y.dtype)
end

-- Value and gradients of a case from these inputs; the upstream gradient is one that `dtype` holds.
local function run(case, inputs, dtype)
  local y = case.f(unpack(inputs))
  if y.record then tape.backward({ y }, { upstream(y, case, dtype) }) end
  local gradients = {}
  for i, x in ipairs(inputs) do gradients[i] = x.grad or pg.zeros(x.shape) end
  return y, gradients
end

local function inputs_of(case, dtype, to)
  local inputs = cases.inputs(case, dtype)
  for i, x in ipairs(inputs) do
    inputs[i] = to and x:to(to) or x
    inputs[i].requires_grad = not case.still
  end
  return inputs
end

-- A sample or an argmax of the same numbers is the same.  Statistics and losses stay f32.
local function judge(case, dtype)
  local half, gradients = run(case, inputs_of(case, dtype), dtype)
  local whole, truth = run(case, inputs_of(case, dtype, "f64"), dtype)
  check.close(half, whole, check[dtype])
  for i, g in ipairs(gradients) do check.close(g, truth[i], check[dtype .. "_grad"]) end
end

for _, case in ipairs(cases.list) do
  for _, dtype in ipairs { "bf16", "f16" } do
    tests["test_" .. dtype .. "_" .. case.name] = function() judge(case, dtype) end
  end
end

-- Mixed: f32 gradients beside bf16 leaves ---------------------------------------------------------

-- The f32 gradient is what the bf16 one is before its rounding: nearer to f64, and twice that after two walks.
for _, case in ipairs(cases.list) do
  if not case.still then
    tests["test_mixed_" .. case.name] = function()
      local inputs = inputs_of(case, "bf16")
      for _, x in ipairs(inputs) do x.grad_dtype = "f32" end
      local _, gradients = run(case, inputs, "bf16")
      local _, truth = run(case, inputs_of(case, "bf16", "f64"), "bf16")
      for i, g in ipairs(gradients) do
        equal(g.dtype, "f32")
        check.close(g, truth[i], check.bf16_grad)
        gradients[i] = g:clone()
      end
      run(case, inputs, "bf16")
      for i, x in ipairs(inputs) do
        if x.grad then check.close(x.grad, pg.scale(gradients[i], 2), check.f32) end
      end
    end
  end
end

-- Ops that say so write f32 without a rounding on the way: much nearer than bf16 could be.
function tests.test_mixed_ops_round_nothing()
  local x, ids = pg.randn({ 6, 13 }, { key = "x" }):to "bf16", pg.tensor({ 1, 0, 1, 3, 1, 2 }, "i32")
  local shapes = { w = { 5, 13 }, b = { 5 }, g = { 13 }, h = { 13 }, t = { 4, 13 } }
  local function leaves(dtype)
    local out = {}
    for name, shape in pairs(shapes) do
      local leaf = pg.randn(shape, { key = name }):to("bf16"):to(dtype)
      leaf.requires_grad, leaf.grad_dtype = true, dtype == "bf16" and "f32" or nil
      out[name] = leaf
    end
    return out
  end
  local function grads(dtype)
    local p, input = leaves(dtype), x:to(dtype)
    for _, y in ipairs { pg.linear(input, p.w, p.b), pg.rmsnorm(input, p.g), pg.layernorm(input, p.g, p.h),
                         pg.embedding(p.t, ids) } do
      tape.backward({ y }, { upstream(y, { name = "mixed" }, "bf16") })
    end
    return p
  end
  local half, truth = grads "bf16", grads "f64"
  for name in pairs(shapes) do
    equal(half[name].grad.dtype, "f32")
    check.close(half[name].grad, truth[name].grad, check.f32)
  end
end

-- C07: a bf16 accumulator stops at 256.
function tests.test_small_gradients_are_not_lost()
  local function accumulate(grad_dtype, f)
    local p = pg.ones({ 3 }):to "bf16"
    p.requires_grad, p.grad_dtype = true, grad_dtype
    for _ = 1, 1024 do pg.scope(function() tape.backward({ f(p) }, { pg.ones({ 3 }):to "bf16" }) end) end
    return p.grad
  end
  local function plain(p) return pg.reshape(p, { 3 }) end
  local function op(p) return pg.scale(p, 1) end
  equal(accumulate("f32", plain):totable(), { 1024, 1024, 1024 })
  equal(accumulate("f32", op):totable(), { 1024, 1024, 1024 })
  equal(accumulate(nil, op):totable(), { 256, 256, 256 })
end

-- Based ---------------------------------------------------------------------------------------------

-- The base that the rule of record r gets, as it is walked.
local function base_of(r, walk)
  local seen
  local op = setmetatable({}, { __index = r.op })
  function op.grad_input(record, dy, d, add, base)
    seen = base[1] or false
    if seen then equal(add[1], 0) end
    return r.op_before.grad_input(record, dy, d, add, base)
  end
  r.op_before, r.op = r.op, op
  walk()
  return seen
end

function tests.test_a_norm_takes_a_shared_gradient_as_its_base()
  for _, norm in ipairs { pg.add_rmsnorm, pg.add_layernorm } do
    local function run_once(others)
      local x, r = pg.randn({ 3, 5 }, { key = "x" }), pg.randn({ 3, 5 }, { key = "r" })
      x.requires_grad, r.requires_grad = true, true
      local sum, y = norm(pg.tanh(x), r)
      local z = pg.tanh(y)
      local last = pg.add(sum, z)
      local dy = pg.ones { 3, 5 }
      if others then dy:retain() end
      local base = base_of(y.record, function() tape.backward({ last }, { dy }) end)
      return base, x.grad, dy
    end
    local base, shared, dy = run_once(true)
    is_true(base == dy, "the gradient that others read is the base")
    equal(dy:totable(), pg.ones({ 3, 5 }):totable())
    check.close(run_once(true), base, 0)
    local _, again = run_once(true)
    check.close(again, shared, 0)
  end
end

function tests.test_a_gradient_of_its_own_is_added_to_in_place()
  local x, w = pg.randn({ 3, 5 }, { key = "x" }), pg.ones { 5 }
  x.requires_grad = true
  local sum, y = pg.add_rmsnorm(x, x, w)
  local last = pg.mul(sum, y) -- mul makes a gradient for each
  equal(base_of(y.record, function() tape.backward({ last }, { pg.ones { 3, 5 } }) end), false)
end

-- In place ------------------------------------------------------------------------------------------

function tests.test_rope_in_place_takes_the_memory_of_x()
  local cos, sin = pg.rope_table(5, 6)
  local x = pg.randn({ 2, 5, 18 }, { key = "x" })
  local want = pg.rope(x, cos, sin, 3)
  local y = pg.rope(x, cos, sin, 3, 0, { in_place = true })
  equal(y:totable(), want:totable())
  equal(x:totable(), want:totable())
  is_true(c.C.pg_tensor_data(x.raw) == c.C.pg_tensor_data(y.raw))
end

-- A gradient nobody else reads turns in its own place: backward holds no second one.
function tests.test_the_gradient_of_rope_turns_in_place()
  local cos, sin = pg.rope_table(64, 8)
  local function peak(o)
    local x = pg.randn({ 4, 64, 64 }, { key = "x" })
    x.requires_grad = true
    local loss = pg.sum(pg.square(pg.rope(pg.tanh(x), cos, sin, 8, 0, o)))
    c.C.pg_mem_reset_peak()
    local before = pg.memory().in_use
    loss:backward()
    return (pg.memory().peak - before) / (4 * 64 * 64 * 4), x.grad
  end
  local tensors, grad = peak()
  is_true(tensors < 2.5, "gradients held at once: " .. tensors)
  local less, same = peak { in_place = true }
  is_true(less < 2.5, "gradients held at once: " .. less)
  equal(same:totable(), grad:totable())
end

pg.step.block() -- lives as long as the process
pg.step.set { INV_TOKENS = 0.125, RANDOM = 12345 }
check.run(tests)
