-- ranks: 4
-- Lines of a run's prompt, the first of many sessions: some ranks stand aside at once, while others are still making
-- the groups that lines use.
local lines = require "pg.live.lines"
local mesh = require "pg.mesh"

mesh.build { pp = 2, dp = 2 }
for i = 1, 25 do
  local session = lines.new { keep = true }
  session:hear ""
  local said, well = session:run("@" .. i % 4 .. " pg.barrier()", {})
  if pg.rank() == 0 then
    assert(not well and said:find "does not run this line", said)
  end
  said, well = session:run("pg.rank()", {})
  if pg.rank() == 0 then assert(well and said:find "%[3%] 3", said) end
end

-- ---- what is long, and what must not be ----

-- On the first rank what all have said, and how long it took.
local session = lines.new { keep = true }
local function said_by(text)
  session:hear ""
  local before = pg.time()
  return session:run(text, {}), pg.time() - before
end
local LONG = 5 -- seconds, of lines that do nothing but end
for _, text in ipairs { "error(('x'):rep(2e6))", "print(('x'):rep(2e5)) error 'here'", "('x'):rep(2e6)" } do
  local said, seconds = said_by(text)
  assert(seconds < LONG, ("%s: %.1f s"):format(text, seconds))
  assert(#said < 2e6)
end
local said = said_by "jit.on() while true do end"
if pg.rank() == 0 then assert(said:find("jit.on: a line runs without the compiler", 1, true), said) end
assert(jit.status())
pg.barrier()
