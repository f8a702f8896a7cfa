-- ranks: 3
-- The same text runs on all ranks, whatever their files say by then; one rank's failure is all ranks' refusal.
local fs = require "pg.fs"
local sources = require "pg.live.sources"

local scratch = os.getenv "SCRATCH" or "build/tests/by-hand"
local path = scratch .. "/recipe.lua"
local function put(text)
  if pg.rank() == 0 then fs.write(path, text) end
  pg.barrier()
end

put "return { steps = 7, rank = pg.rank() }\n"
local offer = assert(sources.offer(path))
assert(offer.recipe.steps == 7 and offer.recipe.rank == pg.rank())
local sum = pg.mesh.ready().world:sum_numbers { tonumber(offer.hash:sub(1, 8), 16) }[1]
assert(sum == 3 * tonumber(offer.hash:sub(1, 8), 16), "the ranks have different texts")

put "return {\n  steps = = 7 }\n"
local none, why, rank = sources.offer(path)
assert(none == nil and rank == 0 and why:find "recipe.lua:2: unexpected symbol", why)

put 'if pg.rank() == 2 then error "not here" end\nreturn { steps = 8 }\n'
none, why, rank = sources.offer(path)
assert(none == nil and rank == 2 and why:find "recipe.lua:1: not here", why)

put "return { steps = 9 }\n"
assert(sources.offer(path).recipe.steps == 9) -- and all are in step
