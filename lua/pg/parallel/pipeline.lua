-- parallel/pipeline.lua: one stage of a pipeline: its list of a schedule's steps (schedule.lua), run.
--   forward   receive an activation, run this chunk's items on it, send what comes out
--   backward  receive the gradient of what was sent, walk the tape, send the gradient of what was received
--   weight    the weight gradients that this micro-batch's backward has put off
-- A unit is a micro-batch in a chunk, from its forward to its last step: its records, which hold what backward
-- needs, and the context it was run in.  Nothing else of it lives: the activation received is held by the
-- records that use it, the one sent by the send alone.  Chunk 0 begins with token ids, the last chunk ends in
-- the loss.
local c = require "pg.c"
local mesh = require "pg.mesh"
local schedule = require "pg.parallel.schedule"
local steps = require "pg.parallel.schedule_steps"
local scope = require "pg.scope"
local tape = require "pg.tape"
local trace = require "pg.parallel.trace"
local wire = require "pg.parallel.wire"
local Tensor = require "pg.tensor"

local pipeline = {}
local Pipeline = {}
Pipeline.__index = Pipeline

--- pipeline.new(model, plan, o) -> a stage.  plan: what parts.cut returned; o.schedule: a name or a function;
-- o.loss(model, batch) -> loss, valid.
function pipeline.new(model, plan, o)
  local p = setmetatable({ model = model, plan = plan, schedule = o.schedule, loss = o.loss, lists = {} }, Pipeline)
  p.rank, p.stages, p.chunks = mesh.pp.rank, mesh.pp.size, plan.chunks
  p.last = p.stages * p.chunks - 1
  p.wire = wire.new(p.chunks)
  return p
end

-- ---- the schedule ----

-- This stage's steps for so many micro-batches, each { kind, micro, chunk, split =, last = }.
-- split: a weight step follows this backward; last: this step completes the gradients of its chunk.
local function read_list(list)
  local split, left = {}, {}
  for _, step in ipairs(list) do
    local unit = step[2] .. ":" .. step[3]
    if step[1] == "weight" then split[unit] = true end
    if step[1] == "backward" then left[step[3]] = (left[step[3]] or 0) + 1 end
  end
  for _, step in ipairs(list) do
    local unit = step[2] .. ":" .. step[3]
    step.split = step[1] == "backward" and split[unit] or false
    if step[1] == "weight" or step[1] == "backward" and not step.split then
      left[step[3]] = left[step[3]] - 1
      step.last = left[step[3]] == 0
    end
  end
  return list
end

-- The lists of all stages, and what the neighbours have received in theirs (above, below).  Schedules are made once
-- for each number of micro-batches.
function Pipeline:all_steps(micro)
  if not self.lists[micro] then
    local n, sizes = self.stages, { stages = self.stages, micro = micro, chunks = self.chunks }
    local lists = schedule.make(self.schedule, sizes)
    lists.sizes = sizes
    lists.above = steps.received(lists[(self.rank - 1) % n + 1], sizes)
    lists.below = steps.received(lists[(self.rank + 1) % n + 1], sizes)
    read_list(lists[self.rank + 1])
    self.lists[micro] = lists
  end
  return self.lists[micro]
end

-- This step has received a message.  Whoever sent it had received this many from here before.
function Pipeline:heard(step)
  local kind, now = step[1], self.now
  local key = steps.key(kind, step[2], steps.need(step, now.sizes), now.sizes)
  if kind == "forward" then self.wire:arrived(self.wire.up, now.above[key].backward)
  else self.wire:arrived(self.wire.down, now.below[key].forward) end
end

-- ---- the loss ----

-- What a loss of the recipe's own sees as the model on the last stage: calling it with the batch's tokens gives
-- the logits, which come from the activation received; all else is the model's.
local function stand_in(model, x, batch, items)
  local used = false
  local function logits(_, ids)
    if ids ~= batch.tokens or used then
      c.fail("loss: with layout.pp > 1 a loss calls the model once, on batch.tokens: the stages before have seen no "
             .. "other ids")
    end
    used = true
    return model:part(x, { tokens = ids }, items[1], items[2])
  end
  local function loss(_, other)
    if other ~= batch then c.fail "loss: with layout.pp > 1 model:loss is asked with the batch itself" end
    return model:part(x, batch, items[1], items[2])
  end
  return setmetatable({ forward = logits, loss = loss }, { __index = model, __call = logits })
end

-- ---- steps ----

-- A traced step's start or stop.  Between the two lies what a stage computes: messages are waited for before, and
-- sent after.
function Pipeline:mark()
  if self.trace then self.trace:mark() end
end

local function kind_of(batch, chunk) return wire.kind(chunk, batch.tokens.shape) end

-- A chunk on a micro-batch -> the activation received (nil in chunk 0), and what comes out of it.
function Pipeline:run(batch, chunk)
  local items, x = self.plan[chunk], nil
  if chunk > 0 then
    x = self.wire:receive_down(kind_of(batch, chunk))
    x.requires_grad = tape.enabled
  end
  self:mark()
  if chunk == self.last and batch.targets then
    local loss, valid = self.loss(x and stand_in(self.model, x, batch, items) or self.model, batch)
    return x, loss, valid
  end
  return x, self.model:part(x, batch, items[1], items[2])
