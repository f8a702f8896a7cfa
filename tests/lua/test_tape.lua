-- test_tape.lua: what backward promises besides right numbers: refusals, leaves, memory, custom rules.
local check = require "tests.check"
local tape = require "pg.tape"
local equal, is_true = check.equal, check.is_true
local tests = {}

local function leaf(shape, dtype)
  local t = pg.randn(shape, { key = table.concat(shape, "x"), dtype = dtype })
  t.requires_grad = true
  return t
end

function tests.test_no_grad_records_nothing_and_is_undone_by_errors()
  local x = leaf { 3 }
  pg.no_grad(function() equal(pg.exp(x).record, nil) end)
  is_true(pg.exp(x).record ~= nil)
  check.throws(function() pg.no_grad(function() error("boom", 0) end) end, "boom")
  is_true(pg.exp(x).record ~= nil)
  equal({ pg.no_grad(function() return 1, nil, 3 end) }, { 1, nil, 3 })
end

function tests.test_backward_twice_is_refused_with_the_reason()
  local x = leaf { 3 }
  local loss = pg.sum(pg.exp(x))
  loss:backward()
  local first = x.grad:totable()
  check.throws(function() loss:backward() end,
    "^tests/lua/test_tape.lua:%d+: backward: sum was walked already, or its scope has ended; run the forward again")
  equal(x.grad:totable(), first)
end

function tests.test_half_a_graph_walked_already_is_refused()
  local x = leaf { 3 }
  local shared = pg.exp(x)
  pg.sum(shared):backward()
  local other = pg.sum(pg.square(shared))
  check.throws(function() other:backward() end, "backward: exp was walked already")
end

function tests.test_nothing_to_walk_is_refused()
  local x = pg.randn { 3 }
  check.throws(function() pg.sum(x):backward() end, "was not computed from anything that requires a gradient")
end

function tests.test_a_leaf_that_is_not_used_gets_no_gradient()
  local x, unused = leaf { 3 }, leaf { 4 }
  pg.sum(pg.square(x)):backward()
  is_true(x.grad ~= nil)
  equal(unused.grad, nil)
end

function tests.test_gradients_accumulate_and_the_seed_scales()
  local x = leaf({ 3 }, "f64")
  pg.sum(pg.square(x)):backward()
  pg.sum(pg.square(x)):backward(0.5)
  check.close(x.grad, pg.scale(x, 3), check.double)
end

function tests.test_several_outputs_at_once()
  local x = leaf({ 3 }, "f64")
  local a = pg.exp(x)
  local b = pg.square(a)
  tape.backward({ a, b, a }, { pg.ones({ 3 }, "f64"), pg.ones({ 3 }, "f64"), pg.full({ 3 }, 2, "f64") })
  check.close(x.grad, a * 3 + b * 2, check.double)
end

function tests.test_a_detached_tensor_stops_the_walk()
  local x = leaf({ 3 }, "f64")
  local y = pg.exp(x)
  pg.sum(pg.mul(y, y:detach())):backward()
  check.close(x.grad, pg.square(pg.exp(x:detach())), check.double)
end

function tests.test_gradients_in_another_dtype()
  local x = leaf { 3 }
  local y = pg.sum(pg.square(pg.cast(x, "f64")))
  y:backward()
  pg.sum(pg.square(pg.cast(x, "f64"))):backward()
  equal(x.grad.dtype, "f32")
  check.close(x.grad, pg.scale(x, 4), check.f32)
end

