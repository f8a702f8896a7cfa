-- cmd/ps.lua: pgrun ps: the runs under runs/: recipe, step, ranks, process, age and state
local client = require "pg.live.client"
local host = require "pg.host"
local json = require "pg.json"
local log = require "pg.log"
local process = require "pg.live.process"

local PATIENCE = 0.3 -- seconds for an answer; a long step answers later, and metrics tell as well

client.words("pgrun ps", 0, 0, ...)

-- The step of a run that runs: as it says, else as its metrics say.
local function step_of(folder, told)
  local id = told.state == "running" and host.control_connect(folder)
  if id then
    host.control_send(id, "Q")
    local kind, text = client.answer(PATIENCE)
    host.control_drop(id)
    local ok, status = pcall(json.decode, kind == "S" and text or "")
    if ok and type(status) == "table" and status.step then return status.step end
  end
  return process.last(folder) or told.step or 0
end

local function age(seconds)
  return seconds >= 172800 and ("%d days"):format(seconds / 86400) or log.duration(seconds)
end

local rows = { { "RUN", "RECIPE", "STEP", "RANKS", "PID", "AGE", "STATE" } }
for _, name in ipairs(process.names()) do
  local folder = "runs/" .. name
  local told = process.read(folder)
  if told then
    local state = told.state == "elsewhere" and "on " .. tostring(told.host) or told.state
    if told.how == "stopped" then state = "ended (stopped)" end
    rows[#rows + 1] = { name, told.recipe, ("%d/%d"):format(step_of(folder, told), told.steps), tostring(told.ranks),
                        tostring(told.pid), age((told.ended or os.time()) - told.started), state }
  end
end

local wide = {}
for _, row in ipairs(rows) do
  for i, text in ipairs(row) do wide[i] = math.max(wide[i] or 0, #text) end
end
for _, row in ipairs(rows) do
  local cells = {}
  for i, text in ipairs(row) do cells[i] = i < #row and text .. (" "):rep(wide[i] - #text) or text end
  print(table.concat(cells, "  "))
end
return 0
