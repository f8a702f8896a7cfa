-- params.lua: parameters: their shape, names and first numbers; segment.lua holds them.
-- A parameter may consist of pieces, neighbours that keep their own names (q, k and v of one product).
-- Tensor parallelism cuts it along one dim: p.shape is then what this rank holds, and each piece knows
-- where in the whole it lies:
--   piece = { name, first, shape, whole, dim, start, copies, init }
-- numbers from element `first` of p on, of shape `shape`, are those of the tensor `name` of shape `whole`
-- from index `start` of dim `dim` (1 or 2; nil: all of it); `copies` ranks of tp hold the same ones.
-- One tensor that stacks several runs of rows (GPT-2's q, k and v) is cut run by run: pieces of the same name
-- with windows of their own.
local buckets = require "pg.buckets"
local c = require "pg.c"
local mesh = require "pg.mesh"
local Segment = require "pg.segment"
local Tensor = require "pg.tensor"
local C, ffi = c.C, c.ffi

local params = {}
-- Products in half precision want sizes that are multiples of 8 elements, and like more: vocabularies are padded.
local HALF_UNIT = 64

--- params.new(shape, o) -> a parameter without numbers yet.  o.init = { "normal", std } | { "uniform", a }
-- | { "ones" } | { "zeros" }; o.pieces = { { name, rows, init, copies, sections }, ... } splits dim 1, sections =
-- { { rows, copies }, ... } the rows of a piece into runs that are cut each for itself; o.decay (true for
-- matrices); o.split: the dim that tensor parallelism cuts (params.cut); nil: every rank holds it all.
function params.new(shape, o)
  local count = 1
  for _, d in ipairs(shape) do count = count * c.int(d, "a dim of a parameter") end
  return setmetatable({ shape = shape, dtype = "f32", count = count, owners = 1, requires_grad = true,
                        init = o.init or { "normal", 0.02 }, pieces = o.pieces, split = o.split,
                        decay = o.decay == nil and #shape > 1 or o.decay == true }, Tensor)
end

-- ---- cutting ----

--- params.fitting(size, most, fits) -> "tp = 2 or tp = 6": the sizes next to `size`, up to `most`, that fit.
function params.fitting(size, most, fits)
  local low, high
  for n = size - 1, 1, -1 do
    if fits(n) then low = n break end
  end
  for n = size + 1, most do
    if fits(n) then high = n break end
  end
  return ("tp = %d%s"):format(low or high or 1, low and high and (" or tp = %d"):format(high) or "")
end

--- params.divides(n, size, what): raises where `size` ranks of tp do not divide n of what.
function params.divides(n, size, what)
  if n % size == 0 then return end
  c.fail("layout.tp = %d does not divide %s, %d; %s would fit", size, what, n,
         params.fitting(size, n, function(k) return n % k == 0 end))
end

-- n rows (or columns) over `size` ranks where every `copies` neighbours hold the same -> start, length.
local function share(n, size, rank, copies, what)
  local parts = size / copies
  params.divides(n, parts, what)
  return math.floor(rank / copies) * (n / parts), n / parts
end

-- Rows as equal as they can be padded to, in whole units: ranks past the end hold padding -> start, length, valid.
local unit = 1
local function padded(n, size, rank)
  local each = math.ceil(n / size / unit) * unit
  local start = math.min(rank * each, n)
  return start, each, math.min(each, n - start)
end

-- The pieces of a parameter as this rank holds them, and their rows.
local function cut_pieces(pieces, size, rank)
  local out, total = {}, 0
  for _, piece in ipairs(pieces) do
    local below = 0 -- rows of the piece before this section
    for _, section in ipairs(piece.sections or { piece }) do
      local start, rows = share(section.rows, size, rank, section.copies or 1, "the rows of " .. piece.name)
      out[#out + 1] = { name = piece.name, init = piece.init, rows = rows, whole_rows = piece.rows,
                        start = below + start, copies = section.copies or 1 }
      below, total = below + section.rows, total + rows
    end
  end
  return out, total
end

--- params.cut(p, o): p becomes this rank's share along its dim p.split.  o.pad: rows may be padded (zeros at
-- the end, in no saved file).  Pieces of p, and sections of a piece, are cut each for itself.
function params.cut(p, o)
  local size, rank = mesh.tp.size, mesh.tp.rank
  if size == 1 or not p.split or p.cut then return end
  local shape, dim = { unpack(p.shape) }, p.split
  p.whole, p.cut = p.shape, true
  if p.pieces then
    p.pieces, shape[1] = cut_pieces(p.pieces, size, rank)
  elseif o and o.pad then
    p.start, shape[dim], p.valid = padded(shape[dim], size, rank)
  else
    p.start, shape[dim] = share(shape[dim], size, rank, 1, o and o.what or ("dim %d of a parameter"):format(dim))
  end
  p.shape, p.count = shape, c.product(shape)
end

--- params.pad(p): rows of p as many as the unit of this build asks for (zeros at the end, in no saved file).
function params.pad(p)
  local rows = p.shape[1]
  local _, all = padded(rows, 1, 0)
  if all == rows or p.valid then return end
  p.whole, p.start, p.valid = p.shape, 0, rows
  p.shape = { all, unpack(p.shape, 2) }
  p.count = p.count / rows * all
end

-- ---- names ----

local function single_piece(p, name)
  local shape = { unpack(p.shape) }
  if p.valid then shape[p.cut and p.split or 1] = p.valid end
  return { name = name, first = 0, shape = shape, whole = p.whole or p.shape, dim = p.cut and p.split or nil,
           start = p.start or 0, copies = 1, init = p.init }
end

-- The named pieces of parameter p, whose module's prefix is known now.
local function name_pieces(p, prefix, name)
  local row = p.count / math.max(p.shape[1] or 1, 1)
  local out, first = {}, 0
  if not p.pieces then
    p.name = prefix .. name
    out[1] = single_piece(p, p.name)
  else
    local names = {}
    for i, piece in ipairs(p.pieces) do
      local shape, whole = { unpack(p.shape) }, { unpack(p.shape) }
      shape[1], whole[1] = piece.rows, piece.whole_rows or piece.rows
      local full = prefix .. piece.name
      if names[#names] ~= full then names[#names + 1] = full end
      out[i] = { name = full, first = first * row, shape = shape, whole = whole, dim = p.cut and 1 or nil,
                 start = piece.start or 0, copies = piece.copies or 1, init = piece.init or p.init }
      first = first + piece.rows
    end
    if first ~= p.shape[1] then
      c.fail("parameter %s: its pieces have %d rows, it has %d", prefix .. name, first, p.shape[1])
    end
    p.name = table.concat(names, "+")
  end
  p.pieces = out
end

-- ---- first numbers ----

-- The index map of a piece: element i of it is number first + (i / cols) * stride + i % cols of the whole.
local function map_of(piece)
  if piece.dim == 2 then return piece.start, piece.shape[2], piece.whole[2] end
  local row = piece.whole[2] or 1
  return piece.dim == 1 and piece.start * row or 0, 0, 0
end

--- params.initialise(p, seed, flat): numbers into flat, from element p.offset on, that depend on the seed, the
-- piece's name and the index in the whole alone, so that they are the same in every layout.
function params.initialise(p, seed, flat)
  for _, piece in ipairs(p.pieces) do
    local v = flat:view(piece.shape, p.offset + piece.first)
    local kind, a = piece.init[1], piece.init[2]
    local first, cols, stride = map_of(piece)
    if v.count == 0 then kind = "zeros" end
    if kind == "ones" then v:fill(1)
    elseif kind == "zeros" then v:fill(0)
    elseif kind == "normal" then
      c.check(C.pg_random_normal(v.raw, seed, c.hash(piece.name), 0, a, first, cols, stride))
    elseif kind == "uniform" then
      c.check(C.pg_random_uniform(v.raw, seed, c.hash(piece.name), -a, a, first, cols, stride))
    else c.fail("parameter %s: init %s is unknown (normal, uniform, ones, zeros)", piece.name, tostring(kind)) end
    v:free()
  end
end

-- ---- a model ----

-- Every parameter named; those that this rank holds (its stage's, or lent to a module of it) by segment.
local function gather(root)
  local groups, group_of, by_name, seen, taken, kin_of = {}, {}, {}, {}, {}, {}
  root:each_parameter(function(p, prefix, name, segment, absent, kin)
    if prefix and not seen[p] then
      seen[p] = true
      p.home = p.alone and prefix .. name or segment
      if p.alone or kin_of[p.home] ~= nil and kin_of[p.home] ~= kin then kin = nil end
      kin_of[p.home] = kin or false
      name_pieces(p, prefix, name)
      for _, piece in ipairs(p.pieces) do
        local other = by_name[piece.name]
        if other and not (other == p and piece.dim) then c.fail("two parameters are named %s", piece.name) end
        by_name[piece.name] = p
      end
    end
    if absent or taken[p] then return end
    taken[p] = true
    local g = group_of[p.home]
    if not g then
      g = { name = p.home, list = {} }
      group_of[p.home], groups[#groups + 1] = g, g
    end
    g.list[#g.list + 1] = p
  end)
  for _, g in ipairs(groups) do g.kin = kin_of[g.name] or nil end
  return groups
end

-- The ranks of tp that hold what this one holds of a piece with copies.
local function sharing(copies)
  local tp = mesh.tp
  tp.groups = tp.groups or {}
  if not tp.groups[copies] then
    local members, first = {}, tp.rank - tp.rank % copies
    for i = 1, copies do members[i] = first + i - 1 end
    tp.groups[copies] = tp:group(members, "tp copies")
  end
  return tp.groups[copies]
end

-- Stretches of p that other ranks hold as well, each having made a part of their gradient.
local function add_copies(sums, p)
  local last
  for _, piece in ipairs(p.pieces) do
    local first, count = p.offset + piece.first, p.count * piece.shape[1] / math.max(p.shape[1], 1)
    if piece.copies == 1 then last = nil
    elseif last and last.copies == piece.copies then last.count = last.count + count
    else
      last = { first = first, count = count, copies = piece.copies, axis = sharing(piece.copies) }
      sums[#sums + 1] = last
    end
  end
end

--- params.sums(segment) -> { { first, count, axis }, ... }: stretches of its gradient of which each rank of tp
-- made a part: copies of key and value heads, and, where ranks work on rows of their own, all that is not cut.
function params.sums(segment)
  local sums, whole = {}, nil
  if mesh.tp.size == 1 then return sums end
  for _, p in ipairs(segment.params) do
    if p.cut then add_copies(sums, p)
    elseif not whole and mesh.layout.sequence then
      whole = { first = p.offset, count = segment.count - p.offset, axis = mesh.tp } -- they come last
      sums[#sums + 1] = whole
    end
  end
  return sums
end

--- params.lay(root, o) -> { { name, list, kin }, ... }: its parameters cut for this rank and named, those that it holds
-- by item (buckets.lua makes segments of them); none has numbers yet.
function params.lay(root, o)
  mesh.ready()
  unit = (o.dtype == "bf16" or o.dtype == "f16") and HALF_UNIT or 1
  root:each_module(function(m, name)
    if mesh.tp.size > 1 then
      if m.split_over then m:split_over(mesh.tp, name) end
    elseif m.pad_rows then m:pad_rows() end
  end)
  return gather(root)
end

--- params.build(root, o) -> root, its parameters cut for this rank, named, placed in segments and initialised.
-- o.seed (0), o.dtype ("f32"; gradients of bf16 and f16 are f32, and a master beside the values keeps what they
-- lack); o.bucket: MiB of gradients in a segment (buckets.SIZE); o.train = false: no gradients and masters before an
-- optimiser asks for them.
function params.build(root, o)
  o = o or {}
  local groups = buckets.share(params.lay(root, o), o.bucket or buckets.SIZE, o.dtype == "f64" and 8 or 4)
  local seed = ffi.cast("uint64_t", c.int64(o.seed or 0, "seed"))
  root.segments = {}
  for i, g in ipairs(groups) do
    local s = Segment.new(g.name, g.list, o.dtype or "f32", {
      train = o.train, numbers = function(p, flat) params.initialise(p, seed, flat) end })
    root.segments[i], s.sums = s, params.sums(s)
  end
  return root
end

return params
