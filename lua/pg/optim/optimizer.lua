-- optim/optimizer.lua: what AdamW and SGD share: segments, the step block, clipping, the checks.
--   optim:step() = norm and clip factor on the device, then one fused update a segment, of this rank's window
-- On several ranks self.before_step sums the gradients first, and self.after_step waits for what the ranks send one
-- another of their windows (parallel/reducer.lua attaches itself there).
local c = require "pg.c"
local agree = require "pg.agree"
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
        c.fail("optim: %s is not in the list but shares segment %s with one that is; list it too, set its "
               .. "requires_grad = false to keep it as it is, or give each tensor a segment of its own: "
               .. "pg.build(model, { bucket = 0 })", p.name, s.name)
      end
    end
  end
  return list
end

-- dtype of the moments of a segment: that of its gradients, or half of it where the settings say so.
local function moments_of(s, settings)
  if settings.moments ~= "bf16" then return s.grad_dtype end
  if not s.master then
    c.fail('optim.moments = "bf16" goes with bf16 or f16 weights, those of segment %s are %s; use "fp32"', s.name,
           s.dtype)
  end
  return "bf16"
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
    s:for_training()
    local state, dtype = { master = s.master }, moments_of(s, settings)
    C.pg_mem_tag "moments"
    for _, name in ipairs(self.moments) do state[name] = Tensor.zeros({ s.size }, dtype):keep() end
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
  state.ends, state.factors, state.weights = s:run_tables(self.settings.decay or 0)
  if self.recorded then self.recorded:free() end -- it reads those from before
end

--- optim:record(make): from now on norm and update are make(f, name), a graph of what f does (pg.graph); nil: no
-- longer.  In a world of one rank.
function Optimizer:record(make)
  if self.recorded then self.recorded:free() end
  self.make = make
  self.recorded = make and make(function(first) self:compute(first) end, "norm and update") or nil
end

--- optim:check(settings): raises where optim:swap cannot take them.
function Optimizer:check(settings)
  check_settings(settings)
  local was, now = self.settings.moments or "fp32", settings.moments or "fp32"
  if was ~= now then
    c.fail('optim.moments was "%s", is "%s" now; set it back, or start a new run', was, now)
  end
end

--- optim:swap(settings, run): new settings for the next step; moments and the step count stay.
function Optimizer:swap(settings, run)
  self:check(settings)
  self.settings, self.run = settings, run or self.run
  self.rate = rate.build(settings.rate, self.run)
  for _, s in ipairs(self.segments) do self:lay_runs(s) end
end

--- optim:keep() -> a function that takes a swap back, as long as no step was made with it.
function Optimizer:keep()
  local settings, run, of, runs, make = self.settings, self.run, self.rate, {}, self.make
  for s, state in pairs(self.states) do runs[s] = { state.ends, state.factors, state.weights } end
  return function()
    self.settings, self.run, self.rate = settings, run, of
    for s, state in pairs(self.states) do state.ends, state.factors, state.weights = unpack(runs[s]) end
    self:record(make)
  end
end

--- optim:resume(number): `number` steps are behind it, as far as rates, bias corrections and random bases go.
function Optimizer:resume(number)
  self.steps = number
  step.set { RANDOM = step.random_base(self.run.seed or 0, number) }
end

-- This rank's first gradient that is not finite, for the message.
function Optimizer:first_bad()
  for _, s in ipairs(self.segments) do
    local found = watch.first_bad(s:pieces(s.own_grad))
    if found then return found end
  end
end

-- The norm is not finite, on all ranks: the first one that made a bad gradient is named.  After a sum over dp
-- (which spreads it) self.bad_gradient is what this rank had before, or blame() finds it out, which all ranks do
-- together: whether it is asked may not depend on what this rank has.
function Optimizer:refuse(number, norm, blame)
  local bad = self.bad_gradient
  if not bad and mesh.dp.size == 1 then bad = self:first_bad()
  elseif not bad and blame then bad = blame() end
  local text = "the gradient norm is %s; first bad gradient: %s; nothing was updated"
  local mine = bad and ("step %d, rank %d: "):format(number, mesh.rank()) .. text:format(tostring(norm), bad)
  local none = self.unseen and mesh.dp.size > 1 and "not looked for (PG_NAN=1 stops where it is made)"
               or "none; their sum is too large"
  c.fail("%s", agree.origin(mine) or ("step %d: "):format(number) .. text:format(tostring(norm), none))
end

-- Norm and clip factor, on the device; SUMSQ is 0 before.  Where ranks hold different parameters, the squares are
-- summed over all of them, each parameter counted once.
function Optimizer:measure()
  local block = step.block()
  local parted = mesh.tp.size > 1 or mesh.pp.size > 1 or mesh.layout.zero > 0 and mesh.dp.size > 1
  for _, s in ipairs(self.segments) do
    local state = self.states[s]
    c.check(C.pg_sumsq(block.raw, s.own_grad.raw, parted and state.ends.raw or nil,
                       parted and state.weights.raw or nil))
  end
  if parted then
    local sum = block:view({ 1 }, tonumber(C.PG_STEP_SUMSQ))
    mesh.world:all_reduce(sum)
    sum:free()
  end
  c.check(C.pg_clip(block.raw, self.settings.clip or 0))
end

-- All that the device does of a step; first: of the first.
function Optimizer:compute(first)
  self:measure()
  watch.mark "gradient norm"
  for _, s in ipairs(self.segments) do self:update(s, self.states[s], first) end
end

--- optim:next_rate(state) -> the rate of the next update.  state: what it is asked with.
function Optimizer:next_rate(state)
  local number = self.steps + 1
  local now = self.rate(state or { step = number, steps = self.run.steps, tokens = self.run.tokens })
  if type(now) ~= "number" or not (now >= 0 and now < math.huge) then
    c.fail("rate: at step %d it is %s, not a number of 0 or more", number, tostring(now))
  end
  return now
end

--- optim:step(o) -> norm, rate: one update from the gradients of this step.  o.reduced: they have been
-- summed over dp already, and the values are waited for where they are used; o.bad: what the reducer found bad;
-- o.blame() -> the same, found out now; o.state: what the rate is asked with; o.rate: it was asked already.  Raises,
-- with nothing updated, where a gradient is not finite.
function Optimizer:step(o)
  local reduced = o and o.reduced
  self.bad_gradient = o and o.bad
  if self.before_step then self.before_step(self, reduced) end
  for _, s in ipairs(self.segments) do
    if s.level < 2 then s:zero_unused() end -- from level 2 on done when it was reduced
    if s:stale() then self:lay_runs(s) end
  end
  local number, now = self.steps + 1, o and o.rate or self:next_rate(o and o.state)
  step.set { SUMSQ = 0 }
  step.set(self:corrections(number, now))
  if self.recorded then self.recorded(number == 1) else self:compute(number == 1) end
  for _, s in ipairs(self.segments) do
    s:updated()
    s:fresh()
  end
  if self.after_step then self.after_step(self, reduced) end
  watch.mark "update"
  local norm, finite = step.get("NORM", "FINITE")
  if finite == 0 then self:refuse(number, norm, o and o.blame) end
  self.steps = number
  step.set { RANDOM = step.random_base(self.run.seed or 0, number) }
  self.last_norm, self.last_rate = norm, now
  return norm, now
end

return Optimizer
