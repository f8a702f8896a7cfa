-- live/trial.lua: a new recipe tried on shapes: a micro-batch through the new model and its loss, forward and backward,
-- with tensors that have shapes and no numbers, so that nothing is computed, sent or changed.  Where it asks for a
-- number (loss:item()) the trial ends: up to there all is well.  Its rate is asked for the next step and the last.
local c = require "pg.c"
local guard = require "pg.live.guard"
local host = require "pg.host"
local parts = require "pg.train_parts"
local rate = require "pg.optim.rate"
local recipe = require "pg.recipe"
local scope = require "pg.scope"
local step_block = require "pg.step"
local tape = require "pg.tape"
local Tensor = require "pg.tensor"
local C = c.C

local trial = {}
local NO_NUMBER = "only shapes are being computed here"

--- trial.copy(t) -> plain tables copied to any depth, all else as it is.
function trial.copy(t, seen)
  if type(t) ~= "table" or getmetatable(t) then return t end
  seen = seen or {}
  if seen[t] then return seen[t] end
  local out = {}
  seen[t] = out
  for k, v in pairs(t) do out[k] = trial.copy(v, seen) end
  return out
end

-- A batch of n sequences as the loader and the evaluation give them.
local function batch_of(n, context, training)
  local step = step_block.block()
  local ids = { n, context }
  tape.context = { training = training, step = step, sample0 = 0 }
  return { tokens = Tensor.empty(ids, "i32"), targets = Tensor.empty(ids, "i32"), sample0 = 0, ignore = c.IGNORE,
           step = training and step or nil, share = true }
end

local function forward_and_back(trainer, new)
  local r, info = new.recipe, new.info
  local function loss(model, batch) return parts.loss(r, info, model, batch) end
  tape.remake = parts.remade(r)
  local context = new.set.train.context
  trainer.engine:trial(new.model, batch_of(r.micro, context, true), loss, true)
  if not (r.eval and new.held_out) then return end
  context = new.held_out.context
  tape.no_grad(function() trainer.engine:trial(new.model, batch_of(r.micro, context, false), loss, false) end)
end

-- What it changes of the process is put back.
local function on_shapes(trainer, new, protect)
  local kept = guard.keep(new.model)
  for _, p in ipairs(new.model:parameters()) do p.grad_fresh = false end -- nobody brings buffers for them
  host.capture() -- what it prints belongs to the steps to come
  C.pg_shape_only(1)
  c.code = nil
  local ok, message = protect(scope.run, forward_and_back, trainer, new)
  C.pg_shape_only(0)
  host.captured()
  guard.restore(kept)
  if ok or c.code == C.PG_ENODATA and tostring(message):find(NO_NUMBER, 1, true) then return end
  error(message, 0)
end

-- The rate at the next step and the last, of copies of the state.
local function ask_rate(trainer, new)
  local r = new.recipe
  local of = rate.build(r.optim.rate, new.about)
  for _, step in ipairs { trainer.state.step + 1, r.steps } do
    local state = trial.copy(trainer:show())
    state.step, state.steps = step, r.steps
    local now = of(state)
    if type(now) ~= "number" or not (now >= 0 and now < math.huge) then
      c.fail("rate: at step %d it is %s, not a number of 0 or more", step, tostring(now))
    end
  end
end

--- trial.run(trainer, new, protect): raises what is wrong with new = { recipe, info, model, set, held_out, about }.
-- protect: pcall with limits.
function trial.run(trainer, new, protect)
  recipe.guard(new.info, "optim", trainer.optim.check, trainer.optim, parts.optim(new.recipe))
  local ok, message = protect(recipe.guard, new.info, "optim.rate", ask_rate, trainer, new)
  if not ok then error(message, 0) end
  on_shapes(trainer, new, protect)
end

return trial
