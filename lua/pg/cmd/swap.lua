-- cmd/swap.lua: pgrun swap RUN FILE: a new recipe for a run that goes on; the old one stays where it cannot be taken
local client = require "pg.live.client"
local host = require "pg.host"

local words = client.words("pgrun swap RUN FILE", 2, 2, ...)
local text, file = host.source(words[2])
if not text then client.leave(2, "%s: no such file", words[2]) end
local id, folder = client.connect(words[1])
host.control_send(id, "W", file ~= "" and file or words[2])
local kind, said = client.wait()
if kind == "K" then
  print(("%s: %s from step %s on"):format(folder, words[2], said))
  return 0
end
client.leave(1, "%s: %s", folder, kind == "E" and said or client.story(folder))
