-- fragments.lua: where the numbers of a rank lie in the tensors of the whole model, as plain data; nothing is read
-- or written here.  A rank holds a window of each segment, and in it, of each piece, a fragment:
--   { name, whole, at, count, from, first, cols, stride, writes }
-- `count` numbers from element `at` of the segment on are numbers from, from + 1, ... of a block of the tensor
-- `name`, whose shape is `whole`.  Number k of the block is the tensor's element
--   first + (k / cols) * stride + k % cols      cols = 0: first + k, without gaps
-- so that a cut of columns takes one fragment, however many rows it has.  writes: among the ranks of tp and pp
-- that hold these same numbers, this one saves them.
local c = require "pg.c"

local fragments = {}

--- fragments.block(piece) -> first, cols, stride of a piece of a parameter (params.lua) in its whole tensor.
function fragments.block(piece)
  local dim = piece.dim
  if not dim then return 0, 0, 0 end
  local row = c.product(piece.whole, dim + 1)
  local first = piece.start * row
  if dim == 1 then return first, 0, 0 end
  return first, piece.shape[dim] * row, piece.whole[dim] * row
end

-- Of the ranks of tp that hold a piece, the first writes it; of the stages that share a tied weight, the first.
local function writes(p, piece, place)
  if (p.stages or 1) > 1 and place.pp > 0 then return false end
  if not piece.dim then return place.tp == 0 end
  return place.tp % (piece.copies or 1) == 0
end

--- fragments.within(f, first, size) -> the part of fragment f in elements [first, first + size) of its segment;
-- nil where there is none.
function fragments.within(f, first, size)
  local start, stop = math.max(f.at, first), math.min(f.at + f.count, first + size)
  if stop <= start then return nil end
  local part = {}
  for k, v in pairs(f) do part[k] = v end
  part.at, part.count, part.from = start, stop - start, f.from + start - f.at
  return part
end

-- A whole piece as a fragment.
local function whole_piece(p, piece, place)
  local first, cols, stride = fragments.block(piece)
  return { name = piece.name, whole = piece.whole, at = p.offset + piece.first, from = 0,
           count = c.product(piece.shape), first = first, cols = cols, stride = stride,
           writes = writes(p, piece, place) }
end

--- fragments.of(segment, place, first, size) -> the fragments in elements [first, first + size) of a segment.
-- place = { pp, tp }: this rank's, from 0.  A tensor without elements is a fragment without any.
function fragments.of(segment, place, first, size)
  local list = {}
  for _, p in ipairs(segment.params) do
    for _, piece in ipairs(p.pieces) do
      local f = whole_piece(p, piece, place)
      local none = c.product(piece.whole) == 0
      list[#list + 1] = none and f or fragments.within(f, first, size)
    end
  end
  return list
end

--- fragments.share(segment, dp) -> first, size of the window that this rank of axis dp saves: what it holds alone, or
-- an equal share of what all of them hold.
function fragments.share(segment, dp)
  if segment.size < segment.count then return segment.first, segment.size end
  local first = math.floor(segment.count * dp.rank / dp.size)
  return first, math.floor(segment.count * (dp.rank + 1) / dp.size) - first
end

return fragments
