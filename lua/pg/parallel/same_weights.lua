-- parallel/same_weights.lua: do all ranks of an axis hold the same weights?  Asked once before the first update: a
-- script that seeds by rank would otherwise train different models and never say so.
local c = require "pg.c"
local mesh = require "pg.mesh"

local same_weights = {}

-- nil where every rank has the same numbers in `list`: the largest of x and of -x agree; else the place of the first
-- that differs.
local function differs(list, axis)
  local both = {}
  for i, x in ipairs(list) do both[2 * i - 1], both[2 * i] = x, -x end
  local most = axis:sum_numbers(both, "max")
  for i = 1, #list do if most[2 * i - 1] ~= -most[2 * i] then return i end end
end

--- same_weights.check(segments, axis): raises on every rank, naming the first tensor that differs.  Under ZeRO-3,
-- where a rank has the whole of a segment only at its birth, the first numbers are compared.
function same_weights.check(segments, axis)
  axis = axis or mesh.ready().dp
  if axis.size == 1 then return end
  local names, hashes = {}, {}
  for _, s in ipairs(segments) do
    for _, piece in ipairs(s.born or s:hashes()) do
      names[#names + 1] = piece[1]
      hashes[#hashes + 1], hashes[#hashes + 2] = piece[2], piece[3]
    end
  end
  local at = differs(hashes, axis)
  if not at then return end
  c.fail("the ranks of axis %s start from different weights; first tensor that differs: %s; give every rank the same "
         .. "seed, or broadcast the weights of rank 0", axis.name, names[math.ceil(at / 2)])
end

return same_weights
