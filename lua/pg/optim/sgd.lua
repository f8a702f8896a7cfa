-- optim/sgd.lua: stochastic gradient descent with momentum, as torch.optim.SGD.
local c = require "pg.c"
local describe = require "pg.describe"
local step = require "pg.step"
local Optimizer = require "pg.optim.optimizer"
local C = c.C

local SGD = setmetatable({ moments = { "momentum_buffer" } }, { __index = Optimizer })
SGD.__index = SGD

local schema = {
  rate      = { "any", 1e-2, "a number, pg.rate.NAME{...} or a function of state", low = 0 },
  momentum  = { "number", 0, "share of the last step's direction that is kept", low = 0 },
  dampening = { "number", 0, "share of the gradient left out of the momentum" },
  nesterov  = { "boolean", false, "look ahead along the momentum" },
  decay     = { "number", 0, "weight decay, added to the gradient; not on norms and biases" },
  clip      = { "number", 0, "largest gradient norm; 0: no clipping", low = 0 },
}

function SGD.corrections(_, _, rate) return { RATE = rate, BIAS1 = 1, BIAS2 = 1 } end

function SGD:update(s, state, first)
  local o = self.settings
  local m = o.momentum ~= 0 and state.momentum_buffer.raw or nil
  local master = state.master and state.master.raw or nil
  c.check(C.pg_sgd(s.own_value.raw, master, s.own_grad.raw, m, state.ends.raw, state.factors.raw, step.block().raw,
                   o.momentum, o.dampening, o.nesterov and 1 or 0, first and 1 or 0))
end

--- sgd(parameters, { rate=, momentum=, dampening=, nesterov=, decay=, clip= }, run) -> an optimiser.
local function new(parameters, settings, run)
  return Optimizer.setup(setmetatable({}, SGD), parameters, describe.fill(settings or {}, schema, "sgd"), run)
end

return { new = new, schema = schema, moments = #SGD.moments }
