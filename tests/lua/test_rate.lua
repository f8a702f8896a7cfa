-- test_rate.lua: learning rates as functions of the step: warm-up, shape, the last step.
local check = require "tests.check"
local rate = require "pg.optim.rate"
local tests = {}

local function list(description, steps)
  local f = rate.build(description, { steps = steps, batch = 64 })
  local out = {}
  for step = 1, steps do out[step] = f { step = step, steps = steps } end
  return out
end

function tests.test_the_first_rate_is_above_zero_and_the_last_is_the_floor()
  for _, name in ipairs { "cosine", "linear", "wsd" } do
    for _, warmup in ipairs { 0, 1, 10 } do
      local rates = list(rate[name] { peak = 1e-3, warmup = warmup }, 30)
      check.is_true(rates[1] > 0, name)
      check.equal(rates[30], 1e-3 * 0.1, name)
      if warmup > 0 then check.equal(rates[warmup], 1e-3, name) end
      for step = 1, 30 do check.is_true(rates[step] <= 1e-3 and rates[step] == rates[step], name) end
    end
  end
end

function tests.test_warm_up_is_a_straight_line()
  local rates = list(rate.cosine { peak = 1, warmup = 4 }, 8)
  check.close({ rates[1], rates[2], rates[3], rates[4] }, { 0.25, 0.5, 0.75, 1 }, 0)
end

function tests.test_shapes()
  check.close(list(rate.linear { peak = 1, floor = 0 }, 4), { 0.75, 0.5, 0.25, 0 }, check.f64)
  check.close(list(rate.cosine { peak = 1, floor = 0 }, 2), { 0.5, 0 }, check.f64)
  check.close(list(rate.wsd { peak = 1, floor = 0, decay = 0.5 }, 4), { 1, 1, 0.5, 0 }, check.f64)
  check.close(list(rate.inverse_sqrt { peak = 1, warmup = 1 }, 4), { 1, 2 ^ -0.5, 3 ^ -0.5, 0.5 }, check.f64)
  check.close(list(rate.constant { peak = 2 }, 2), { 2, 2 }, 0)
end

function tests.test_the_peak_follows_the_batch()
  check.close(list(rate.constant { peak = 1e-3, base = 32 }, 1), { 2e-3 }, check.f64)
end

function tests.test_a_number_or_a_function_is_a_rate()
  check.equal(rate.build(0.5, {}) { step = 9 }, 0.5)
  check.equal(rate.build(function(state) return state.step end, {}) { step = 9 }, 9)
end

function tests.test_mistakes()
  check.throws(function() rate.build("fast", {}) end, "rate is string")
  check.throws(function() rate.build(rate.cosine { warmup = 3 }, { steps = 9 }) end, "peak is missing")
  check.throws(function() rate.build(rate.cosine { peak = 1 }, {}) end, "steps is missing")
  check.throws(function() rate.cosine { peek = 1 } end, "did you mean peak?")
end

check.run(tests)
