-- live/journal.lua: FOLDER/journal.jsonl: what was offered to a run while it trained, an object a line: step,
-- accepted, hash of all its texts, text of the recipe, modules (texts, by file, that are not those that run), and where
-- it was refused reason, with file and line, rank and field.
local c = require "pg.c"
local fs = require "pg.fs"
local json = require "pg.json"

local journal = {}
local KEYS = { "step", "accepted", "reason", "place", "rank", "field", "hash", "text", "modules", "time" }

local function path(folder) return folder .. "/journal.jsonl" end

-- JSON is UTF-8; a text that is not keeps its bytes as "\xNN".
local function printable(text)
  if type(text) == "table" then
    local out = {}
    for k, v in pairs(text) do out[printable(k)] = printable(v) end
    return out
  elseif type(text) ~= "string" then return text end
  if pcall(json.encode, text) then return text end
  return (text:gsub("[\128-\255]", function(byte) return ("\\x%02x"):format(byte:byte()) end))
end

--- journal.write(folder, entry): entry.step and entry.accepted are needed, entry.reason where it was refused; place
-- ("models/x.lua:12") is taken from the reason.  Rank 0 calls it.
function journal.write(folder, entry)
  c.keys(entry, KEYS, "journal")
  local line = { time = os.time() }
  for k, v in pairs(entry) do line[k] = printable(v) end
  if not entry.accepted and not entry.place then
    line.place = tostring(entry.reason):match "^(%S-:%d+): "
  end
  local file, why = io.open(path(folder), "a")
  if not file then c.fail("journal: cannot write %s: %s", path(folder), why) end
  file:write(json.encode(line), "\n")
  file:close()
end

--- journal.read(folder) -> its entries, the oldest first; a line that a full disk cut short is left out.
function journal.read(folder)
  local entries = {}
  if not fs.exists(path(folder)) then return entries end
  for line in fs.read(path(folder)):gmatch "[^\n]+" do
    local ok, entry = pcall(json.decode, line)
    if ok and type(entry) == "table" then entries[#entries + 1] = entry end
  end
  return entries
end

return journal
