-- ranks: 3
-- The same text runs on all ranks, whatever their files say by then; one rank's failure is all ranks' refusal.
local agree = require "pg.agree"
local fs = require "pg.fs"
local sources = require "pg.live.sources"

local scratch = os.getenv "SCRATCH" or "build/tests/by-hand"
local path = scratch .. "/recipe.lua"
local function put(text)
  if pg.rank() == 0 then fs.write(path, text) end
  pg.barrier()
end

-- -> the offer, or nil, message, rank
local function offer_it()
  local offer, unread = sources.offer(path)
  if unread then return nil, unread, 0 end
  local ok, wrong = pcall(sources.compile, offer)
  local message, rank = agree.first(not ok and wrong or nil)
  if message then return nil, message, rank end
  return offer
end

put "return { steps = 7, rank = pg.rank() }\n"
local offer = assert(offer_it())
assert(offer.recipe.steps == 7 and offer.recipe.rank == pg.rank())
local sum = pg.mesh.ready().world:sum_numbers { tonumber(offer.hash:sub(1, 8), 16) }[1]
assert(sum == 3 * tonumber(offer.hash:sub(1, 8), 16), "the ranks have different texts")

put "return {\n  steps = = 7 }\n"
local none, why, rank = offer_it()
assert(none == nil and rank == 0 and why:find "recipe.lua:2: unexpected symbol", why)

put 'if pg.rank() == 2 then error "not here" end\nreturn { steps = 8 }\n'
none, why, rank = offer_it()
assert(none == nil and rank == 2 and why:find "recipe.lua:1: not here", why)

put "return { steps = 9 }\n"
assert(offer_it().recipe.steps == 9) -- and all are in step
