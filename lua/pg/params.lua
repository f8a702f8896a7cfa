-- params.lua: parameters, and the segments that hold them.
-- A segment is the parameters of one block laid end to end in flat buffers: value, gradient, and what an
-- optimiser adds (moments).  It is the unit of reducing, updating and saving.  Matrices come first, then
-- the rest; each parameter starts on a multiple of 64 elements.  A parameter may consist of pieces,
-- neighbours that keep their own names (q, k and v of one product).
local c = require "pg.c"
local Tensor = require "pg.tensor"
local C, ffi = c.C, c.ffi

local params = {}
local ALIGN = 64 -- elements

--- params.new(shape, o) -> a parameter without numbers yet.  o.init = { "normal", std } | { "uniform", a }
-- | { "ones" } | { "zeros" }; o.pieces = { { name, rows, init }, ... } splits dim 1; o.decay (true for
-- matrices); o.split: the dim that tensor parallelism cuts.
function params.new(shape, o)
  local count = 1
  for _, d in ipairs(shape) do count = count * c.int(d, "a dim of a parameter") end
  return setmetatable({ shape = shape, dtype = "f32", count = count, owners = 1, requires_grad = true,
                        init = o.init or { "normal", 0.02 }, pieces = o.pieces, split = o.split,
                        decay = o.decay == nil and #shape > 1 or o.decay == true }, Tensor)
end

-- The named pieces of parameter p, whose module's prefix is known now: { name, first, shape, init }.
local function name_pieces(p, prefix, name)
  local row = p.count / math.max(p.shape[1] or 1, 1)
  local out, first = {}, 0
  if not p.pieces then
    p.name = prefix .. name
    out[1] = { name = p.name, first = 0, shape = p.shape, init = p.init }
  else
    local names = {}
    for i, piece in ipairs(p.pieces) do
      local shape = { unpack(p.shape) }
      shape[1] = piece.rows
      names[i] = prefix .. piece.name
      out[i] = { name = names[i], first = first * row, shape = shape, init = piece.init or p.init }
      first = first + piece.rows
    end
    if first ~= p.shape[1] then
      c.fail("parameter %s: its pieces have %d rows, it has %d", prefix .. name, first, p.shape[1])
    end
    p.name = table.concat(names, "+")
  end
  p.pieces = out
end

--- params.initialise(p, seed): numbers that depend on the seed, the piece's name and the index alone.
function params.initialise(p, seed)
  for _, piece in ipairs(p.pieces) do
    local v = p:view(piece.shape, piece.first)
    local kind, a = piece.init[1], piece.init[2]
    if kind == "ones" then v:fill(1)
    elseif kind == "zeros" then v:fill(0)
    elseif kind == "normal" then
      c.check(C.pg_random_normal(v.raw, seed, c.hash(piece.name), 0, a, 0, 0, 0))
    elseif kind == "uniform" then
      c.check(C.pg_random_uniform(v.raw, seed, c.hash(piece.name), -a, a, 0, 0, 0))
    else c.fail("parameter %s: init %s is unknown (normal, uniform, ones, zeros)", piece.name, tostring(kind)) end
    v:free()
  end
end

local function attach(p, flat, offset, shape)
  local v = flat:view(shape, offset):keep()
  p.raw, v.raw = v.raw, nil
end

local Segment = {}
Segment.__index = Segment

-- Give every parameter its place: matrices first.
local function place(list)
  local order, offset = {}, 0
  for _, p in ipairs(list) do if #p.shape > 1 then order[#order + 1] = p end end
  for _, p in ipairs(list) do if #p.shape <= 1 then order[#order + 1] = p end end
  for _, p in ipairs(order) do
    p.offset = offset
    offset = math.ceil((offset + p.count) / ALIGN) * ALIGN
  end
  return order, offset
end

-- One run for neighbours of the same decay and rate.  A frozen parameter stands still: rate 0.
local function runs_of(order, total)
  local runs = {}
  for i, p in ipairs(order) do
    local last = runs[#runs]
    local stop = order[i + 1] and order[i + 1].offset or total
    local rate = p.requires_grad and (p.rate or 1) or 0
    if last and last.decay == p.decay and last.rate == rate then last.stop = stop
    else runs[#runs + 1] = { stop = stop, decay = p.decay, rate = rate } end
  end
  return runs
end

--- params.segment(name, list, dtype) -> a segment whose buffers hold the parameters of the list.
function params.segment(name, list, dtype)
  local order, total = place(list)
  local s = setmetatable({ name = name, params = order, count = total, dtype = dtype }, Segment)
  C.pg_mem_tag "weights"
  s.value = Tensor.zeros({ total }, dtype):keep()
  C.pg_mem_tag "gradients"
  s.grad = Tensor.zeros({ total }, dtype):keep()
  C.pg_mem_tag "activations"
  for _, p in ipairs(order) do
    p.dtype, p.segment = dtype, s
    attach(p, s.value, p.offset, p.shape)
    p.grad = s.grad:view(p.shape, p.offset):keep()
    p.grad_fresh = true
  end
  return s
end

--- segment:run_tables(decay) -> ends i64 [R], factors f32 [R,2] for the update kernels.
function Segment:run_tables(decay)
  local runs = runs_of(self.params, self.count)
  local ends = ffi.new("int64_t[?]", #runs)
  local factors = {}
  for i, r in ipairs(runs) do
    ends[i - 1] = r.stop
    factors[i] = { r.decay and decay or 0, r.rate }
  end
  for _, p in ipairs(self.params) do p.frozen = not p.requires_grad end
  return Tensor.empty({ #runs }, "i64"):write(ends):keep(), Tensor.from(factors, "f32"):keep()
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

--- params.build(root, o) -> root, its parameters named, placed in segments and initialised.
-- o.seed (0), o.dtype ("f32").
function params.build(root, o)
  o = o or {}
  local dtype = o.dtype or "f32"
  local seed = ffi.cast("uint64_t", c.int64(o.seed or 0, "seed"))
  local groups, group_of, by_name, seen = {}, {}, {}, {}
  root:each_parameter(function(p, prefix, name, segment)
    if seen[p] then return end
    seen[p] = true
    name_pieces(p, prefix, name)
    for _, piece in ipairs(p.pieces) do
      if by_name[piece.name] then c.fail("two parameters are named %s", piece.name) end
      by_name[piece.name] = p
    end
    local g = group_of[segment]
    if not g then
      g = { name = segment, list = {} }
      group_of[segment], groups[#groups + 1] = g, g
    end
    g.list[#g.list + 1] = p
  end)
  root.segments = {}
  for i, g in ipairs(groups) do
    root.segments[i] = params.segment(g.name, g.list, dtype)
    for _, p in ipairs(g.list) do params.initialise(p, seed) end
  end
  return root
end

return params
