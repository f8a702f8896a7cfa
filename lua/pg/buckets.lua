-- buckets.lua: which parameters share a segment, and so one message over dp, one window and one call of the optimiser.
-- The parameters of an item of a Sequential (a block) belong together; neighbours that are small are packed, one that
-- is large is cut between its tensors.  Both begin at the end, where backward does: what it finishes last, which
-- nothing is left to hide, is then the smallest.
-- Why 256 MiB: an all-reduce of H200s takes about 0.1 ms, and 1 ms for every 330 MB; such a message has nine tenths of
-- the bandwidth, and the last one holds a step up by less than 1 ms.  Between processes of one host it is 15 us, and
-- 1 ms for each MiB.
local c = require "pg.c"

local buckets = { SIZE = 256 } -- MiB of gradients
local OVER = 1 + 1 / 16 -- so much larger it may come out: a norm beside matrices that fill it is no message of its own

local function elements(list)
  local n = 0
  for _, p in ipairs(list) do n = n + p.count end
  return n
end

-- The parameters of groups first to last.
local function join(groups, first, last)
  local list = {}
  for i = first, last do
    for _, p in ipairs(groups[i].list) do list[#list + 1] = p end
  end
  return list
end

-- 1 to n in runs whose costs add up to no more than `most`, or that are single -> { { first, last }, ... };
-- together(i): i and i + 1 may be in one.
local function runs(n, most, cost, together)
  local list, last = {}, n
  while last > 0 do
    local first, sum = last, cost(last)
    while first > 1 and together(first - 1) and sum + cost(first - 1) <= most do
      first = first - 1
      sum = sum + cost(first)
    end
    table.insert(list, 1, { first, last })
    last = first - 1
  end
  return list
end

-- A group in parts, one where it is small enough.
local function parts_of(g, most)
  local list = g.list
  local cuts = runs(#list, most, function(i) return list[i].count end, function() return true end)
  if #cuts == 1 then return { g } end
  local parts = {}
  for i, cut in ipairs(cuts) do
    local part = { name = ("%s (%d of %d)"):format(g.name, i, #cuts), list = {} }
    for k = cut[1], cut[2] do table.insert(part.list, list[k]) end
    parts[i] = part
  end
  return parts
end

--- buckets.share(groups, size, bytes) -> { { name, list }, ... }: the parameters of each segment, in order.
-- groups = { { name, list, kin }, ... }: neighbours with the same kin (not nil) may be packed; size: MiB, 0: each
-- tensor has a segment of its own; bytes: of a number of the gradient.
function buckets.share(groups, size, bytes)
  if type(size) ~= "number" or size < 0 or size ~= size then
    c.fail("bucket is %s; a number of MiB is wanted, 0 or more", tostring(size))
  end
  local most, out = size * 2^20 / bytes * OVER, {}
  local packs = runs(#groups, most, function(i) return elements(groups[i].list) end, function(i)
    return groups[i].kin ~= nil and groups[i].kin == groups[i + 1].kin
  end)
  for _, pack in ipairs(packs) do
    local first, last = groups[pack[1]], groups[pack[2]]
    local whole = first == last and parts_of(first, most)
      or { { name = first.name .. " to " .. last.name, list = join(groups, pack[1], pack[2]) } }
    for _, part in ipairs(whole) do out[#out + 1] = part end
  end
  return out
end

return buckets
