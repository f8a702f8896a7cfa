-- run.lua: runs every test and counts.  `make test` builds what it needs and calls
--
--   build/pgrun tests/run.lua [PATTERN]      PATTERN: only tests whose name contains it
--
-- What is run, one at a time, each in a process group of its own with a time limit:
--   tests/c/test_*.c       the program built from it (cmocka)
--   tests/lua/test_*.lua   inside pgrun (luaunit, tests/check.lua), compiled and then with --no-jit
--   tests/ranks/*.lua      pgrun -n N, where the first line says "-- ranks: N"; exit code 0 is a pass
--   tests/layouts/*.lua    the same
--   tests/journey/*.sh     bash, with PGRUN set
-- They run on the CPU, or with DEVICE=cuda all but the C tests on GPUs, several ranks on one where there are
-- too few.  A comment "limit: SECONDS" in the first lines raises the limit of 120 s.  A test that cannot run
-- here prints "skipped: reason".  Each gets an empty folder, SCRATCH, and must leave no process.
-- Last line: N passed, N failed, N skipped; test cases count for C and Lua, files for the others.
local BUILD = os.getenv "BUILD" or "build"
local PATTERN = arg[1] or ""
local SANITIZED = os.getenv "SAN" or ""
local UNDER = os.getenv "UNDER" or "" -- a command in front of C tests: valgrind
local DEVICE = os.getenv "DEVICE" ~= "" and os.getenv "DEVICE" or "cpu"
local SLOWER = (SANITIZED ~= "" or UNDER ~= "") and 5 or 1
local LIMIT = 120 -- seconds
local SHOWN = 150 -- lines of a failing test's output

local function capture(command)
  local pipe = assert(io.popen(command))
  local text = pipe:read "*a"
  pipe:close()
  return text
end

local HERE = capture("pwd"):gsub("\n", "")
local PGRUN = HERE .. "/" .. BUILD .. "/pgrun"
-- Named by process, so that two runners at a time do not share them.
local OWN = capture("echo $PPID"):gsub("\n", "")
local LOGS, SCRATCH = BUILD .. "/tests/log-" .. OWN, HERE .. "/" .. BUILD .. "/tests/scratch-" .. OWN

local function read(path)
  local file = io.open(path, "rb")
  local text = file and file:read "*a" or ""
  if file then file:close() end
  return text
end

-- What the first lines of a test say: number after "ranks:" or "limit:".
local function said(path, key)
  local head = read(path):sub(1, 600)
  return tonumber(head:match("^%W*" .. key .. ":%s*(%d+)") or head:match("\n%W*" .. key .. ":%s*(%d+)"))
end

-- LuaJIT keeps its objects out of LeakSanitizer's sight, so whatever only Lua holds would count as a
-- leak: leaks are looked for in the C tests alone.
local LEAKS = { c = "detect_leaks=1", other = "detect_leaks=0" }

-- A shell given LIMIT LOG COMMAND... runs the command as a process group of its own and reports.
-- Ctrl-C ends the group as well; what the test left running is killed and told (the dead that nobody
-- has buried, state Z, do not count).  What `make` and this very pgrun were started with does not
-- reach the test.
local SHELL = [[
trap 'kill -TERM $group 2>/dev/null; wait $group; echo interrupted; exit' INT TERM
limit=$1 log=$2; shift 2
unset OMP_NUM_THREADS OMP_WAIT_POLICY MAKEFLAGS MFLAGS MAKELEVEL
timeout -k 5 "$limit" env --default-signal=INT,QUIT "$@" >"$log" 2>&1 </dev/null & group=$!
wait $group; code=$?
left() { cat /proc/[0-9]*/stat 2>/dev/null | awk -v group=$group '
  { sub(/.*\) /, "") } $3 == group && $1 != "Z" { n++ } END { exit !n }'; }
i=0
while left && [ $i -lt 10 ]; do sleep 0.1; i=$((i+1)); done
if left; then kill -s KILL -- -$group; echo orphans $code; else echo ended $code; fi
]]

local function quoted(text) return "'" .. text:gsub("'", "'\\''") .. "'" end

--- execute(test) -> seconds, exit code, what went wrong besides ("" or a phrase), output.
local function execute(test)
  local log = LOGS .. "/" .. test.name:gsub("[/ ]", "-") .. ".log"
  local limit = (said(test.source, "limit") or LIMIT) * SLOWER
  local environment = ("rm -rf %s; mkdir -p %s; export PGRUN=%s SCRATCH=%s; "):format(
    quoted(SCRATCH), quoted(SCRATCH), quoted(PGRUN), quoted(SCRATCH))
    .. ("export PG_DEVICE=%s PG_SHARE_GPU=%d; "):format(test.kind == "c" and "cpu" or DEVICE,
      DEVICE == "cuda" and 1 or 0)
    .. ('export ASAN_OPTIONS="$ASAN_OPTIONS:%s"; '):format(LEAKS[test.kind] or LEAKS.other)
  local start = capture "date +%s.%N"
  local shell = ("exec sh -c %s test %d %s %s"):format(quoted(SHELL), limit, quoted(log), test.command)
  local how, code = capture(environment .. shell):match "(%a+) ?(%d*)%s*$"
  local seconds = capture "date +%s.%N" - start
  if how == "interrupted" or not how then
    print "interrupted"
    os.exit(130)
  end
  code = tonumber(code)
  local fault = ""
  if how == "orphans" then fault = "it left a process running" end
  if code == 124 or code == 137 then fault = ("stopped after %d s"):format(limit) end
  return seconds, code, fault, read(log), log
