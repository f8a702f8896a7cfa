-- live/guard.lua: what a line of the prompt, or the trial of a recipe, must leave as it found it, where a training goes
-- on afterwards: the tape, open scopes, the counts of random calls, and whether the next gradient overwrites or adds.
-- Parameters change where a line changes them.
local c = require "pg.c"
local elementwise = require "pg.ops.elementwise"
local random = require "pg.random"
local scope = require "pg.scope"
local step = require "pg.step"
local tape = require "pg.tape"

local guard = {}

local function gradients(model)
  local kept = {}
  if type(model) ~= "table" or not model.is_module then return kept end
  for i, p in ipairs(model:parameters()) do kept[i] = { p = p, grad = p.grad, fresh = p.grad_fresh } end
  return kept
end

--- guard.keep(model) -> what guard.restore takes.  model: whose gradients must stay, or nil.
function guard.keep(model)
  local context = {}
  for k, v in pairs(tape.context) do context[k] = v end
  return { enabled = tape.enabled, walking = tape.walking, remake = tape.remake, table = tape.context,
           context = context, depth = scope.depth(), calls = random.calls, dropouts = elementwise.dropout_calls,
           step = step.all(), gradients = gradients(model) }
end

--- guard.restore(kept)
function guard.restore(kept)
  scope.reset(kept.depth)
  tape.enabled, tape.walking, tape.remake, tape.context = kept.enabled, kept.walking, kept.remake, kept.table
  for k in pairs(kept.table) do if kept.context[k] == nil then kept.table[k] = nil end end
  for k, v in pairs(kept.context) do kept.table[k] = v end
  random.calls, elementwise.dropout_calls = kept.calls, kept.dropouts
  step.set(kept.step)
  for _, g in ipairs(kept.gradients) do
    if g.grad and g.p.grad ~= g.grad then g.p.grad = g.grad end
    g.p.grad_fresh = g.fresh
  end
  c.C.pg_mem_tag "activations"
end

-- A random number generator of a line's own: the recipe's math.random goes on as if nothing had been drawn.
local function random_numbers()
  local state = 1
  local function next_number()
    state = (state * 1103515245 + 12345) % 2^31
    return state / 2^31
  end
  local function draw(low, high)
    if not low then return next_number() end
    if not high then low, high = 1, low end
    return low + math.floor(next_number() * (high - low + 1))
  end
  return draw, function(seed) state = math.floor(tonumber(seed) or 1) % 2^31 end
end

--- guard.libraries() -> math, os and jit as lines see them: no draw from the recipe's numbers, no end of the process,
-- nothing compiled, since that could not be stopped.
function guard.libraries()
  local draw, seed = random_numbers()
  local function exit()
    error("os.exit: a line does not end the run; pgrun stop RUN does, Ctrl-D leaves the prompt", 2)
  end
  local function on()
    error("jit.on: a line runs without the compiler, which is on again after it; compiled code could not be stopped", 2)
  end
  return { jit = setmetatable({ on = on }, { __index = jit }),
           math = setmetatable({ random = draw, randomseed = seed }, { __index = math }),
           os = setmetatable({ exit = exit }, { __index = os }) }
end

return guard
