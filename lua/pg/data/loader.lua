-- data/loader.lua: from a global order of samples to this rank's micro-batches.
-- A global step takes `batch` samples from the position on; rank r of the dp axis gets those from
-- r * batch / dp, in micro-batches of `micro`.  A thread reads the files one step ahead.
local c = require "pg.c"
local Tensor = require "pg.tensor"
local mesh = require "pg.mesh"
local scope = require "pg.scope"
local step = require "pg.step"
local tape = require "pg.tape"
local C, ffi = c.C, c.ffi

local HOST = 2^31 - 1 -- tokens of a rank's share of a step; more belong into more ranks or steps

local Loader = {}
Loader.__index = Loader
local loader = {}

local function shares(o, dp, span)
  local batch = o.batch or c.fail "data: batch is missing; sequences of a step, over all ranks"
  c.within(batch, "data.batch", 1)
  local rows, micro = mesh.share(batch, dp, o.micro)
  if rows * span > HOST then
    c.fail("data.batch %.0f: a rank's share of %.0f sequences of %.0f tokens is more than %.0f tokens a step; choose a "
           .. "smaller batch", batch, rows, span - 1, HOST)
  end
  return batch, rows, micro
end

--- loader.new(stream, o) -> a loader.  o: batch, micro (batch / dp), seed, axis (mesh.dp), pad (an id whose
-- targets do not count).
function loader.new(stream, o)
  local axis = o.axis or mesh.ready().dp
  local batch, rows, micro = shares(o, axis.size, stream.context + 1)
  local l = setmetatable({ stream = stream, axis = axis, batch = batch, rows = rows, micro_rows = micro,
                           accumulation = rows / micro, span = stream.context + 1,
                           pad = o.pad and c.within(o.pad, "data.pad", 0),
                           order = stream:order(o.seed or 0) }, Loader)
  l.host = ffi.new("int32_t[?]", rows * l.span)
  l.starts = ffi.new("int64_t[?]", rows)
  return l:seek(0)
end

local function ask(l)
  for i = 0, l.rows - 1 do l.starts[i] = l.order(l.asked + l.axis.rank * l.rows + i) end
  c.check(C.pg_prefetch_ask(l.prefetch, l.starts))
  l.asked = l.asked + l.batch
end

--- l:seek(position): go on from there (samples over all epochs and ranks) -> l.
function Loader:seek(position)
  c.within(position, "data position", 0)
  self:close()
  local slot = ffi.new "pg_prefetch *[1]"
  c.check(C.pg_prefetch_new(slot, self.stream.files, self.rows, self.span, 2))
  self.prefetch = ffi.gc(slot[0], C.pg_prefetch_free)
  self.position, self.asked = position, position
  ask(self)
  return self
end

--- l:close(): it reads no more.
function Loader:close()
  if self.prefetch then C.pg_prefetch_free(ffi.gc(self.prefetch, nil)) end
  self.prefetch = nil
end

-- Targets of this rank's rows that count.
local function valid_here(l)
  if not l.pad then return l.rows * l.stream.context end
  local valid = 0
  for r = 0, l.rows - 1 do
    for t = 1, l.span - 1 do
      if l.host[r * l.span + t] ~= l.pad then valid = valid + 1 end
    end
  end
  return valid
end

--- l:next_step() -> { micro = accumulation count, valid = targets of the global batch, position =, epoch = }.
-- Reads this rank's share and sets INV_TOKENS (0 where nothing is valid).
function Loader:next_step()
  c.check(C.pg_prefetch_take(self.prefetch, self.host))
  ask(self)
  local valid = valid_here(self)
  valid = self.pad and self.axis:sum_numbers({ valid })[1] or valid * self.axis.size
  step.set { INV_TOKENS = valid > 0 and 1 / valid or 0 }
  self.position = self.position + self.batch
  return { micro = self.accumulation, valid = valid, position = self.position,
           epoch = math.floor((self.position - 1) / self.stream.samples) }
end

-- Rows [first, first + rows) of the host buffer as ids shifted by `shift`.
local function ids_of(host, span, first, rows, shift, pad)
  local T = span - 1
  local buffer = ffi.new("int32_t[?]", rows * T)
  for r = 0, rows - 1 do ffi.copy(buffer + r * T, host + (first + r) * span + shift, T * 4) end
  if pad then
    for i = 0, rows * T - 1 do if buffer[i] == pad then buffer[i] = c.IGNORE end end
  end
  return Tensor.empty({ rows, T }, "i32"):write(buffer)
end

--- l:micro(i) -> the i-th micro-batch (1-based) of this step: tokens, targets i32 [m,T]; sample0, its first
-- sample's place in the global batch; step, the step block; share = true.
function Loader:micro(i)
  local first = (i - 1) * self.micro_rows
  local sample0 = self.axis.rank * self.rows + first
  tape.context = { training = true, step = step.block(), sample0 = sample0 }
  return { tokens = ids_of(self.host, self.span, first, self.micro_rows, 0),
           targets = ids_of(self.host, self.span, first, self.micro_rows, 1, self.pad),
           sample0 = sample0, ignore = c.IGNORE, step = step.block(), share = true }
end

--- l:steps(n) -> for step, batch in l:steps(300): a plain loop; each turn closes the last turn's scope.
-- A batch is this rank's whole share, and its loss the mean over the global batch.
function Loader:steps(n)
  c.within(n or c.fail "data:steps: how many steps? data:steps(300)", "data:steps", 0)
  local number, token = 0, nil
  return function()
    if token then scope.close(token) end
    if number >= n then return nil end
    token = scope.open "loose"
    number = number + 1
    C.pg_status_step(number)
    self:next_step()
    local tokens = { tokens = ids_of(self.host, self.span, 0, self.rows, 0),
                     targets = ids_of(self.host, self.span, 0, self.rows, 1, self.pad),
                     sample0 = self.axis.rank * self.rows, ignore = c.IGNORE, step = step.block() }
    tape.context = { training = true, step = step.block(), sample0 = tokens.sample0 }
    return number, tokens
  end
end

--- loader.each(stream, batch, axis, o) -> an iterator over batches of the stream in file order, each sample once,
-- dealt in runs over the axis: ranks may get different numbers of batches.  o.pad; o.samples: only the
-- first so many; o.even: every rank gets as many batches, the last ones perhaps idle = true: samples again that do
-- not count, for ranks that must work together.  For evaluation: batch.step is nil, so a loss is the mean of its
-- own batch.
function loader.each(stream, batch, axis, o)
  axis, o = axis or mesh.ready().dp, o or {}
  local span, total = stream.context + 1, math.min(stream.samples, o.samples or math.huge)
  local at = math.floor(total * axis.rank / axis.size)
  local stop = math.floor(total * (axis.rank + 1) / axis.size)
  local turns = math.ceil(math.ceil(total / axis.size) / batch) -- of the rank that has most
  local host = ffi.new("int32_t[?]", batch * span)
  return function()
    local rows = math.min(batch, stop - at)
    local idle = rows <= 0
    if idle and not (o.even and turns > 0) then return nil end
    turns = turns - 1
    if idle then rows = 1 end
    for r = 0, rows - 1 do stream:read(stream:start_of(idle and 0 or at + r), span, host + r * span) end
    if not idle then at = at + rows end
    return { tokens = ids_of(host, span, 0, rows, 0), targets = ids_of(host, span, 0, rows, 1, o.pad),
             ignore = c.IGNORE, share = true, idle = idle }
  end
end

return loader
