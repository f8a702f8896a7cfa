-- train_parts.lua: what a training consists of besides its loop, made from settings: model, data, loader, loss.
-- train.lua makes them at the start; live/prepare.lua makes some of them anew while it goes on.
local c = require "pg.c"
local choices = require "pg.choices"
local data = require "pg.data"
local describe = require "pg.describe"
local flops = require "pg.flops"
local graph = require "pg.graph"
local layout = require "pg.parallel.layout"
local mesh = require "pg.mesh"
local recipe = require "pg.recipe"
local rows = require "pg.nn.rows"
local tape = require "pg.tape"
local C = c.C

local parts = {}
local DTYPES = { fp32 = "f32", tf32 = "f32", bf16 = "bf16" }

-- ---- the model ----

--- parts.described(settings) -> the description or module that they name.
function parts.described(r)
  local what = r.model
  if type(what) == "function" then what = what() end
  if type(what) ~= "table" or not (describe.is(what) or what.is_module) then
    c.fail("the function model returned %s; it must be a description or a module", tostring(what))
  end
  return what
end

--- parts.remade(settings) -> whether norms are made again in backward (tape.remake).
function parts.remade(r) return r.recompute == "norms" end

--- parts.mark_recompute(settings, model): the blocks that are run again in backward.
function parts.mark_recompute(r, model)
  if r.recompute ~= "block" then return end
  if not (model.layers and model.layers.items) then
    c.fail 'recompute = "block" needs a model whose layers are an nn.Sequential of blocks; use recompute = "none"'
  end
  model.layers.recompute = true
end

--- parts.place(settings) -> { model, plan }: the model as this rank holds it, and who holds what.
function parts.place(r)
  tape.remake = parts.remade(r)
  C.pg_deterministic(r.deterministic and 1 or 0)
  C.pg_allow_tf32(r.precision == "tf32" and 1 or 0)
  local optim = require("pg.optim." .. r.optim[1])
  local model, plan = layout.build(parts.described(r), r.layout, {
    seed = r.seed, dtype = DTYPES[r.precision],
    moments = optim.moments * (r.optim.moments == "bf16" and 2 or 4) })
  choices.open() -- the model has opened the device
  parts.mark_recompute(r, model)
  return { model, plan }
end

--- parts.lay(settings) -> the model as this rank would hold it in the mesh that stands, without numbers.
function parts.lay(r)
  local model = layout.lay(parts.described(r), r.layout, { dtype = DTYPES[r.precision] })
  parts.mark_recompute(r, model)
  return model
end

--- parts.mfu(settings, model) -> FLOPs of a token by both conventions, as shares of what the cards could do together;
-- nil where that is unknown.
function parts.mfu(r, model)
  local card = flops.card()
  local peak = card and flops.peak(card, r.precision)
  if not peak then return nil end
  local causal, full = flops.token(model, r.data.context or model.context)
  return { causal = causal / (peak * mesh.size()), full = full / (peak * mesh.size()) }
end

-- ---- data ----

--- parts.data_options(settings, model) -> what data.open takes: settings that give the same ones have the same data.
function parts.data_options(r, model)
  return { tokens = r.data.tokens, text = r.data.text, random = r.data.random, dtype = r.data.dtype,
           held_out = r.data.held_out, context = r.data.context or model.context,
           vocab = r.data.vocab or model.vocab }
end

-- Sequences and ids that the model can take, and the ranks of tp share out.
local function check_data(r, info, model)
  for _, key in ipairs { "context", "vocab" } do
    local limit, asked = model[key], r.data[key]
    if not (limit or asked) then
      recipe.fail(info, "data", "data.%s is missing: the model does not say what it takes", key)
    elseif limit and asked and asked > limit then
      recipe.fail(info, "data." .. key, "data.%s is %d, the model's is %d; it may not be larger", key, asked, limit)
    end
  end
  recipe.guard(info, "micro", rows.check, r.micro, r.data.context or model.context)
end

--- parts.set(settings, info, model) -> the data that it learns from.
function parts.set(r, info, model)
  check_data(r, info, model)
  local where = r.data.text and "data.text" or r.data.random and "data.random" or "data.tokens"
  local set = recipe.guard(info, where, data.open, parts.data_options(r, model))
  recipe.guard(info, "layout.tp", rows.check, r.micro, set.train.context)
  return set
end

local function open_held_out(r, set, model)
  if not (r.eval and r.eval.tokens) then return set.held_out end
  local o = parts.data_options(r, model)
  o.tokens, o.text, o.random, o.held_out = r.eval.tokens, nil, nil, 0
  return data.open(o).train
end

--- parts.held_out(settings, info, set, model) -> the stream that is evaluated, or nil.
function parts.held_out(r, info, set, model) return recipe.guard(info, "eval.tokens", open_held_out, r, set, model) end

--- parts.loader_options(settings) -> what a loader is made with.
function parts.loader_options(r)
  return { batch = r.data.batch, micro = r.micro, seed = r.data.seed, axis = mesh.dp, pad = r.data.pad }
end

--- parts.loader(settings, info, set) -> a loader, at the first sample.
function parts.loader(r, info, set)
  return recipe.guard(info, "data", set.loader, set, parts.loader_options(r))
end

-- ---- optimiser and loss ----

--- parts.optim(settings) -> the settings of its optimiser, without the name.
function parts.optim(r)
  local settings = {}
  for k, v in pairs(r.optim) do if k ~= 1 then settings[k] = v end end
  return settings
end

--- parts.record(settings, trainer): a step is two graphs or none: its gradients, after which the host looks at the loss
-- and asks for the rate; norm and update.
function parts.record(r, trainer)
  trainer.engine:record(r.graphs)
  trainer.optim:record(r.graphs and graph.new or nil)
end

--- parts.about(settings) -> what schedules of the rate are told of the run.
function parts.about(r) return { steps = r.steps, seed = r.seed, batch = r.data.batch, tokens = 0 } end

--- parts.loss(settings, info, model, batch) -> loss, valid: the recipe's own or the model's.
function parts.loss(r, info, model, batch)
  if not r.loss then return model:loss(batch) end
  local loss, valid = r.loss(model, batch)
  if type(loss) ~= "table" or not loss.is_tensor or loss.count ~= 1 then
    recipe.fail(info, "loss", "loss returned %s; it must return a tensor of one number, such as model:loss(batch)",
                type(loss) == "table" and loss.is_tensor and loss:describe() or describe.show(loss))
  end
  return loss, valid
end

return parts
