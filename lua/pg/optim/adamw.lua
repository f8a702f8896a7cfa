-- optim/adamw.lua: AdamW (Loshchilov and Hutter 2019), one fused call a segment.
local c = require "pg.c"
local describe = require "pg.describe"
local step = require "pg.step"
local Optimizer = require "pg.optim.optimizer"
local C = c.C

local AdamW = setmetatable({ moments = { "exp_avg", "exp_avg_sq" } }, { __index = Optimizer })
AdamW.__index = AdamW

local schema = {
  rate  = { "any", 1e-3, "a number, pg.rate.NAME{...} or a function of state", low = 0 },
  betas = { "table", { 0.9, 0.999 }, "decay of the moments", low = 0, below = 1 },
  eps   = { "number", 1e-8, "added to the root", low = 0 },
  decay = { "number", 0, "weight decay, decoupled; not on norms and biases" },
  clip  = { "number", 0, "largest gradient norm; 0: no clipping", low = 0 },
  moments = { { "fp32", "bf16" }, "fp32", "how the moments of bf16 and f16 weights are kept" },
}

function AdamW:corrections(number, rate)
  local b1, b2 = unpack(self.settings.betas)
  return { RATE = rate, BIAS1 = 1 - b1 ^ number, BIAS2 = 1 - b2 ^ number }
end

function AdamW:update(s, state)
  local o = self.settings
  local master = state.master and state.master.raw or nil
  c.check(C.pg_adamw(s.own_value.raw, master, s.own_grad.raw, state.exp_avg.raw, state.exp_avg_sq.raw, state.ends.raw,
                     state.factors.raw, step.block().raw, o.betas[1], o.betas[2], o.eps))
end

--- adamw(parameters, { rate=, betas=, eps=, decay=, clip=, moments= }, run) -> an optimiser.
local function new(parameters, settings, run)
  return Optimizer.setup(setmetatable({}, AdamW), parameters, describe.fill(settings or {}, schema, "adamw"), run)
end

return { new = new, schema = schema }
