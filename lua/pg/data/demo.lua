-- data/demo.lua: the text that models/tiny.lua trains on by default: the Jargon File, from Debian's
-- jargon-text package, unpacked by `make demo`.
local c = require "pg.c"
local fs = require "pg.fs"

local demo = {}
local PLACE = "build/demo/jargon.txt"

--- demo.path() -> the file; raises with the way out where it is not there.
function demo.path()
  local tree = require("pg.host").tree
  for _, path in ipairs { PLACE, tree and tree .. "/" .. PLACE or PLACE } do
    if fs.exists(path) then return path end
  end
  c.fail("there is no demo text at %s; run `make demo` once, or give --data.text=FILE", PLACE)
end

return demo
