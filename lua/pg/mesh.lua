-- mesh.lua: ranks arranged on named axes pp, dp, tp; the last varies fastest, so that neighbours share
-- a host.  Each axis is a group of ranks; an axis of size one has no group and does nothing, so nobody
-- above asks "am I parallel?".
local c = require "pg.c"
local host = require "pg.host"
local C, ffi = c.C, c.ffi

-- What of a layout is not an axis: zero (stage 0 to 3), sequence (norms and dropout of tensor parallel ranks on
-- rows of their own), tp_chunks (pieces in which those rows travel while products run; nil: as the device likes).
-- waited: seconds that this process has waited for others so far.
local mesh = { layout = { zero = 0, sequence = false }, waited = 0 }
local names = { "pp", "dp", "tp" }
local Axis = {}
Axis.__index = Axis
local ops = { sum = C.PG_OP_SUM, max = C.PG_OP_MAX, min = C.PG_OP_MIN }

local function single(name) return setmetatable({ name = name, rank = 0, size = 1 }, Axis) end

local function start()
  if mesh.world then return end
  c.check(C.pg_comm_init())
  local comm = C.pg_comm_world()
  mesh.world = setmetatable({ name = "world", comm = comm, rank = C.pg_comm_rank(comm),
                              size = C.pg_comm_size(comm) }, Axis)
  local all = {}
  for i = 1, mesh.world.size do all[i] = i - 1 end
  mesh.world.members = all
  mesh.groups = { mesh.world } -- every axis that has a group, in the order of making, the same on its ranks
end

-- The ranks that differ from mine only along axis i, and my place among them.
local function line_of(i, sizes, place)
  local stride = 1
  for j = i + 1, #sizes do stride = stride * sizes[j] end
  local first = mesh.world.rank - place[i] * stride
  local ranks = ffi.new("int32_t[?]", sizes[i])
  for k = 0, sizes[i] - 1 do ranks[k] = first + k * stride end
  return ranks
end

--- mesh.split(ranks, n, name) -> the communicator of a group of `n` ranks of the world.  All of them call it.
function mesh.split(ranks, n, name)
  local slot = ffi.new "pg_comm *[1]"
  host.waits_at()
  c.check(C.pg_comm_split(slot, mesh.world.comm, ranks, n, name))
  return ffi.gc(slot[0], C.pg_comm_free)
end

