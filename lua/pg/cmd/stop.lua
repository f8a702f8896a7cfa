-- cmd/stop.lua: pgrun stop RUN: let a run finish its step, save and end; returns when it has
local client = require "pg.live.client"
local host = require "pg.host"
local process = require "pg.live.process"

local words = client.words("pgrun stop RUN", 1, 1, ...)
local before = process.read(client.folder(words[1]))
local id, folder = client.connect(words[1])
host.control_send(id, "T")

local said = false
while true do
  local kind = client.answer(0.5)
  if kind == nil then break end
  if kind == false and not said then
    said = true
    print(("%s: asked to stop; it ends after its step"):format(folder))
  end
end
-- what follows the loop is quick: the process itself goes
for _ = 1, 100 do
  local alive = io.open(("/proc/%d/stat"):format(before and before.pid or 0))
  if not alive then break end
  local state = alive:read "*a":match "%) (%a)"
  alive:close()
  if state == "Z" then break end
  host.nap(0.1)
end

local told = process.read(folder)
if not told or not told.ended then client.leave(1, "%s: %s", folder, client.story(folder)) end
local saved = client.newest(folder)
print(("%s: %s at step %d of %d; %s"):format(folder, told.how == "done" and "it was done" or "stopped", told.step,
  told.steps, saved and "last checkpoint: " .. saved or "no checkpoint: the recipe saves none"))
return 0
