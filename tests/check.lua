-- check.lua: the Lua test helper on luaunit: numbers close by norm, errors by their text, nothing
-- left alive.  A test file is
--
--   local check = require "tests.check"
--   local tests = {}
--   function tests.test_sum() check.close(1 + 1, 2, check.f32) end
--   check.run(tests)
--
-- and runs inside pgrun from the top folder: pgrun tests/lua/test_sum.lua [-p PATTERN].  check.run
-- never returns.  luaunit's own assertions are check.unit, the usual one is check.equal.
package.path = package.path .. ";/usr/share/lua/5.1/?.lua"
local unit = require "luaunit"

local check = { unit = unit, equal = unit.assertEquals, is_true = unit.assertTrue, skip = unit.skip }

-- Tolerances, named once: norm of the error over norm of the reference.
check.f32 = 1e-5
check.f64 = 1e-6 -- finite differences taken in f64
check.double = 1e-12 -- f64 against f64
check.curve = 1e-4 -- along a loss curve against PyTorch
check.curve_bf16 = 2e-2 -- the same with weights and activations in bf16
check.bf16 = 5e-3
check.bf16_grad = 1e-2
check.f16 = 1e-3
check.f16_grad = 2e-3

local function fail(message, level) error(unit.FAILURE_PREFIX .. message, level + 1) end

-- The numbers in a number, a tensor or a nested table, end to end.
local function flatten(value, list)
  if type(value) == "table" then
    if value.totable then value = value:totable() end
    if type(value) == "number" then return flatten(value, list) end
    for _, part in ipairs(value) do flatten(part, list) end
  elseif tonumber(value) then
    list[#list + 1] = tonumber(value)
  else
    error("check: cannot compare a " .. type(value), 0)
  end
  return list
end

--- check.error(got, want) -> norm(got - want) / norm(want); inf where a number is not finite or the
-- counts differ.  Where want is all zero: norm(got).
function check.error(got, want)
  got, want = flatten(got, {}), flatten(want, {})
  if #got ~= #want then return math.huge, ("%d numbers, not %d"):format(#got, #want) end
  local difference, size = 0, 0
  for i = 1, #want do
    difference = difference + (got[i] - want[i]) ^ 2
    size = size + want[i] ^ 2
  end
  local e = math.sqrt(size > 0 and difference / size or difference)
  if e ~= e or e == math.huge then return math.huge, "not finite" end
  return e
end

-- The first few numbers, for a message.
local function show(value)
  local list = flatten(value, {})
  local words = {}
  for i = 1, math.min(#list, 6) do words[i] = ("%.9g"):format(list[i]) end
  return table.concat(words, " ") .. (#list > 6 and " ..." or "")
end

--- check.close(got, want, tolerance): numbers, tables of numbers, tensors.  No default tolerance.
function check.close(got, want, tolerance)
  assert(tolerance, "check.close wants a tolerance, such as check.f32")
  local e, why = check.error(got, want)
  if e <= tolerance then return end
  fail(("error %.3g%s, tolerance %.3g\n  got  %s\n  want %s"):format(
    e, why and " (" .. why .. ")" or "", tolerance, show(got), show(want)), 2)
end

--- check.throws(f, text) -> message.  f raises, and the message holds `text` as it stands or as a pattern.
function check.throws(f, text)
  local fine, message = pcall(f)
  if fine then fail("no error; expected one with: " .. text, 2) end
  message = tostring(message)
  if message:find(text, 1, true) then return message end
  local readable, found = pcall(string.find, message, text)
  if not (readable and found) then
    fail(("the error was: %s\nexpected one with: %s"):format(message, text), 2)
  end
  return message
end

--- check.alive() -> live tensor handles, after a full collection.
function check.alive()
  local c = require "pg.c"
  collectgarbage()
  collectgarbage()
  local memory = c.ffi.new "pg_mem"
  c.C.pg_mem_stats(memory)
  return tonumber(memory.tensors)
end

-- A test that ends well must leave as many tensors as it found.
local function leaves_nothing(test)
  return function(...)
    local before = check.alive()
    test(...)
    local after = check.alive()
    if after > before then -- a compiled trace may hold what a closure has captured
      jit.flush()
      after = check.alive()
    end
    if after > before then
      fail(("%d tensors alive before the test, %d after"):format(before, after), 2)
    end
  end
end

local known = { testNames = true } -- luaunit leaks this one itself
for name in pairs(_G) do known[name] = true end

local function new_globals()
  local names = {}
  for name in pairs(_G) do
    if not known[name] and name ~= "pg" then names[#names + 1] = tostring(name) end
  end
  return table.concat(names, " ")
end

--- check.run(tests, options): run every function tests.test_NAME, print the closing line, end the
-- process.  options.alive = false: the tests share tensors, do not count them.
function check.run(tests, options)
  local class = {}
  for name, value in pairs(tests) do
    local is_test = type(value) == "function" and name:match "^test"
    local counted = is_test and not (options and options.alive == false)
    class[name] = counted and leaves_nothing(value) or value
  end
  local runner = unit.LuaUnit.new()
  runner:runSuiteByInstances({ { "tests", class } })
  local result = runner.result
  local failed = result.failureCount + result.errorCount
  for _, node in ipairs(result.skippedTests) do print("skipped: " .. node.msg) end
  if new_globals() ~= "" then
    print("new globals: " .. new_globals())
    failed = failed + 1
  end
  if result.selectedCount + result.nonSelectedCount == 0 then
    print "no function named test_..."
    failed = failed + 1
  end
  print(("%d passed, %d failed, %d skipped"):format(result.successCount, failed, result.skippedCount))
  io.stdout:flush()
  os.exit(failed == 0 and 0 or 1, true)
end

return check