end

-- Its scope needs it no more; records that saved it still do.
local function leave(t)
  if t and t.scope then
    t.scope = nil
    t:release()
  end
end

function Pipeline:forward(unit, step, source)
  local chunk = step[3]
  local batch = source(step[2])
  unit.x, unit.y = scope.light(self.run, self, batch, chunk)
  if unit.x then self:heard(step) end
  self:mark()
  unit.context = tape.context -- as the model has completed it
  leave(unit.x)
  if chunk < self.last then
    self.wire:send_down(unit.y, kind_of(batch, chunk + 1))
    leave(unit.y)
  end
end

-- The gradient of the activation received, sent to the stage before.
function Pipeline:hand_up(unit)
  local x = unit.x
  local dx = x.grad or Tensor.zeros(x.shape, x.dtype)
  self.wire:send_up(dx)
  if x.grad then x.grad:release() end
  x.grad = nil
end

function Pipeline:backward(unit, step, done)
  local y = unit.y
  tape.context = unit.context
  local last = step[3] == self.last
  local dy = last and Tensor.full(y.shape, 1, y.dtype) or self.wire:receive_up(y)
  if not last then self:heard(step) end
  unit.later = step.split and {} or nil
  self:mark()
  tape.backward({ y }, { dy }, { done = done, later = unit.later })
  self:mark()
  if unit.x then self:hand_up(unit) end
end

function Pipeline:weight(unit, _, done)
  tape.context = unit.context
  self:mark()
  tape.no_grad(tape.finish, unit.later, done)
  self:mark()
end

-- One step of the list; r: the reducer.  A step that completes gradients tells it so.
function Pipeline:step(step, units, source, r)
  local name = step[2] .. ":" .. step[3]
  local unit = units[name]
  if step[1] == "forward" then
    unit = { scope = scope.hold() }
    units[name] = unit
    unit.scope:run(self.forward, self, unit, step, source)
  else
    local segments = self.plan.segments[step[3]]
    local completes = step.last ~= nil
    local done = completes and r:hook(step.last, segments) or nil
    unit.scope:run(scope.light, self[step[1]], self, unit, step, done)
    if completes then r:after(step.last, segments) end
    if not step.split then
      unit.scope:close()
      units[name] = nil
    end
  end
  self.wire:sweep()
end

--- p:gradients(micro, source, r, traced) -> the losses of the micro-batches, on the last stage; elsewhere none.  Each
-- is a tensor that the caller releases.  source(i): the i-th batch, sets tape.context.  traced: -> losses, trace.
function Pipeline:gradients(micro, source, r, traced)
  local units, losses = {}, {}
  local lists = self:all_steps(micro)
  self.now = lists
  self.wire:begin()
  self.trace = traced and trace.new(lists, micro, self.rank) or nil
  local function all()
    for _, step in ipairs(lists[self.rank + 1]) do
      self:step(step, units, source, r)
      local unit = units[step[2] .. ":" .. step[3]]
      if step[1] == "forward" and step[3] == self.last then losses[step[2]] = unit.y:retain() end
    end
    self.wire:sweep(0)
  end
  local ok, message = pcall(all)
  local made = self.trace
  self.trace = nil
  if not ok then
    for _, unit in pairs(units) do unit.scope:close() end
    error(message, 0)
  end
  return losses, made
end

--- p:through(batch) -> on the last stage what its last chunk gives for the batch: loss, valid, or without targets
-- the logits.  Forward only; stages before go on to their next batch at once, a few ahead.
function Pipeline:through(batch)
  local y, valid
  for chunk = self.rank, self.last, self.stages do
    y, valid = select(2, scope.light(self.run, self, batch, chunk))
    if chunk < self.last then
      self.wire:send_down(y, kind_of(batch, chunk + 1))
      self.wire:sweep(2 * self.chunks)
    end
  end
  if self.rank == self.stages - 1 then return y, valid end
end

-- ---- another recipe while it goes on ----

--- p:trial(model, batch, loss, backward): as engine:trial, each chunk of this stage by itself.
function Pipeline:trial(model, batch, loss, backward)
  for chunk = self.rank, self.last, self.stages do
    local items, x = self.plan[chunk], nil
    local y
    if chunk > 0 then
      x = self.wire:like_down(chunk, batch.tokens.shape)
      x.requires_grad = backward
    end
    if chunk == self.last then y = loss(x and stand_in(model, x, batch, items) or model, batch)
    else y = model:part(x, batch, items[1], items[2]) end
    if backward then tape.backward({ y }, { Tensor.empty(y.shape, y.dtype) }) end
  end
end

--- p:adopt(model, order), p:keep() -> kept, p:abandon(kept): as the engine's.
function Pipeline:adopt(model, order)
  self.model, self.schedule, self.lists = model, order, {}
  self.wire:forget()
end

function Pipeline:keep()
  return { model = self.model, schedule = self.schedule, lists = self.lists, wire = self.wire:keep() }
end

function Pipeline:abandon(kept)
  self.model, self.schedule, self.lists = kept.model, kept.schedule, kept.lists
  self.wire:abandon(kept.wire)
end

return pipeline
