-- log.lua: what a run tells: lines and a live line on rank 0's terminal, and in the run's folder
-- metrics.jsonl (an object a step), log.txt (the lines) and TensorBoard events.  No colours and no escape
-- codes, so that NO_COLOR has nothing to turn off.
local c = require "pg.c"
local fs = require "pg.fs"
local host = require "pg.host"
local json = require "pg.json"
local C, ffi = c.C, c.ffi

local log = {}
local EPIPE = 32
local live = 0 -- columns of the live line that stands on the terminal

-- ---- numbers as people read them ----

--- log.count(n) -> "12,345,678".
function log.count(n)
  local text = ("%.0f"):format(n)
  local sign, digits = text:match "^(-?)(%d+)$"
  if not digits then return text end
  digits = digits:reverse():gsub("(%d%d%d)", "%1,"):reverse():gsub("^,", "")
  return sign .. digits
end

--- log.bytes(n) -> "163 MiB".
function log.bytes(n)
  if n < 2^20 then return ("%.0f KiB"):format(n / 2^10) end
  if n < 10 * 2^30 then return ("%.0f MiB"):format(n / 2^20) end
  return ("%.1f GiB"):format(n / 2^30)
end

--- log.duration(seconds) -> "0:07", "12:30" or "1:02:03".
function log.duration(seconds)
  local s = math.floor(seconds + 0.5)
  local hours, minutes = math.floor(s / 3600), math.floor(s % 3600 / 60)
  if hours > 0 then return ("%d:%02d:%02d"):format(hours, minutes, s % 60) end
  return ("%d:%02d"):format(minutes, s % 60)
end

-- ---- lines ----

local terminal
--- log.terminal() -> true where rank 0's output is a terminal.
function log.terminal()
  if terminal == nil then terminal = os.execute "test -t 1" == 0 end
  return terminal
end

-- Write all of it at once.  What cannot be written is told once on stderr; log.closed: nobody reads any more.
local function out(...)
  io.stdout:setvbuf "full" -- glibc does not tell of a line that fails while it buffers by lines
  local ok, why, code = io.stdout:write(...)
  if ok then ok, why, code = io.stdout:flush() end
  io.stdout:setvbuf "line"
  if ok or log.lost then return end
  log.lost, log.closed = true, code == EPIPE
  io.stderr:write("pgrun: lines are lost, stdout: ", why, "\n")
end

local function wipe()
  local n = live
  live = 0
  return n > 0 and "\r" .. (" "):rep(n) .. "\r" or ""
end

--- log.text(format, ...): a line, from rank 0 alone; in the folder of a run log.txt keeps it.
function log.text(format, ...)
  if host.rank ~= 0 then return end
  local text = select("#", ...) > 0 and format:format(...) or format
  out(wipe(), text, "\n")
  if log.book then
    log.book:write(text, "\n")
    log.book:flush()
  end
end

--- log.live(text): the line that the next one overwrites; nothing where there is no terminal.
function log.live(text)
  if host.rank ~= 0 or not log.terminal() then return end
  out("\r", text, (" "):rep(live - #text), "\r")
  live = #text
end

--- pg.log{ step = 10, loss = 2.5, ... }: one tidy line of a plain script: step and loss first, then the
-- rest by name.  pg.log(t), with a tensor, is the op of that name.
function log.line(values)
  if type(values) == "table" and values.is_tensor then return values:log() end
  if type(values) ~= "table" then c.fail("log: a table of values is wanted, got %s", type(values)) end
  local names = {}
  for name in pairs(values) do names[#names + 1] = tostring(name) end
  local place = { step = "1", loss = "2" }
  table.sort(names, function(a, b) return (place[a] or "3" .. a) < (place[b] or "3" .. b) end)
  local parts = {}
  for i, name in ipairs(names) do
    local value = values[name]
    if type(value) == "number" then
      local whole = value == math.floor(value) and value < 2^53 and value > -2^53
      value = (whole and "%.0f" or "%.6g"):format(value)
    end
    parts[i] = name .. " " .. tostring(value)
  end
  log.text("%s", table.concat(parts, "  "))
end

-- ---- the files of a run ----

local Files = {}
Files.__index = Files
local SCALARS = { "loss", "rate", "grad_norm", "tokens_per_s", "val_loss" }
local FLUSH = 2 -- seconds that TensorBoard events may wait

--- log.cut(path, step): drop the lines of a metrics.jsonl that tell of later steps.
function log.cut(path, step)
  if not fs.exists(path) then return end
  local kept = {}
  for line in fs.read(path):gmatch "([^\n]*)\n" do
    local ok, record = pcall(json.decode, line)
    if ok and type(record) == "table" and tonumber(record.step) and record.step <= step then
      kept[#kept + 1] = line .. "\n"
    end
  end
  fs.write(path, table.concat(kept))
end

--- log.open(folder) -> the files of a run, to which records are appended.
function log.open(folder)
  local path = folder .. "/metrics.jsonl"
  local file, why = io.open(path, "a")
  if not file then c.fail("log: cannot write %s: %s", path, why) end
  log.book = io.open(folder .. "/log.txt", "a") -- where it cannot be written, metrics cannot either, and they tell
  local slot = ffi.new "pg_events *[1]"
  c.check(C.pg_events_open(slot, folder))
  return setmetatable({ path = path, file = file, events = ffi.gc(slot[0], C.pg_events_close),
                        flushed = C.pg_time() }, Files)
end

-- A full disk is told once and does not stop the training; files.told tells that records are missing.
function Files:complain(why)
  if self.told then return end
  self.told = true
  log.text("log: %s; going on", why or ffi.string(C.pg_errmsg()))
end

--- files:write(record): a step.
function Files:write(record)
  local line = { mfu_causal = json.null, mfu_full = json.null }
  for k, v in pairs(record) do line[k] = v end
  local ok, why = self.file:write(json.encode(line, { digits = 9, nonfinite = "null" }), "\n")
  if ok then ok, why = self.file:flush() end
  if not ok then self:complain(("cannot write %s: %s"):format(self.path, tostring(why))) end
  for _, name in ipairs(SCALARS) do
    if record[name] and C.pg_events_scalar(self.events, name, record.step, record[name]) < 0 then self:complain() end
  end
  if C.pg_time() - self.flushed > FLUSH then self:flush() end
end

function Files:flush()
  self.flushed = C.pg_time()
  if not fs.exists(self.path) then self:complain(self.path .. " has been removed; what is written to it is lost") end
  if C.pg_events_flush(self.events) < 0 then self:complain() end
end

--- files:text(name, step, text): a text for TensorBoard, such as a sample.
function Files:text(name, step, text)
  if C.pg_events_text(self.events, name, step, text) < 0 then self:complain() end
end

function Files:close()
  self:flush()
  C.pg_events_close(ffi.gc(self.events, nil))
  self.file:close()
  if log.book then log.book:close() end
  log.book = nil
end

return log
