-- segment.lua: the parameters of one block laid end to end in flat buffers: value, gradient, and what an
-- optimiser adds (moments, masters).  A segment is the unit of reducing, sharding, updating and saving.
-- Order: what tensor parallelism cuts, then what its ranks all hold; matrices before the rest in both.
-- Each parameter starts on a multiple of 64 elements.
--   s.count               elements of the whole
--   s.first, s.size       the window of it that this rank updates: all of it, or under ZeRO the share of
--                         its place on dp; s.own_value and s.own_grad are those stretches
--   s.sums                { { first, count, axis }, ... }: stretches of the gradient to be summed over an
--                         axis before dp, since every rank of that axis made a part of it
local c = require "pg.c"
local mesh = require "pg.mesh"
local Tensor = require "pg.tensor"
local C, ffi = c.C, c.ffi

local ALIGN = 64 -- elements
local Segment = {}
Segment.__index = Segment

local function up(n, unit) return math.ceil(n / unit) * unit end

local function class_of(p) return (p.cut and 0 or 2) + (#p.shape > 1 and 0 or 1) end

-- Give every parameter its place.  share: ranks that the whole must divide over.
local function place(list, share)
  local order, offset = {}, 0
  for class = 0, 3 do
    for _, p in ipairs(list) do if class_of(p) == class then order[#order + 1] = p end end
  end
  for _, p in ipairs(order) do
    p.offset = offset
    offset = up(offset + p.count, ALIGN)
  end
  return order, up(offset, ALIGN * share)
end

local function attach(p, flat)
  local v = flat:view(p.shape, p.offset):keep()
  p.raw, v.raw = v.raw, nil
end

local function buffer(tag, count, dtype)
  C.pg_mem_tag(tag)
  local t = Tensor.zeros({ count }, dtype):keep()
  C.pg_mem_tag "activations"
  return t
end

--- Segment.new(name, list, dtype) -> a segment whose buffers hold the parameters of the list.  Gradients
-- are f32 beside bf16 and f16.
function Segment.new(name, list, dtype)
  local layout = mesh.layout
  local share = layout.zero > 0 and mesh.dp.size or 1
  local order, total = place(list, share)
  local s = setmetatable({ name = name, params = order, count = total, dtype = dtype, sums = {} }, Segment)
  s.grad_dtype = (dtype == "bf16" or dtype == "f16") and "f32" or dtype
  s.size = total / share
  s.first = share > 1 and mesh.dp.rank * s.size or 0
  s.value, s.grad = buffer("weights", total, dtype), buffer("gradients", total, s.grad_dtype)
  for _, p in ipairs(order) do
    p.dtype, p.grad_dtype, p.segment = dtype, s.grad_dtype, s
    attach(p, s.value)
    p.grad = s.grad:view(p.shape, p.offset):keep()
    p.grad_fresh = true
  end
  s:find_own()
  return s
end

--- segment:find_own(): own_value and own_grad from the buffers of the whole.
function Segment:find_own()
  if self.size == self.count then
    self.own_value, self.own_grad = self.value, self.grad
  else
    self.own_value = self.value:view({ self.size }, self.first):keep()
    self.own_grad = self.grad:view({ self.size }, self.first):keep()
  end
end

-- How many ranks of the job hold this piece, and so have its square in their sum.
local function holders(p, piece)
  local n = p.cut and piece.copies or mesh.tp.size
  if mesh.layout.zero == 0 then n = n * mesh.dp.size end
  return n * (p.stages or 1)
end

-- Runs of equal decay, rate and weight inside the window; stops are counted from its start.  A frozen
-- parameter stands still: rate 0.  What lies between parameters is zero and may go with either.
local function runs_of(s)
  local runs = {}
  local function add(stop, decay, rate, weight)
    stop = math.min(stop, s.first + s.size) - s.first
    local last = runs[#runs]
    if stop <= (last and last.stop or 0) then return end
    if last and last.decay == decay and last.rate == rate and last.weight == weight then last.stop = stop
    else runs[#runs + 1] = { stop = stop, decay = decay, rate = rate, weight = weight } end
  end
  for i, p in ipairs(s.params) do
    local rate = p.requires_grad and (p.rate or 1) or 0
    local stop = s.params[i + 1] and s.params[i + 1].offset or s.count
    for k, piece in ipairs(p.pieces) do
      local next_piece = p.pieces[k + 1]
      add(next_piece and p.offset + next_piece.first or stop, p.decay, rate, 1 / holders(p, piece))
    end
    add(stop, p.decay, rate, 1 / mesh.size()) -- a parameter of which nothing is here but padding
  end
  return runs
end

--- segment:run_tables(decay) -> ends i64 [R], factors f32 [R,2], weights f32 [R], for the kernels.
function Segment:run_tables(decay)
  local runs = runs_of(self)
  local ends = ffi.new("int64_t[?]", #runs)
  local factors, weights = {}, {}
  for i, r in ipairs(runs) do
    ends[i - 1] = r.stop
    factors[i], weights[i] = { r.decay and decay or 0, r.rate }, r.weight
  end
  for _, p in ipairs(self.params) do p.frozen = not p.requires_grad end
  return Tensor.empty({ #runs }, "i64"):write(ends):keep(), Tensor.from(factors, "f32"):keep(),
         Tensor.from(weights, "f32"):keep()
end

--- segment:stale() -> true where a parameter was frozen or freed since run_tables looked.
function Segment:stale()
  for _, p in ipairs(self.params) do
    if p.frozen == p.requires_grad then return true end
  end
  return false
end

--- segment:zero_unused(): a parameter that got no gradient in this step has gradient 0.
function Segment:zero_unused()
  for _, p in ipairs(self.params) do
    if p.grad_fresh then
      p.grad:fill(0)
      p.grad_fresh = false
    end
  end
end

--- segment:fresh(): the next gradients overwrite these.
function Segment:fresh()
  for _, p in ipairs(self.params) do p.grad_fresh = true end
end

--- segment:pieces(flat) -> { { name, view }, ... }: every named piece as a view of a flat buffer of the
-- segment (its value, gradient or a moment).  The caller frees the views.
function Segment:pieces(flat)
  local out = {}
  for _, p in ipairs(self.params) do
    for _, piece in ipairs(p.pieces) do
      out[#out + 1] = { name = piece.name, view = flat:view(piece.shape, p.offset + piece.first) }
    end
  end
  return out
end

return Segment
