-- choices.lua: which algorithm each matrix product takes on the GPU.  They are timed once for a shape; what was
-- found is kept for the next run in a file of the user's, and with the run and its checkpoints, since another
-- algorithm means other bits.  All ranks take the choices of the first rank that made one.
local c = require "pg.c"
local agree = require "pg.agree"
local fs = require "pg.fs"
local host = require "pg.host"
local C, ffi = c.C, c.ffi

local choices = {}
local FILE = "gemm_choices.txt"

-- $PGRUN_CACHE, else pgrun/ in the user's cache; nil where there is no place.
local function cache()
  local given, xdg, home = os.getenv "PGRUN_CACHE", os.getenv "XDG_CACHE_HOME", os.getenv "HOME"
  local folder = given or xdg and xdg ~= "" and xdg .. "/pgrun" or home and home ~= "" and home .. "/.cache/pgrun"
  return folder and pcall(fs.mkdir, folder) and folder .. "/" .. FILE or nil
end

local function text() return ffi.string(C.pg_gemm_choices()) end

--- choices.open(): rank 0 reads and writes the user's file.  On the GPU alone.
function choices.open()
  if c.device() ~= "cuda" or host.rank ~= 0 then return end
  local path = cache()
  if path then c.check(C.pg_gemm_cache(path)) end
end

--- choices.share() -> all that any rank has chosen, now taken by every rank; of two for one shape, the lower
-- rank's.  A collective.
function choices.share()
  if c.device() ~= "cuda" then return "" end
  local all = agree.texts(text())
  for rank = #all, 1, -1 do
    if all[rank] ~= "" then c.check(C.pg_gemm_adopt(all[rank])) end
  end
  return text()
end

--- choices.keep(folder): beside the run's other files.  choices.take(kept): what a checkpoint kept.
function choices.keep(folder)
  local kept = text()
  if kept ~= "" then fs.write(folder .. "/" .. FILE, kept) end
end
function choices.take(kept)
  if type(kept) == "string" and kept ~= "" and c.device() == "cuda" then
    c.check(C.pg_gemm_adopt(kept))
  end
end
choices.text = text

return choices