function tests.test_done_is_called_when_a_leaf_has_all_of_its_gradient()
  local x, y = leaf { 3 }, leaf { 3 }
  local seen = {}
  local loss = pg.sum(pg.add(pg.mul(x, x), y))
  loss:backward(1, { done = function(t) seen[#seen + 1] = t == x and "x" or "y" end })
  equal(seen, { "y", "x" })
end

function tests.test_weight_gradients_put_off()
  local x, w, b = leaf({ 4, 3 }, "f64"), leaf({ 5, 3 }, "f64"), leaf({ 5 }, "f64")
  local function loss() return pg.sum(pg.square(pg.linear(pg.exp(x), w, b, "gelu"))) end
  loss():backward()
  local want = { x.grad, w.grad, b.grad }
  x.grad, w.grad, b.grad = nil, nil, nil
  local later, seen = {}, 0
  loss():backward(1, { later = later, done = function() seen = seen + 1 end })
  check.close(x.grad, want[1], check.double)
  equal({ w.grad, b.grad, #later, seen }, { nil, nil, 1, 1 })
  tape.finish(later, function() seen = seen + 1 end)
  check.close(w.grad, want[2], check.double)
  check.close(b.grad, want[3], check.double)
  equal({ #later, seen }, { 0, 3 })
end

function tests.test_a_rule_that_fails_names_its_op_and_leaves_the_tape_usable()
  local x = leaf { 3 }
  local wrong = pg.op { name = "wrong", forward = function(_, a) return pg.exp(a) end,
                        grad = function() return pg.ones { 4 } end }
  local loss = pg.sum(wrong(x))
  check.throws(function() loss:backward() end,
    "^tests/lua/test_tape.lua:%d+: gradient of wrong: wrong: its gradient for input 1 is %[4%] f32, the input is %[3%]")
  check.throws(function() loss:backward() end, "was walked already")
  local y = wrong(x)
  check.throws(function() tape.backward({ y }, { pg.ones { 3 } }) end, "gradient of wrong")
  check.throws(function() tape.backward({ y }, { pg.ones { 3 } }) end, "backward: wrong was walked already")
  x.grad = nil
  is_true(tape.enabled)
  pg.sum(pg.exp(x)):backward()
  check.close(x.grad, pg.exp(x:detach()), check.f32)
end

function tests.test_a_custom_op_may_withhold_a_gradient()
  local x, y = leaf { 3 }, leaf { 3 }
  local left = pg.op { forward = function(_, a, b) return a + b end, grad = function(_, dy) return dy end }
  pg.sum(left(x, y)):backward()
  equal(x.grad:totable(), { 1, 1, 1 })
  equal(y.grad:totable(), { 0, 0, 0 })
  equal(pg.no_grad(pg.op { forward = function(_, a, b, d, e, g) return a + b + d + e + g end, grad = print },
                   x, x, x, x, x).record, nil)
end

function tests.test_recompute_restores_what_it_changed_also_after_an_error()
  local x = leaf { 3 }
  local calls = 0
  local y = pg.recompute(function(a)
    calls = calls + 1
    if calls == 2 then error("boom", 0) end
    return pg.exp(a)
  end, x)
  local context = tape.context
  check.throws(function() pg.sum(y):backward() end, "boom")
  is_true(tape.enabled)
  is_true(tape.context == context)
  equal(calls, 2)
end

-- Memory ---------------------------------------------------------------------------------------

local MB = 2^20
local function block(x) return pg.exp(pg.scale(x, 1e-3)) end -- saves one input of 1 MB

function tests.test_backward_frees_as_it_walks()
  collectgarbage() collectgarbage()
  local x = leaf { 2^18 } -- 1 MB
  local before = pg.memory()
  pg.scope(function()
    local y = x
    for _ = 1, 20 do y = block(y) end
    local loss = pg.sum(y)
    y = nil -- luacheck: ignore
    local held = pg.memory().in_use
    require("pg.c").C.pg_mem_reset_peak()
    loss:backward()
    -- gradients of neighbours and of the leaf come on top of what the forward held
    is_true(pg.memory().peak - held <= 6 * MB, ("peak %g over %g"):format(pg.memory().peak, held))
  end)
  x.grad:free()
  equal(pg.memory().in_use, before.in_use)
  equal(pg.memory().tensors, before.tensors)
end

-- In plain code the collector owns what users still see; what records hold goes with the walk.
function tests.test_activations_go_while_the_walk_is_under_way()
  local x = leaf { 2^18 }
  local at = {}
  local probe = pg.op { name = "probe", forward = function(_, a) return pg.scale(a, 1) end,
                        grad = function(_, dy) at[#at + 1] = pg.memory().in_use return dy end }
  local module = pg.nn.class "Chain"
  function module:init() end
  function module:forward(a)
    for _ = 1, 8 do a = probe(block(a)) end
    return a
  end
  local chain = module {}
  pg.scope(function() pg.sum(chain(x)):backward() end)
  for i = 2, #at do is_true(at[i] < at[1] - (i - 2) * MB * 0.9, ("%d: %g after %g"):format(i, at[i], at[1])) end
end

function tests.test_reshapes_hold_no_gradient_until_the_end()
  local x = leaf { 2^18 }
  local peak
  pg.scope(function()
    local y = x
    for _ = 1, 20 do y = pg.add(y, pg.reshape(pg.reshape(y, { 2^9, 2^9 }), { 2^18 })) end
    local loss = pg.sum(y)
    local held = pg.memory().in_use
    require("pg.c").C.pg_mem_reset_peak()
    loss:backward()
    peak = pg.memory().peak - held
  end)
  is_true(peak <= 6 * MB, tostring(peak))
end

check.run(tests)
