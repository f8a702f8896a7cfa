-- test_check.lua: the helper itself: what it must let pass and what it must not.
local check = require "tests.check"
local equal, is_true = check.equal, check.is_true
local tests = {}

function tests.test_close_goes_by_norm_not_by_element()
  check.close({ 1000, 1e-9 }, { 1000, 0 }, check.f32)
  check.close({ { 3 }, { 4 } }, { 3, 4 }, 0)
  equal(check.error({ 3, 4.5 }, { 3, 4 }), 0.1)
  equal(check.error(0.5, 0), 0.5)
end

function tests.test_close_refuses_what_is_far_missing_or_not_finite()
  local function far() check.close(1.1, 1, check.f32) end
  is_true(check.throws(far, "error 0.1"):find("tolerance 1e-05", 1, true) ~= nil)
  check.throws(function() check.close({ 1, 2 }, { 1 }, 1) end, "2 numbers, not 1")
  check.throws(function() check.close(0 / 0, 1, 1) end, "not finite")
  check.throws(function() check.close({ 1 / 0 }, { 1 / 0 }, 1) end, "not finite")
  check.throws(function() check.close(1, 1) end, "wants a tolerance")
end

function tests.test_close_reads_tensors()
  local tensor = { totable = function() return { { 1, 2 }, { 3, 4 } } end }
  check.close(tensor, { 1, 2, 3, 4 }, 0)
end

function tests.test_throws_wants_an_error_with_that_text()
  check.throws(function() error "x is [32,128]" end, "[32,128]")
  check.throws(function() error "x is 17" end, "x is %d+")
  check.throws(function() check.throws(function() end, "boom") end, "no error; expected")
  check.throws(function() check.throws(function() error "bang" end, "boom") end, "the error was: .*bang")
end

check.run(tests)
