-- parallel/same_weights.lua: do all ranks of an axis hold the same weights?  Asked once before the first update: a
-- script that seeds by rank would otherwise train different models and never say so.
local c = require "pg.c"
local mesh = require "pg.mesh"
local hash = require("pg.segment").hash

local same_weights = {}

-- true where every rank has the same numbers in `list`: the largest of x and of -x agree.
local function same(list, axis)
  local both = {}
  for i, x in ipairs(list) do both[2 * i - 1], both[2 * i] = x, -x end
  local most = axis:sum_numbers(both, "max")
  for i = 1, #list do if most[2 * i - 1] ~= -most[2 * i] then return false, i end end
  return true
end

--- same_weights.check(segments, axis): raises on every rank, naming the first tensor that differs.  Under ZeRO-3,
-- where a rank has the whole of a segment only at its birth, the first numbers are compared and the segment named.
function same_weights.check(segments, axis)
  axis = axis or mesh.ready().dp
  if axis.size == 1 then return end
  local hashes = {}
  for _, s in ipairs(segments) do
    local low, high
    if s.born then low, high = unpack(s.born) else low, high = hash(s.value) end
    hashes[#hashes + 1], hashes[#hashes + 2] = low, high
  end
  local fine, at = same(hashes, axis)
  if fine then return end
  local s = segments[math.ceil(at / 2)]
  for _, piece in ipairs(s.born and {} or s:pieces(s.value)) do
    if not same({ hash(piece.view) }, axis) then
      c.fail("the ranks of axis %s start from different weights; first tensor that differs: %s; give every rank "
             .. "the same seed, or broadcast the weights of rank 0", axis.name, piece.name)
    end
  end
  c.fail("the ranks of axis %s start from different weights in segment %s", axis.name, s.name)
end

return same_weights