end

-- A counter reads how many cases passed, failed and were skipped; nil where the output does not say.
local count = {}

function count.c(output)
  local function closing(word)
    local n = 0
    for k in output:gmatch("%[%s*" .. word .. "%s*%] (%d+) test%(s%)") do n = n + tonumber(k) end
    return n
  end
  if not output:find "%[==========%] %d+ test%(s%) run" then return nil end
  return closing "PASSED", closing "FAILED", closing "SKIPPED"
end

function count.lua(output)
  local passed, failed, skipped = output:match "(%d+) passed, (%d+) failed, (%d+) skipped%s*$"
  return tonumber(passed), tonumber(failed), tonumber(skipped)
end

function count.file(output)
  if ("\n" .. output):find "\n%s*skipped: " then return 0, 0, 1 end
  return 1, 0, 0
end

local total = { passed = 0, failed = 0, skipped = 0 }

local function show(output, log)
  local lines = {}
  for line in output:gmatch "[^\n]+" do lines[#lines + 1] = line end
  local first = math.max(1, #lines - SHOWN + 1)
  if first > 1 then print(("     ... %d lines before are in %s"):format(first - 1, log)) end
  for i = first, #lines do print("     " .. lines[i]) end
end

local function run(test)
  local seconds, code, fault, output, log = execute(test)
  local passed, failed, skipped = count[test.kind](output)
  if fault == "" and code ~= 0 and (failed or 0) == 0 then fault = "exit code " .. code end
  if not passed then
    passed, failed, skipped = 0, 1, 0
    if fault == "" then fault = "no closing line" end
  elseif failed == 0 and fault ~= "" then
    passed, failed = math.max(passed - 1, 0), 1
  end
  total.passed, total.failed = total.passed + passed, total.failed + failed
  total.skipped = total.skipped + skipped
  local word = failed > 0 and "FAIL" or passed > 0 and "ok" or skipped > 0 and "skip" or "none"
  print(("%-4s %-44s %3d %6.1f s  %s"):format(word, test.name, passed + failed + skipped, seconds, fault))
  if failed > 0 then
    show(output, log)
  else
    for reason in ("\n" .. output):gmatch "\n%s*(skipped: [^\n]+)" do print("     " .. reason) end
  end
  io.stdout:flush()
end

-- Why nothing can run on DEVICE; nil: it can.
local NO_DEVICE
if DEVICE ~= "cpu" then
  local answer = capture(("%s --device %s -e 'print \"answers\"' 2>&1"):format(PGRUN, DEVICE))
  if not answer:find "answers" then NO_DEVICE = answer:match "[^\n]+" or "no answer" end
end

-- Ranks that share a GPU take turns on it, and talk through sockets: a test then takes minutes.
local GPUS = math.huge
if DEVICE ~= "cpu" and not NO_DEVICE and os.getenv "PG_SHARE_GPU" ~= "1" then
  GPUS = select(2, capture(PGRUN .. " --version 2>&1"):gsub("GPU %d+ ", ""))
end

local tests = {}

local function add(kind, source, command, name)
  name = name or source
  if NO_DEVICE and kind ~= "c" then
    kind, command = "file", "echo " .. quoted("skipped: " .. NO_DEVICE)
  end
  if name:find(PATTERN, 1, true) or name:find(PATTERN) then
    tests[#tests + 1] = { kind = kind, source = source, command = command, name = name }
  end
end

local function each(glob, f)
  for path in capture("LC_ALL=C ls " .. glob .. " 2>/dev/null"):gmatch "[^\n]+" do f(path) end
end

each("tests/c/test_*.c", function(path)
  add("c", path, UNDER .. " " .. BUILD .. "/tests/" .. path:match "([^/]+)%.c$")
end)
if UNDER == "" then
  each("tests/lua/test_*.lua", function(path)
    add("lua", path, PGRUN .. " " .. path)
    add("lua", path, PGRUN .. " --no-jit " .. path, path .. " --no-jit")
  end)
  each("tests/ranks/*.lua tests/layouts/*.lua", function(path)
    local ranks = said(path, "ranks")
    if ranks and ranks > GPUS then
      local why = ("skipped: %d ranks, GPUs: %d; with PG_SHARE_GPU=1 they share, slowly"):format(ranks, GPUS)
      return add("file", path, "echo " .. quoted(why))
    end
    add("file", path, ranks and ("%s -n %d %s"):format(PGRUN, ranks, path)
      or "sh -c 'echo \"the first line must say: -- ranks: N\"; exit 1'")
  end)
  each("tests/journey/*.sh", function(path) add("file", path, "bash " .. path) end)
end

capture("mkdir -p " .. LOGS)
if #tests == 0 then print(("no test's name contains %q"):format(PATTERN)) end
for _, test in ipairs(tests) do run(test) end
capture("rm -rf " .. quoted(SCRATCH) .. (total.failed == 0 and " " .. LOGS or ""))
print(("%d passed, %d failed, %d skipped"):format(total.passed, total.failed, total.skipped))
io.stdout:flush()
os.exit((total.failed == 0 and #tests > 0) and 0 or 1)
