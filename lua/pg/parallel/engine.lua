-- parallel/engine.lua: what a step is in every layout: the gradients of a global batch, a batch looked at, logits.
-- A rank holds a part of the model (a stage of the pipeline, a share of tp) and reads its dp place's samples;
-- it makes the gradients of what it holds and knows a share of the loss.  Callers sum the shares over the
-- world: all but one of the ranks that compute the same loss bring 0.
local graph = require "pg.graph"
local mesh = require "pg.mesh"
local pipeline = require "pg.parallel.pipeline"
local reducer = require "pg.parallel.reducer"
local reduce = require "pg.ops.reduce"
local scope = require "pg.scope"
local zero = require "pg.parallel.zero"
local tape = require "pg.tape"
local Tensor = require "pg.tensor"
local c = require "pg.c"
local C = c.C

local engine = {}
local Engine = {}
Engine.__index = Engine

--- engine.new(model, segments, o) -> an engine.  o.plan: of the pipeline (parts.lua), or nil where there is one
-- stage; o.schedule; o.loss(model, batch) -> loss, valid (default: model:loss).
function engine.new(model, segments, o)
  local e = setmetatable({ model = model, segments = segments }, Engine)
  e.loss = o.loss or function(m, batch) return m:loss(batch) end
  if mesh.pp.size > 1 then
    e.pipe = pipeline.new(model, o.plan, { schedule = o.schedule, loss = e.loss })
    e.rest = o.plan.rest
  end
  e.counts = mesh.tp.rank == 0 and mesh.pp.rank == mesh.pp.size - 1
  return e
end

-- One micro-batch forward and backward -> its loss.
local function one(e, i, source, done)
  C.pg_mem_tag "batch"
  local batch = source(i)
  C.pg_mem_tag "activations"
  local loss = e.loss(e.model, batch)
  loss:backward(nil, { done = done })
  return loss
end

-- ---- a step's gradients as one graph (pg.graph) ----

-- What it computes: batches are there, each with the context that ops see.
local function all_at_once(e, micros)
  local losses = {}
  for i, m in ipairs(micros) do
    losses[i] = scope.run(one, e, i, function()
      tape.context = m.context
      return m.batch
    end)
  end
  return losses
end

