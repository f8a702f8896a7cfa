-- cmd/help.lua: pgrun help [TOPIC]: a page of lua/pg/help/, or the list of verbs and topics.
-- A page's picture has the page's name: pgrun help pipelines.svg > pipelines.svg.
-- Neighbours: repl.lua's help() finds pages and comments; a verb's line here is the first comment of
-- its file, "pgrun NAME ...: what it does".
local host = require "pg.host"
local repl = require "pg.repl"

local topic = ...

local function verbs()
  local lines = {}
  for _, path in ipairs(host.list "lua/pg/cmd/") do
    local text = host.source(path) or ""
    local name = path:match "([^/]+)%.lua$"
    local said = text:match "pgrun ([^\n]+)" or name
    lines[#lines + 1] = "  pgrun " .. said
  end
  return table.concat(lines, "\n")
end

local picture = topic and topic:match "^[%w_-]+%.svg$" and host.source("lua/pg/help/" .. topic)
if picture then
  io.stdout:write(picture)
  return 0
end
if topic then
  local page, known = repl.describe(topic)
  print(page)
  return known and 0 or 2
end
print("pgrun --help lists the options.  Verbs:\n" .. verbs())
print("\npgrun help TOPIC shows a page.  Topics: " .. repl.topics())
return 0
