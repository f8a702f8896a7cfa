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
pg.barrier()
