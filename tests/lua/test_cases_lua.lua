-- test_cases_lua.lua: Lua's own heap is not the limit of a machine (CASES.md C37).
local check = require "tests.check"
local tests = {}

local GIB = 2^30

-- What is free, by /proc/meminfo and the group's limit where there is one, in bytes.
local function available()
  local function number(path, pattern)
    local f = io.open(path)
    local text = f and f:read "*a" or ""
    if f then f:close() end
    return tonumber(text:match(pattern))
  end
  local free = (number("/proc/meminfo", "MemAvailable:%s*(%d+)") or 0) * 1024
  local limit = number("/sys/fs/cgroup/memory.max", "^(%d+)")
  local used = number("/sys/fs/cgroup/memory.current", "^(%d+)")
  return math.min(free, limit and limit - (used or 0) or math.huge)
end

function tests.test_pointers_of_64_bits()
  check.is_true(require("ffi").abi "gc64", "this LuaJIT was built without GC64: its heap ends at 2 GiB")
end

function tests.test_strings_beyond_2_gib()
  if not jit.status() then check.skip "the heap is the same without the compiler" end
  if available() < 5 * GIB then check.skip "needs 5 GiB of free memory" end
  local all, block = {}, ("x"):rep(2^25 - 16)
  for i = 1, 68 do all[i] = block .. ("%015d"):format(i) end -- 68 strings of 32 MiB
  check.is_true(collectgarbage "count" * 1024 > 2.1 * GIB)
  for i = 1, 68 do
    check.equal(#all[i], 2^25 - 1)
    check.equal(tonumber(all[i]:sub(-15)), i)
  end
end

check.run(tests)
