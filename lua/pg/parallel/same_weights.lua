-- parallel/same_weights.lua: do all ranks of an axis hold the same weights?  Asked once before the first update: a
-- script that seeds by rank would otherwise train different models and never say so.
local c = require "pg.c"
local mesh = require "pg.mesh"
local C = c.C

local same_weights = {}

-- A hash of a tensor's bytes as two numbers that a double holds exactly.
local sizes = { f32 = 4, f64 = 8, i32 = 4, i64 = 8, u8 = 1, i16 = 2, bf16 = 4, f16 = 4 } -- of t:buffer()
local function hash(t)
  local buffer, n = t:buffer()
  local h = C.pg_hash(buffer, n * sizes[t.dtype], 0)
  return tonumber(h % 0x100000000ULL), tonumber(h / 0x100000000ULL)
end

-- true where every rank has the same numbers in `list`: the largest of x and of -x agree.
local function same(list, axis)
  local both = {}
  for i, x in ipairs(list) do both[2 * i - 1], both[2 * i] = x, -x end
  local most = axis:sum_numbers(both, "max")
  for i = 1, #list do if most[2 * i - 1] ~= -most[2 * i] then return false, i end end
  return true
end

--- same_weights.check(segments, axis): raises on every rank, naming the first tensor that differs.
function same_weights.check(segments, axis)
  axis = axis or mesh.ready().dp
  if axis.size == 1 then return end
  local hashes = {}
  for _, s in ipairs(segments) do
    local low, high = hash(s.value)
    hashes[#hashes + 1], hashes[#hashes + 2] = low, high
  end
  local fine, at = same(hashes, axis)
  if fine then return end
  local s = segments[math.ceil(at / 2)]
  for _, piece in ipairs(s:pieces(s.value)) do
    if not same({ hash(piece.view) }, axis) then
      c.fail("the ranks of axis %s start from different weights; first tensor that differs: %s; give every rank "
             .. "the same seed, or broadcast the weights of rank 0", axis.name, piece.name)
    end
  end
  c.fail("the ranks of axis %s start from different weights in segment %s", axis.name, s.name)
end

return same_weights
