-- segment.lua: the parameters of one block, of several small ones or of a part of a large one (buckets.lua), laid end
-- to end in flat buffers: value, gradient, master; an optimiser adds moments.  A segment is the unit of reducing,
-- sharding, updating and saving.
-- Order: what tensor parallelism cuts, then what its ranks all hold; matrices before the rest in both.
-- Each parameter starts on a multiple of 64 elements.
--   s.count               elements of the whole
--   s.level               the ZeRO stage that it lives under; 0 where dp has one rank
--   s.first, s.size       the window of it that this rank updates: all of it, or from level 1 on the share of
--                         its place on dp; s.own_value and s.own_grad are those stretches
--   s.value, s.grad       flat buffers of the whole.  From level 2 on s.grad is here only from the first
--                         gradient of a backward to its reduction, and s.own_grad adds up the shares of a
--                         step; at level 3 s.value is here only while its block runs (parallel/zero.lua)
--   s.master              beside bf16: i16, the 16 bits that bf16 lacks; beside f16: f32.  Of the window
--   s.sums                { { first, count, axis }, ... }: stretches of the gradient to be summed over an
--                         axis before dp, since every rank of that axis made a part of it
local c = require "pg.c"
local mesh = require "pg.mesh"
local Tensor = require "pg.tensor"
local C, ffi = c.C, c.ffi

local ALIGN = 64 -- elements
local masters = { bf16 = "i16", f16 = "f32" } -- dtype of the master beside values of these
local Segment = {}
Segment.__index = Segment

-- ---- laying out ----

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

-- A hash of a tensor's bytes, as two numbers that a double holds exactly.
local function hash(t)
  local n = t.count * Tensor.sizes[t.dtype]
  local bytes = ffi.new("uint8_t[?]", math.max(n, 1))
  c.check(C.pg_tensor_read(t:alive().raw, 0, bytes, n))
  local h = C.pg_hash(bytes, n, 0)
  return tonumber(h % 0x100000000ULL), tonumber(h / 0x100000000ULL)
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

-- The stretch of a flat buffer of the whole that is this rank's.
local function own(s, flat)
  if s.size == s.count then return flat end
  return flat:view({ s.size }, s.first):keep()
end

-- First numbers, made in f32 and rounded once, so that a half precision run starts from those of the f32 run.
local function set_numbers(s, o)
  local kind = masters[s.dtype]
  local flat = kind and Tensor.zeros({ s.count }, "f32"):keep() or s.value
  for _, p in ipairs(s.params) do o.numbers(p, flat) end
  if not kind then return end
  local master = buffer("masters", s.count, kind)
  c.check(C.pg_master_split(s.value.raw, master.raw, flat.raw))
  flat:free()
  if o.train == false then return master:free() end
  s.master = master
  if s.size < s.count then
    local part = own(s, master)
    s.master = buffer("masters", s.size, kind):copy_from(part)
    part:free()
    master:free()
  end
end

--- Segment.new(name, list, dtype, o) -> a segment whose buffers hold the parameters of the list.
-- o.numbers(p, flat) writes the first numbers of p into flat, from element p.offset on; o.train = false: no
-- gradients and masters yet (segment:for_training brings them).
function Segment.new(name, list, dtype, o)
  local layout = mesh.layout
  local share = layout.zero > 0 and mesh.dp.size or 1
  local order, total = place(list, share)
  local s = setmetatable({ name = name, params = order, count = total, dtype = dtype, sums = {}, axis = mesh.dp,
                           level = share > 1 and layout.zero or 0, value_here = true, held = 0, loose = 0 }, Segment)
  s.grad_dtype = masters[dtype] and "f32" or dtype
  s.size = total / share
  s.first = share > 1 and mesh.dp.rank * s.size or 0
  s.value = buffer("weights", total, dtype)
  s.own_value = own(s, s.value)
  for _, p in ipairs(order) do
    p.dtype, p.grad_dtype, p.segment = dtype, s.grad_dtype, s
    p.lies_in = (masters[dtype] or s.level > 0) and s or nil
    attach(p, s.value)
  end
  set_numbers(s, o)
  if o.train ~= false then s:for_training() end
  if s.level == 3 then
    s.born = s:hashes() -- the whole is seen once: for parallel/same_weights.lua
    s:part_values()
  end
  return s
end