-- Which parameters want gradients: a graph knows only those that did.
local function wanted(e)
  local flags = {}
  for _, s in ipairs(e.segments) do
    for _, p in ipairs(s.params) do flags[#flags + 1] = p.requires_grad and "1" or "0" end
  end
  return table.concat(flags)
end

-- As in_turn.
local function as_graph(e, micro, source)
  return scope.run(function()
    local micros = {}
    C.pg_mem_tag "batch"
    for i = 1, micro do
      local batch = source(i)
      micros[i] = { batch = batch, context = tape.context }
    end
    C.pg_mem_tag "activations"
    local losses = e.graph(micros, wanted(e))
    for _, loss in ipairs(losses) do loss:retain() end
    return losses
  end)
end

--- e:record(on): from now on the gradients of a step are one graph, or not.  In a world of one rank.
function Engine:record(on)
  if self.graph then self.graph:free() end
  self.graph = on and graph.new(function(micros) return all_at_once(self, micros) end, "a step's gradients") or nil
end

-- All of them, in one stage; the losses as pipeline.gradients gives them.
local function in_turn(e, micro, source, r)
  local losses = {}
  for i = 1, micro do
    losses[i] = scope.run(one, e, i, source, r:hook(i == micro)):retain()
    r:after(i == micro)
  end
  return losses
end

--- engine.looks() -> whether gradients are looked at before they are summed, so that the rank which made a bad one
-- is known.  On a GPU not by themselves: the host would wait for the device before each message.
function engine.looks() return c.device() ~= "cuda" or os.getenv "PG_NAN" == "1" end

--- e:gradients(micro, source, o) -> this rank's share of the loss.  The gradients of `micro` micro-batches, summed
-- over dp, are in the segments afterwards; source(i) gives the i-th batch and sets tape.context.  e.bad: this rank's
-- first gradient that is not finite, by name, where they are looked at (o.look, or engine.looks).  e.trace: with
-- o.trace, and where there are stages, when they worked (trace.lua).
function Engine:gradients(micro, source, o)
  local r = reducer.new(self.segments, o and o.look or engine.looks())
  local losses
  self.trace = nil
  if self.pipe then
    losses, self.trace = self.pipe:gradients(micro, source, r, o and o.trace)
    if #self.rest > 0 then r:after(true, self.rest) end
  elseif self.graph then losses = as_graph(self, micro, source)
  else losses = in_turn(self, micro, source, r) end
  r:finish()
  self.bad = r.bad
  local sum = 0
  for _, loss in ipairs(losses) do
    if self.counts then sum = sum + loss:item() end
    loss:release()
  end
  return sum
end

-- ---- another recipe while it goes on (live/swap.lua) ----

--- e:trial(model, batch, loss, backward): what this rank does with a micro-batch, of a model that is laid out as its
-- own, with loss(model, batch), and backward too where that is true.  On shapes alone: nothing is sent.
function Engine:trial(model, batch, loss, backward)
  if self.pipe then return self.pipe:trial(model, batch, loss, backward) end
  local y = loss(model, batch)
  if backward then y:backward() end
end

--- e:adopt(model, schedule): from now on the code of another model that has the same parameters; nothing that was
-- recorded of the one before runs again.
function Engine:adopt(model, schedule)
  self.model = model
  if self.graph then self.graph:free() end
  if self.pipe then self.pipe:adopt(model, schedule) end
end

--- e:keep() -> what e:abandon(kept) takes, after a step that was not finished and once the groups are whole again.
function Engine:keep()
  zero.ready(self.segments)
  return { model = self.model, graphs = self.graph ~= nil, pipe = self.pipe and self.pipe:keep() }
end

function Engine:abandon(kept)
  zero.abandon(self.segments)
  self.model, self.bad = kept.model, nil
  self:record(kept.graphs)
  if self.pipe then self.pipe:abandon(kept.pipe) end
end

-- ---- looking ----

--- e:evaluate(batch) -> sum of losses, count of targets; 0, 0 on ranks that do not count.  Forward only: call it in a
-- scope and under tape.no_grad.
function Engine:evaluate(batch)
  local loss, valid
  if self.pipe then loss, valid = self.pipe:through(batch)
  else loss, valid = self.loss(self.model, batch) end
  if not self.counts then return 0, 0 end
  local n = valid and valid:item() or batch.targets.count
  return loss:item() * n, n
end

--- e:settle(): after a round of evaluate or logits: what was sent has arrived.
function Engine:settle() if self.pipe then self.pipe.wire:sweep(0) end end

--- e:logits(ids) -> the logits [1,V] behind the last of ids [1,T], on every rank of pp and tp.  As e:evaluate.
function Engine:logits(ids)
  local V = self.model.vocab
  local all, last
  if self.pipe then all = self.pipe:through { tokens = ids } else all = self.model(ids) end
  local rows = all and all.count / V
  if all then last = reduce.slice(reduce.reshape(all, { rows, V }), 1, rows, 1):to "f32"
  else last = Tensor.empty({ 1, V }, "f32") end
  mesh.pp:broadcast(last, mesh.pp.size - 1)
  return last
end

--- e:asked(stop) -> whether one of the ranks that work together on a sample has been asked to stop.
function Engine:asked(stop)
  local n = stop and 1 or 0
  for _, axis in ipairs { mesh.tp, mesh.pp, mesh.layout.zero == 3 and mesh.dp or nil } do
    n = axis:sum_numbers({ n })[1]
  end
  return n > 0
end

--- e:writer() -> what pg.generate takes for a model: all ranks of pp and tp call it together.
function Engine:writer()
  return setmetatable({ is_module = true, context = self.model.context, vocab = self.model.vocab,
                        stopped = function(stop) return self:asked(stop) end },
                      { __call = function(_, ids) return self:logits(ids) end })
end

return engine
