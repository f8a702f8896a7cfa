-- live/budget.lua: so many instructions for code that people have just written and that nobody has run: the same
-- number on every rank, so that all of them come to the same end.  Code that was compiled is not counted: call it
-- with the compiler off and functions that are new.  It is stopped in lines of its own, never within pgrun's.
local c = require "pg.c"

jit.off(true, true)

local budget = {}
local USUAL = 50 -- millions; a training of 100 blocks on shapes takes about 4

local function millions()
  local text = os.getenv "PGRUN_TRIAL_LIMIT"
  if not text then return USUAL end
  local n = tonumber(text)
  if not (n and n > 0 and n <= 2000) then
    c.fail("PGRUN_TRIAL_LIMIT=%s; it is a number of millions of instructions, up to 2000", text)
  end
  return n
end

--- budget.run(f, ...) -> as pcall.  Of code that went beyond it no pcall of its own holds it back.
function budget.run(f, ...)
  local limit, over = millions(), nil
  local function stop()
    debug.sethook(stop, "", 1) -- and at every instruction from here on
    if debug.getinfo(2, "S").source:find "^@lua/pg/" then return end
    over = over or c.position()
    error("interrupted", 0)
  end
  local function done(...)
    debug.sethook()
    if not over then return ... end
    return false, ("%sstopped: it ran for more than %g million instructions (PGRUN_TRIAL_LIMIT)"):format(over, limit)
  end
  debug.sethook(stop, "", limit * 1e6)
  return done(pcall(f, ...))
end

return budget