-- Give the axis its group and remember it.
local function join(axis, ranks, n)
  axis.comm, axis.size, axis.members = mesh.split(ranks, n, axis.name), n, {}
  for i = 1, n do axis.members[i] = ranks[i - 1] end
  mesh.groups[#mesh.groups + 1] = axis
end

-- Ranks along each axis of `names`; their product is the number of ranks.
local function sizes_of(layout)
  local sizes, known = {}, 1
  for i, name in ipairs(names) do
    local n = layout[name] or (name == "dp" and "rest") or 1
    if n ~= "rest" then known = known * c.int(n, "layout." .. name) end
    sizes[i] = n
  end
  local world = mesh.world.size
  for i = 1, #sizes do if sizes[i] == "rest" then sizes[i] = math.floor(world / known) end end
  local product = sizes[1] * sizes[2] * sizes[3]
  if product ~= world or product < 1 then
    c.fail("layout: pp %d x dp %d x tp %d = %d ranks, but %d %s started; use -n %d, or another layout",
           sizes[1], sizes[2], sizes[3], product, world, world == 1 and "was" or "were", math.max(product, 1))
  end
  return sizes
end

--- mesh.build{ pp =, dp =, tp =, zero =, sequence =, tp_chunks = }: sizes whose product is the number of ranks;
-- dp = "rest" takes what is left.  Afterwards mesh.pp, mesh.dp, mesh.tp are axes with rank and size.
function mesh.build(layout)
  start()
  local sizes, place, rest = sizes_of(layout), {}, mesh.world.rank
  for i = #sizes, 1, -1 do
    place[i] = rest % sizes[i]
    rest = math.floor(rest / sizes[i])
  end
  mesh.groups = { mesh.world }
  for i, name in ipairs(names) do
    local axis = single(name)
    if sizes[i] > 1 then
      join(axis, line_of(i, sizes, place), sizes[i])
      axis.rank = place[i]
    end
    axis.stride = 1
    for j = i + 1, #sizes do axis.stride = axis.stride * sizes[j] end
    mesh[name] = axis
  end
  mesh.layout = { zero = layout.zero or 0, sequence = layout.sequence ~= false and mesh.tp.size > 1,
                  tp_chunks = layout.tp_chunks }
  return mesh
end

--- mesh.share(batch, dp, micro) -> the sequences of a rank, and of a micro-batch (micro, or all of them): what `batch`
-- sequences are cut into over dp ranks.
function mesh.share(batch, dp, micro)
  if batch % dp ~= 0 then
    c.fail("data.batch %d does not divide over dp = %d ranks; nearest: %d or %d", batch, dp,
           math.max(1, math.floor(batch / dp)) * dp, math.ceil(batch / dp) * dp)
  end
  local rows = batch / dp
  micro = c.int(micro or rows, "micro")
  if micro < 1 or rows % micro ~= 0 then
    c.fail("micro %d does not divide a rank's %d sequences (data.batch %d / dp %d); choose a divisor of %d",
           micro, rows, batch, dp, rows)
  end
  return rows, micro
end

--- mesh.patient(seconds, f, ...) -> what f returns; in it ranks wait that much longer for one another.  For what takes
-- a rank long although all is well.  All ranks call it.
local function patient_no_more(usual, ok, ...)
  C.pg_comm_timeout(usual)
  if not ok then error((...), 0) end
  return ...
end
function mesh.patient(seconds, f, ...)
  local usual = C.pg_comm_timeout(0)
  C.pg_comm_timeout(usual + seconds)
  return patient_no_more(usual, pcall(f, ...))
end

--- axis:group(members, name) -> an axis of those of its ranks that `members` lists (0-based, this one among
-- them); the same order on all.  All of them call it.
function Axis:group(members, name)
  local axis = single(name)
  if #members < 2 then return axis end
  local ranks = ffi.new("int32_t[?]", #members)
  local first = mesh.world.rank - self.rank * self.stride
  for i, m in ipairs(members) do
    ranks[i - 1] = first + m * self.stride
    if m == self.rank then axis.rank = i - 1 end
  end
  join(axis, ranks, #members)
  return axis
end

--- mesh.ready() -> mesh, laid out as plain data parallel where nobody has said otherwise.
function mesh.ready()
  if not mesh.dp then mesh.build {} end
  return mesh
end

--- mesh.rank(), mesh.size(): of the whole job.
function mesh.rank() start() return mesh.world.rank end
function mesh.size() start() return mesh.world.size end

local slot = ffi.new "pg_work *[1]"

-- Handles of asynchronous collectives; the C side holds the tensors' storage meanwhile.  A handle that is
-- dropped without a wait costs nothing but the news of a failure.
local Work = {}
Work.__index = Work
local no_work = setmetatable({}, Work)

-- Wait in a call of C.
local function waiting(call, ...)
  local before = C.pg_time()
  c.check(call(...))
  mesh.waited = mesh.waited + C.pg_time() - before
end

-- A collective writes into t: a parameter, or a view of one, has to know of it (segment:put), before and after.
local function ready(t) if t and t.lies_in then t.lies_in:ready() end end
local function noted(t) if t and t.lies_in then t.lies_in:noted(t) end end

--- work:wait(): until the collective is done; raises what went wrong.
function Work:wait()
  if self.raw then
    local raw, into = ffi.gc(self.raw, nil), self.into
    self.raw, self.axis, self.into = nil, nil, nil
    waiting(C.pg_work_wait, raw)
    noted(into)
  end
end

--- work:done() -> true when waiting would not wait.
function Work:done() return not self.raw or c.check(C.pg_work_done(self.raw)) == 1 end

local function issue(axis, async, into, call, ...)
  if axis.size == 1 then return no_work end
  host.waits_at() -- for the reports of the launcher and of time limits
  ready(into)
  if not async then
    waiting(call, ...)
    noted(into)
    return no_work
  end
  slot[0] = nil
  c.check(call(...))
  if slot[0] == nil then
    noted(into)
    return no_work
  end
  -- the group must outlive it
  return setmetatable({ raw = ffi.gc(slot[0], C.pg_work_drop), axis = axis, into = into }, Work)
end

local function handle(async) return async and slot or nil end

--- axis:all_reduce(t, op, async) -> work.  t in place; op "sum" (default), "max", "min".
function Axis:all_reduce(t, op, async)
  local code = ops[op or "sum"] or c.fail("all_reduce: op %s is unknown (sum, max, min)", tostring(op))
  return issue(self, async, t, C.pg_allreduce, self.comm, t:alive().raw, code, handle(async))
end

--- axis:all_gather(out, part, async): out holds size parts, in rank order.
function Axis:all_gather(out, part, async)
  if self.size == 1 then out:copy_from(part) return no_work end
  return issue(self, async, out, C.pg_allgather, self.comm, out:alive().raw, part:alive().raw, handle(async))
end

--- axis:reduce_scatter(part, whole, op, async): rank r gets the r-th part of the sum.
function Axis:reduce_scatter(part, whole, op, async)
  if self.size == 1 then part:copy_from(whole) return no_work end
  local code = ops[op or "sum"] or c.fail("reduce_scatter: op %s is unknown (sum, max, min)", tostring(op))
  return issue(self, async, part, C.pg_reducescatter, self.comm, part:alive().raw, whole:alive().raw, code,
               handle(async))
end

--- axis:broadcast(t, root, async): t of rank `root` (0) to all.
function Axis:broadcast(t, root, async)
  return issue(self, async, t, C.pg_broadcast, self.comm, t:alive().raw, root or 0, handle(async))
end

--- axis:send(t, peer, async), axis:recv(t, peer, async): between two ranks of the axis.
function Axis:send(t, peer, async)
  return issue(self, async, nil, C.pg_send, self.comm, t:alive().raw, peer, handle(async))
end
function Axis:recv(t, peer, async)
  return issue(self, async, t, C.pg_recv, self.comm, t:alive().raw, peer, handle(async))
end

--- axis:barrier(): no rank passes before all have come.
function Axis:barrier()
  if self.size > 1 then
    host.waits_at()
    waiting(C.pg_barrier, self.comm)
  end
end

--- axis:sum_numbers{ a, b, ... } -> their sums over the axis, in double (op as all_reduce).
function Axis:sum_numbers(numbers, op)
  if self.size == 1 then return numbers end
  local Tensor = require "pg.tensor"
  local t = Tensor.from(numbers, "f64")
  self:all_reduce(t, op)
  local out = t:totable()
  t:release()
  return out
end

return mesh
