-- live/process.lua: which runs there are and how they stand.  FOLDER/process.json is written by the first rank
-- when the loop begins and again when it ends; a run that ended without the second is dead.
local c = require "pg.c"
local fs = require "pg.fs"
local host = require "pg.host"
local json = require "pg.json"

local process = {}
local ROOT = "runs"

-- A pid may be given anew: with the time of its start (in ticks since the machine's) it is one process.
local function start_of(pid)
  local file = io.open(("/proc/%d/stat"):format(pid))
  local text = file and file:read "*a"
  if file then file:close() end
  local rest = text and text:match "^.*%)%s+(.*)$"
  if not rest or rest:find "^[ZX]" then return nil end
  local n = 2
  for word in rest:gmatch "%S+" do
    n = n + 1
    if n == 22 then return word end
  end
end

local function path(folder) return folder .. "/process.json" end

local function write(folder, told)
  json.write(path(folder), told, { indent = 2, replace = true })
end

--- process.begin(folder, told): told: recipe, ranks, step, steps.
function process.begin(folder, told)
  told.pid, told.rank0, told.host, told.started = host.starter, host.pid, fs.hostname(), os.time()
  told.ticks = start_of(told.pid)
  pcall(write, folder, told) -- a full disk does not stop a training
  return told
end

--- process.finish(folder, told, how): how: "done" or "stopped".
function process.finish(folder, told, how)
  told.ended, told.how = os.time(), how
  pcall(write, folder, told)
end

--- process.read(folder) -> what begin and finish have told, with its state: "running", "ended", "died", or
-- "elsewhere" (another machine, which alone can tell); nil where the folder is no run that has begun.
function process.read(folder)
  if not fs.exists(path(folder)) then return nil end
  local ok, told = pcall(json.read, path(folder))
  if not ok or type(told) ~= "table" or not tonumber(told.pid) then return nil end
  if told.ended then told.state = "ended"
  elseif told.host ~= fs.hostname() then told.state = "elsewhere"
  elseif start_of(told.pid) and start_of(told.pid) == told.ticks then told.state = "running"
  else told.state = "died" end
  return told
end

--- process.last(folder) -> the last step that its metrics tell of, or nil.
function process.last(folder)
  local file = io.open(folder .. "/metrics.jsonl")
  if not file then return nil end
  file:seek("set", math.max(0, file:seek "end" - 4096))
  local step
  for n in file:read("*a"):gmatch '"step":(%d+)' do step = tonumber(n) end
  file:close()
  return step
end

--- process.names() -> the names under runs/, in order of the alphabet.
function process.names()
  local names = {}
  for _, name in ipairs(fs.is_dir(ROOT) and fs.list(ROOT) or {}) do
    if fs.is_dir(ROOT .. "/" .. name) then names[#names + 1] = name end
  end
  return names
end

--- process.find(name) -> its folder | nil, a message with the nearest name that there is.
function process.find(name)
  local folder = require("pg.run").folder(name)
  if fs.is_dir(folder) then return folder end
  if fs.is_dir(name) then return name end
  local near = c.nearest(name:match "[^/]*$", process.names())
  return nil, ("no run %s%s; pgrun ps lists them"):format(name, near and ", did you mean " .. near .. "?" or "")
end

return process
