-- busy.lua: which rank holds up the others?  Each rank's seconds of work, without those it has waited for others,
-- travel with the numbers of a step.  Seconds are the host's: on a GPU they tell of a slow host, not of a slow card.
local c = require "pg.c"
local mesh = require "pg.mesh"
local C = c.C

local busy = {}
local Busy = {}
Busy.__index = Busy
local FACTOR = 1.2 -- of the middle rank's seconds, from which on a rank is named

--- busy.new() -> a count that begins now.
function busy.new()
  local b = setmetatable({}, Busy)
  b:reset()
  b.last, b.waited = C.pg_time(), mesh.waited
  return b
end

--- b:add(numbers): this rank's seconds of work since the last call go to the end of a list that all ranks sum up.
function Busy:add(numbers)
  local now = C.pg_time()
  self.first = #numbers
  for rank = 0, mesh.size() - 1 do numbers[self.first + 1 + rank] = 0 end
  numbers[self.first + 1 + mesh.rank()] = now - self.last - (mesh.waited - self.waited)
end

--- b:note(sums): that list, summed.
function Busy:note(sums)
  for rank = 0, mesh.size() - 1 do
    self.seconds[rank] = (self.seconds[rank] or 0) + sums[self.first + 1 + rank]
  end
  self.last, self.waited = C.pg_time(), mesh.waited
end

--- b:slowest() -> "slowest rank 3 (+35 %)", or nil where no rank works much longer than the middle one.
function Busy:slowest()
  local sorted, slow = {}, 0
  for rank = 0, mesh.size() - 1 do
    sorted[rank + 1] = self.seconds[rank] or 0
    if sorted[rank + 1] > sorted[slow + 1] then slow = rank end
  end
  local most = sorted[slow + 1]
  table.sort(sorted)
  local middle = sorted[math.ceil(#sorted / 2)]
  if #sorted == 1 or middle <= 0 or most <= FACTOR * middle then return nil end
  return ("slowest rank %d (+%.0f %%)"):format(slow, 100 * (most / middle - 1))
end

function Busy:reset() self.seconds = {} end

return busy
