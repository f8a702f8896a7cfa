-- live/client.lua: what the verbs that reach a run share: their words, finding it, talking to it.
local fs = require "pg.fs"
local host = require "pg.host"
local process = require "pg.live.process"

local client = {}

--- client.leave(code, format, ...): say why on stderr and end.
function client.leave(code, format, ...)
  io.stderr:write(("pgrun %s: "):format(host.script), format:format(...), "\n")
  os.exit(code, true)
end

--- client.words(usage, least, most, ...) -> the words of the command line; others than these many end with 2.
function client.words(usage, least, most, ...)
  local words = { ... }
  for _, word in ipairs(words) do
    if word:find "^%-%-?%w" and not usage:find(word, 1, true) then
      client.leave(2, "unknown option %s\nusage: %s", word, usage)
    end
  end
  if #words < least or #words > most then client.leave(2, "%d words given\nusage: %s", #words, usage) end
  return words
end

--- client.folder(name) -> the run's folder.
function client.folder(name)
  local folder, wrong = process.find(name)
  return folder or client.leave(2, "%s", wrong)
end

-- How a run that cannot be reached stands.
local function story(folder)
  local told = process.read(folder)
  if not told then return "it has not begun to train" end
  local step = process.last(folder) or told.step or 0
  if told.state == "ended" then return ("it has ended, at step %d of %d"):format(step, told.steps) end
  if told.state == "died" then return ("it died, at step %d of %d"):format(step, told.steps) end
  if told.state == "elsewhere" then return "it runs on " .. tostring(told.host) .. ", and is reached there" end
  return ("process %d does not answer"):format(told.pid)
end

--- client.connect(name) -> id, folder.
function client.connect(name)
  local folder = client.folder(name)
  local id = host.control_connect(folder)
  return id or client.leave(1, "%s: %s", folder, story(folder)), folder
end

--- client.answer(seconds) -> kind, text of the next message | nil: the run is gone | false: nothing in that time.
function client.answer(seconds)
  local id, kind, text = host.control_next(seconds)
  if not id then return false end
  return kind, text
end

--- client.wait() -> the same, however long it takes.
function client.wait()
  while true do
    local kind, text = client.answer(0.5)
    if kind ~= false then return kind, text end
  end
end

--- client.newest(folder) -> the name of its last checkpoint, or nil.
function client.newest(folder)
  local place = folder .. "/checkpoints"
  local last
  for _, name in ipairs(fs.is_dir(place) and fs.list(place) or {}) do
    if name:find "^step%-%d+$" then last = name end
  end
  return last
end

client.story = story
return client
