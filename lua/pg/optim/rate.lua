-- optim/rate.lua: learning rates as functions of the step (1 for the first).
-- Every schedule warms up linearly so that step 1 has a rate above 0 and step `warmup` the peak.
--   pg.rate.cosine{ peak = 1e-3, warmup = 30, steps = 300, floor = 0.1 }
-- steps defaults to the run's; floor is a share of the peak.  A function of state (state.step, state.steps)
-- serves as well, and so does a number.
local c = require "pg.c"
local describe = require "pg.describe"

local rate = {}

local schema = {
  peak   = { "number", nil, "highest rate", low = 0 },
  warmup = { "integer", 0, "steps of linear warm-up", low = 0 },
  steps  = { "integer", nil, "where the schedule ends; default: the run's steps", low = 1 },
  floor  = { "number", 0.1, "lowest rate, as a share of the peak", low = 0, high = 1 },
  decay  = { "number", 0.2, "wsd: the last share of the steps, over which the rate falls", low = 0, high = 1 },
  base   = { "integer", nil, "batch size that the peak was chosen for; the peak is scaled by batch / base", low = 1 },
}

-- Share of the way through the part after warm-up: 0 at its start, 1 at the last step.
local function progress(s, step)
  local span = s.steps - s.warmup
  if span <= 0 then return 1 end
  return math.min(1, math.max(0, (step - s.warmup) / span))
end

local shapes = {}
function shapes.constant() return 1 end
-- Written so that the last step gives the floor to the bit.
function shapes.linear(s, step) return s.floor + (1 - s.floor) * (1 - progress(s, step)) end
function shapes.cosine(s, step)
  return s.floor + (1 - s.floor) * 0.5 * (1 + math.cos(math.pi * progress(s, step)))
end
-- Warm-up, stable, decay (Hu et al. 2024): flat, then straight down over the last share of the steps.
function shapes.wsd(s, step)
  local start = s.steps - math.max(1, math.floor(s.decay * s.steps))
  if step <= start then return 1 end
  return s.floor + (1 - s.floor) * (1 - math.min(1, (step - start) / (s.steps - start)))
end
-- Vaswani et al. 2017: falls with the square root of the step.
function shapes.inverse_sqrt(s, step)
  local from = math.max(s.warmup, 1)
  return math.sqrt(from / math.max(step, from))
end

for name, shape in pairs(shapes) do
  rate[name] = describe.new("rate." .. name, schema, function(s, run)
    run = run or {}
    if not s.peak then c.fail("rate.%s: peak is missing; the highest rate", name) end
    s.steps = s.steps or run.steps
    if not s.steps and name ~= "constant" and name ~= "inverse_sqrt" then
      c.fail("rate.%s: steps is missing; how many steps the schedule has", name)
    end
    local peak = s.peak
    if s.base then -- the linear scaling rule (Goyal et al. 2017)
      if not run.batch then c.fail("rate.%s: base needs the batch size, which only a recipe knows", name) end
      peak = peak * run.batch / s.base
    end
    return function(state)
      local step = state.step
      if step < s.warmup then return peak * step / s.warmup end
      return peak * shape(s, step)
    end
  end)
end

--- rate.build(x, run) -> a function of state.  x: a number, a description, or a function already;
-- run = { steps =, batch = }.
function rate.build(x, run)
  if type(x) == "number" then return function() return x end end
  if type(x) == "function" then return x end
  if describe.is(x) then return describe.build(x, run) end
  c.fail("rate is %s; it must be a number, pg.rate.NAME{...} or a function of state", type(x))
end

return rate
