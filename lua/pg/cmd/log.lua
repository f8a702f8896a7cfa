-- cmd/log.lua: pgrun log RUN [-f]: the lines that a run has printed; -f: and those to come, until it ends
local client = require "pg.live.client"
local host = require "pg.host"
local process = require "pg.live.process"

local words = client.words("pgrun log RUN [-f]", 1, 2, ...)
local follow = false
for i = #words, 1, -1 do
  if words[i] == "-f" then
    follow = true
    table.remove(words, i)
  end
end
if #words ~= 1 then client.leave(2, "one run is wanted\nusage: pgrun log RUN [-f]") end

local folder = client.folder(words[1])
local file, why = io.open(folder .. "/log.txt", "rb")
if not file then client.leave(1, "%s/log.txt: %s", folder, tostring(why):gsub("^[^:]*: ", "")) end

local function show()
  local text = file:read "*a"
  if text == "" then return end
  io.write(text)
  io.stdout:flush()
end

show()
while follow do
  if host.interrupted() then return 130 end
  local told = process.read(folder)
  local goes_on = told == nil or told.state == "running" or told.state == "elsewhere"
  show() -- after the look: what was written before the end is not missed
  if not goes_on then break end
  host.nap(0.2)
end
file:close()
return 0