-- Stretches of the whole that belong to no parameter, as views of a flat buffer.
local function gaps_of(s, flat)
  local gaps = {}
  for i, p in ipairs(s.params) do
    local from, to = p.offset + p.count, s.params[i + 1] and s.params[i + 1].offset or s.count
    if to > from then gaps[#gaps + 1] = flat:view({ to - from }, from):keep() end
  end
  return gaps
end

--- segment:for_training(): gradients (f32 beside bf16 and f16) and masters, where they are not here yet.  A master
-- made here stands for what the values are now.
function Segment:for_training()
  local kind = masters[self.dtype]
  if kind and not self.master then
    self.master = buffer("masters", self.size, kind)
    self:write_numbers(self:read_numbers())
  end
  if self.grad then return end
  self.grad = buffer("gradients", self.count, self.grad_dtype)
  for _, p in ipairs(self.params) do p.grad = self.grad:view(p.shape, p.offset):keep() end
  self.grad_here = true
  if self.level < 2 then
    self.own_grad = own(self, self.grad)
  else
    self.gaps = gaps_of(self, self.grad)
    self:drop_grad()
    self.own_grad = buffer("gradients", self.size, self.grad_dtype)
  end
  self:fresh()
end

-- ---- values of the window ----

--- segment:read_numbers() -> a new tensor [size]: the numbers of this rank's window, in f32 (f64 for f64), with what
-- the master knows.
function Segment:read_numbers()
  local out = Tensor.empty({ self.size }, masters[self.dtype] and "f32" or self.dtype)
  if not self.master then return out:copy_from(self.own_value) end
  c.check(C.pg_master_join(out.raw, self.own_value.raw, self.master.raw))
  return out
end

--- segment:write_numbers(t): those numbers set, value and master.  The other ranks of dp see them after
-- zero.gather_values.
function Segment:write_numbers(t)
  self:ready()
  if not self.master then return self.own_value:copy_from(t) end
  c.check(C.pg_master_split(self.own_value.raw, self.master.raw, t:alive().raw))
end

-- Numbers of t, which lie in the whole from element `at` on, into a buffer of this rank's window.
local function into_window(s, flat, t, at)
  local from, to = math.max(at, s.first), math.min(at + t.count, s.first + s.size)
  if from >= to then return end
  local n = to - from
  local here, there = t:view({ n }, from - at), flat:view({ n }, from - s.first)
  c.check(C.pg_copy(there.raw, here.raw))
  here:release()
  there:release()
end

--- segment:put(t, x): the numbers of x into t, which lies in the values from element t.offset on: a parameter, a view
-- of one.  Masters follow, and keep what the values lack of f32 numbers.  Every rank of dp calls it with the same x.
function Segment:put(t, x)
  self:ready() -- or what is under way would go over it
  c.check(C.pg_copy(t.raw, x.raw))
  if self.master then
    local wide, master = x.dtype == "f32" and x or x:to "f32", Tensor.empty(t.shape, self.master.dtype)
    c.check(C.pg_master_split(t.raw, master.raw, wide.raw))
    into_window(self, self.master, master, t.offset)
    master:release()
    if wide ~= x then wide:release() end
  end
  if self.level == 3 and not self.stays then into_window(self, self.own_value, t, t.offset) end
end

--- segment:noted(t): t, which lies in the values, has been written to otherwise, after segment:ready().
function Segment:noted(t)
  local x = t:clone()
  self:put(t, x)
  x:release()
end

-- ---- buffers that come and go ----

local function refill(flat)
  local rc = C.pg_storage_fill(flat.raw)
  if rc == C.PG_ENOMEM then -- garbage may hold what is needed
    c.collect()
    rc = C.pg_storage_fill(flat.raw)
  end
  c.check(rc)
end

--- segment:open_grad(): the gradient of the whole is here to be written.
function Segment:open_grad()
  if self.flight then self:land() end
  if self.grad_here or not self.grad then return end
  refill(self.grad)
  for _, gap in ipairs(self.gaps) do gap:fill(0) end
  self.grad_here = true
end

function Segment:drop_grad()
  c.check(C.pg_storage_drop(self.grad.raw, "the gradient of " .. self.name))
  self.grad_here = false
end

--- segment:land(): the reduction under way, s.flight = { work, part }, is waited for: its part of the sum added to
-- own_grad (the first of a step is there already), the gradient of the whole dropped.
function Segment:land()
  local flight = self.flight
  self.flight = nil
  flight.work:wait()
  if flight.part ~= self.own_grad then
    c.check(C.pg_axpby(self.own_grad.raw, flight.part.raw, 1, 1))
    flight.part:free()
  end
  self:drop_grad()
end

--- segment:share_values(): all ranks of dp begin to send one another their windows of the values.
function Segment:share_values()
  self:ready()
  self.gather = self.axis:all_gather(self.value, self.own_value, true)
end

--- segment:ready(): what share_values or bring has begun is done.
function Segment:ready()
  local gather = self.gather
  if not gather then return end
  self.gather = nil
  gather:wait()
end

--- segment:part_values(): from now on (level 3) the values of the whole come and go.
function Segment:part_values()
  C.pg_mem_tag "weights"
  local part = Tensor.empty({ self.size }, self.dtype):keep():copy_from(self.own_value)
  C.pg_mem_tag "activations"
  self.own_value:free()
  self.own_value = part
  self:put_away()
end

--- segment:whole_values(): they stay, of whatever level.
function Segment:whole_values()
  self:bring()
  self:ready()
  self.own_value:free()
  self.own_value, self.stays = own(self, self.value), true
end

--- segment:bring(), ready(): the values of the whole are here; bring only begins it.
function Segment:bring()
  if self.value_here then return end
  refill(self.value)
  self.value_here = true
  self:share_values()
end

--- segment:put_away(): they are dropped; touching one of the parameters is an error that names the segment.
function Segment:put_away()
  if not self.value_here or self.stays then return end
  self:ready()
  c.check(C.pg_storage_drop(self.value.raw, self.name))
  self.value_here = false
end

--- segment:updated(): this rank has new numbers in its window.  The whole is sent round, or, where it comes and goes,
-- what is here of it is dropped, since it is of before.
function Segment:updated()
  if self.level == 0 then return end
  if self.level < 3 or self.stays then return self:share_values() end
  self.held, self.loose = 0, 0
  self:put_away()
end

--- segment:edit(f): f(flat) may change the numbers of the whole, flat [count] in f32 (f64 for f64); every rank of dp
-- calls it with the same change.  Masters follow.
function Segment:edit(f)
  if self.level == 0 and not masters[self.dtype] then return f(self.value) end
  local flat = self:read_numbers()
  if self.size < self.count then
    local part = flat
    flat = Tensor.empty({ self.count }, part.dtype)
    self.axis:all_gather(flat, part)
    part:release()
  end
  f(flat)
  local part = flat:view({ self.size }, self.first)
  self:write_numbers(part)
  part:release()
  flat:release()
  self:updated()
  self:ready()
end

--- segment:abandon(): what was under way, in a group that has been reformed since, is forgotten; the next gradients are
-- the first of a step, and values that come and go are gone.
function Segment:abandon()
  local function let_go(work) if work then pcall(work.wait, work) end end -- it was cancelled: no wait, and an error
  let_go(self.flight and self.flight.work)
  let_go(self.gather)
  self.flight, self.gather = nil, nil
  self.held, self.loose = 0, 0
  if self.level >= 2 and self.grad_here then self:drop_grad() end
  if self.level == 3 then self:put_away() end
  self:fresh()
end

-- ---- runs ----

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

--- segment:zero_unused(): a parameter that got no gradient in this backward has gradient 0.
function Segment:zero_unused()
  self:open_grad()
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
  self.own_fresh = true
end

-- ---- names ----

--- segment:pieces(flat) -> { { name, view, first, piece }, ... }: every named piece as a view of a flat buffer of the
-- segment (its value, gradient or a moment).  Of a buffer of this rank's window: what lies in it, a view of one dim
-- that begins at element `first` of the piece where it is not all of it.  The caller frees the views.
function Segment:pieces(flat)
  local out = {}
  local low = flat.count == self.count and 0 or self.first
  local high = low + flat.count
  for _, p in ipairs(self.params) do
    for _, piece in ipairs(p.pieces) do
      local at, n = p.offset + piece.first, c.product(piece.shape)
      local from, to = math.max(at, low), math.min(at + n, high)
      if from == at and to == at + n then
        out[#out + 1] = { name = piece.name, view = flat:view(piece.shape, at - low), first = 0, piece = piece }
      elseif to > from then
        out[#out + 1] = { name = piece.name, view = flat:view({ to - from }, from - low), first = from - at,
                          piece = piece }
      end
    end
  end
  return out
end

--- segment:hashes() -> { { name, low, high }, ... }: of each named piece of the values, all of which are here.
function Segment:hashes()
  local list = {}
  for i, piece in ipairs(self:pieces(self.value)) do
    list[i] = { piece.name, hash(piece.view) }
    piece.view:free()
  end
  return list
end

return Segment
