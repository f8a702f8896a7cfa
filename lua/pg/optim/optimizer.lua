-- optim/optimizer.lua: what AdamW and SGD share: segments, the step block, clipping, the checks.
--   optim:step() = norm and clip factor on the device, then one fused update a segment
-- On several ranks self.before_step sums the gradients first (parallel/reducer.lua attaches itself there).
local c = require "pg.c"
local mesh = require "pg.mesh"
local rate = require "pg.optim.rate"
local step = require "pg.step"
local tape = require "pg.tape"
local watch = require "pg.watch"
local Tensor = require "pg.tensor"
local C = c.C

local Optimizer = {}
Optimizer.__index = Optimizer

local function check_settings(o)
  local betas = o.betas
  if betas and not (#betas == 2 and type(betas[1]) == "number" and type(betas[2]) == "number") then
    c.fail("optim.betas: two numbers are wanted, such as { 0.9, 0.95 }")
  end
  if o.decay < 0 or o.decay ~= o.decay then c.fail("optim.decay is %g; it must be 0 or more", o.decay) end
end

local function segments_of(parameters)
  if type(parameters) ~= "table" then
    c.fail("optim: parameters are wanted, as model:parameters() gives them; got %s", type(parameters))
  end
  local list, seen, listed = {}, {}, {}
  for _, p in ipairs(parameters) do
    listed[p] = true
    if not p.segment then c.fail("optim: a parameter has no numbers yet; build the model with pg.build first") end
    if not seen[p.segment] then
      seen[p.segment] = true
      list[#list + 1] = p.segment
    end
  end
  if #list == 0 then c.fail("optim: the model has no parameters") end
  for _, s in ipairs(list) do -- updated as a whole
    for _, p in ipairs(s.params) do
      if p.requires_grad and not listed[p] then
        c.fail("optim: %s is not in the list but its segment %s is; list it too, or set its requires_grad = false to "
               .. "keep it as it is", p.name, s.name)
      end
    end
  end
  return list
end

--- Optimizer.setup(self, parameters, settings, run): segments, run tables, rate; moments are named by
-- the caller's self.moments.
function Optimizer.setup(self, parameters, settings, run)
  self.segments = segments_of(parameters)
  check_settings(settings)
  self.settings = settings
  self.rate = rate.build(settings.rate, run)
  self.run = run or {}
  self.steps = 0
  self.states = {}
  for _, s in ipairs(self.segments) do
    C.pg_mem_tag "moments"
    local state = {}
    for _, name in ipairs(self.moments) do state[name] = Tensor.zeros({ s.count }, s.dtype):keep() end
    C.pg_mem_tag "activations"
    self.states[s] = state
    self:lay_runs(s)
  end
  tape.context.step = step.block()
  step.set { RANDOM = step.random_base(self.run.seed or 0, 0) }
  return self
end

-- Decay and rate of each run of a segment, as the kernels read them.
function Optimizer:lay_runs(s)
  local state = self.states[s]
  state.ends, state.factors = s:run_tables(self.settings.decay or 0)
end

--- optim:swap(settings, run): new settings for the next step; moments and the step count stay.
function Optimizer:swap(settings, run)
  check_settings(settings)
  self.settings, self.run = settings, run or self.run
  self.rate = rate.build(settings.rate, self.run)
  for _, s in ipairs(self.segments) do self:lay_runs(s) end
end

--- optim:resume(number): `number` steps are behind it, as far as rates, bias corrections and random bases go.
function Optimizer:resume(number)
  self.steps = number
  step.set { RANDOM = step.random_base(self.run.seed or 0, number) }
end

-- The first parameter (or loss) that is not finite, for the message.
function Optimizer:first_bad()
  for _, s in ipairs(self.segments) do
    for _, piece in ipairs(s:pieces(s.grad)) do
      if watch.nonfinite(piece.view) > 0 then return piece.name end
    end
  end
end

-- Norm and clip factor, on the device.
function Optimizer:measure()
  local block = step.block()
  step.set { SUMSQ = 0 }
  for _, s in ipairs(self.segments) do c.check(C.pg_sumsq(block.raw, s.grad.raw, nil, nil)) end
  c.check(C.pg_clip(block.raw, self.settings.clip or 0))
end

--- optim:step(o) -> norm, rate: one update from the gradients of this step.  o.reduced: they have been
-- summed over dp already; o.state: what the rate is asked with.  Raises, with nothing updated, where a
-- gradient is not finite.
function Optimizer:step(o)
  if self.before_step then self.before_step(self, o and o.reduced) end
  for _, s in ipairs(self.segments) do
    s:zero_unused()
    if s:stale() then self:lay_runs(s) end
  end
  local number = self.steps + 1
  local now = self.rate(o and o.state or { step = number, steps = self.run.steps, tokens = self.run.tokens })
  if type(now) ~= "number" or not (now >= 0 and now < math.huge) then
    c.fail("rate: at step %d it is %s, not a number of 0 or more", number, tostring(now))
  end
  self:measure()
  step.set(self:corrections(number, now))
  for _, s in ipairs(self.segments) do
    self:update(s, self.states[s], number)
    s:fresh()
  end
  local norm, finite = step.get("NORM", "FINITE")
  if finite == 0 then
    c.fail("step %d, rank %d: the gradient norm is %s; first bad gradient: %s; nothing was updated",
           number, mesh.rank(), tostring(norm), self:first_bad() or "none here (on another rank)")
  end
  self.steps = number
  step.set { RANDOM = step.random_base(self.run.seed or 0, number) }
  self.last_norm, self.last_rate = norm, now
  return norm, now
end

--- optim:state_pieces() -> { { name, view }, ... }: every moment under MOMENT.PARAMETER, for checkpoints.
function Optimizer:state_pieces()
  local out = {}
  for _, s in ipairs(self.segments) do
    for _, moment in ipairs(self.moments) do
      for _, piece in ipairs(s:pieces(self.states[s][moment])) do
        out[#out + 1] = { name = moment .. "." .. piece.name, view = piece.view }
      end
    end
  end
  return out
end

return Optimizer
