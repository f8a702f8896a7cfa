-- cmd/attach.lua: pgrun attach RUN: a prompt inside a run: its lines run between two steps, on all ranks
-- Neighbours: live/init.lua (the run's side), repl.lua (what a line is), help page live.
local client = require "pg.live.client"
local host = require "pg.host"
local json = require "pg.json"
local repl = require "pg.repl"

jit.off(true, true) -- Ctrl-C does not reach compiled loops

local usage = "pgrun attach RUN"
local words = client.words(usage, 1, 1, ...)
local id, folder = client.connect(words[1])
local native = host.terminal()

-- Ctrl-C goes to the line in the run.
local function answer()
  while true do
    local ok, kind, text = native.guard(client.wait)
    if ok then return kind, text end
    if native.ended() then return nil end
    if not tostring(kind):find "interrupted" then error(kind, 0) end
    host.control_send(id, "I")
  end
end

local function attach()
  host.control_send(id, "A", ("process %d is"):format(host.pid))
  local kind, text = answer()
  if kind == "E" then client.leave(1, "%s: %s", folder, text) end
  if kind ~= "K" then client.leave(1, "%s: %s", folder, client.story(folder)) end
  if not native.terminal then return end
  local told = json.decode(text)
  print(("%s: step %d/%d on %d rank%s; lines run between steps, Ctrl-D leaves, help() tells more"):format(
    folder, told.step, told.steps, told.ranks, told.ranks == 1 and "" or "s"))
end

-- true | false: it failed | nil: the run is gone.
local function run_line(text)
  local kind, said = nil, nil
  if host.control_send(id, "L", text) then kind, said = answer() end
  if kind == "R" then
    if #said > 1 then print(said:sub(2)) end
    return said:sub(1, 1) == "+"
  end
  io.stderr:write(("pgrun attach: %s\n"):format(kind == "E" and said or folder .. ": " .. client.story(folder)))
  return nil
end

local function loop()
  local well = true
  while not native.ended() do
    local chunk, text = repl.read(native)
    local done = false
    if chunk then
      done = run_line(text)
      if done == nil then return 1 end
    elseif text then
      io.stderr:write(text, "\n")
    elseif chunk == nil then
      return (well or native.terminal) and 0 or 1
    end
    well = well and (done or chunk == false)
  end
  return 1
end

attach()
return loop()
