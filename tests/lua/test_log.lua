-- test_log.lua: numbers as people read them, pg.log's line, metrics.jsonl.
local check = require "tests.check"
local fs = require "pg.fs"
local json = require "pg.json"
local log = require "pg.log"
local tests = {}
local SCRATCH = os.getenv "SCRATCH" or "."

function tests.test_numbers()
  check.equal(log.count(0), "0")
  check.equal(log.count(999), "999")
  check.equal(log.count(1234567), "1,234,567")
  check.equal(log.count(-1000), "-1,000")
  check.equal(log.bytes(2^19), "512 KiB")
  check.equal(log.bytes(163 * 2^20), "163 MiB")
  check.equal(log.bytes(20 * 2^30), "20.0 GiB")
  check.equal(log.duration(7.4), "0:07")
  check.equal(log.duration(59.6), "1:00")
  check.equal(log.duration(3723), "1:02:03")
end

-- What a line of Lua prints, run by a pgrun of its own.
local function printed(code, environment)
  local pipe = io.popen(("%s %s -e '%s'"):format(environment or "", os.getenv "PGRUN", code))
  local text = pipe:read "*a"
  pipe:close()
  return text
end

function tests.test_a_line_of_a_plain_script()
  check.equal(printed 'pg.log{ loss = 2.5, step = 1e6, b = "x", a = 1/3 }', "step 1000000  loss 2.5  a 0.333333  b x\n")
  check.throws(function() log.line(3) end, "a table of values is wanted")
end

function tests.test_only_rank_0_speaks()
  check.equal(printed('pg.log{ step = 1 }', "RANK=1 WORLD_SIZE=2"), "")
end

function tests.test_no_live_line_without_a_terminal()
  check.equal(printed 'local l = require "pg.log"  l.live "now"  l.text "later"', "later\n")
end

local function record(step) return { step = step, loss = 1 / 3, seconds = 0.25, tokens = 2^40 } end

function tests.test_metrics_keep_a_float_and_are_cut()
  local folder = SCRATCH .. "/log"
  fs.mkdir(folder)
  local files = log.open(folder)
  for step = 1, 4 do files:write(record(step)) end
  files:close()
  local path = folder .. "/metrics.jsonl"
  local first = json.decode(fs.read(path):match "[^\n]*")
  check.equal(first.loss, tonumber(("%.9g"):format(1 / 3)))
  check.equal(first.tokens, 2^40)
  check.is_true(fs.read(path):find('"mfu_causal":null,"mfu_full":null', 1, true) ~= nil)
  local file = io.open(path, "a")
  file:write '{"step":5,"lo' -- a line that a crash cut off
  file:close()
  log.cut(path, 2)
  local steps = {}
  for line in fs.read(path):gmatch "([^\n]*)\n" do steps[#steps + 1] = json.decode(line).step end
  check.equal(steps, { 1, 2 })
  check.equal(#fs.glob(folder .. "/events.out.tfevents.*"), 1)
end

check.run(tests)
