-- live/prepare.lua: from the texts of a new recipe to all that the next step needs of it, made beside what is running
-- and tried (trial.lua): nothing of the training is touched, and what is wrong is raised.
--   new = { recipe, info, settings, model, set, held_out, loader, about, mfu, reshaped }
-- Data: a new source (tokens, text, random, held_out, context, vocab, dtype) begins at its first sample; with the same
-- source the position stays, counted in samples, whatever batch, micro, seed or pad become.
local adopt = require "pg.live.adopt"
local allowed = require "pg.live.allowed"
local parts = require "pg.train_parts"
local recipe = require "pg.recipe"
local run = require "pg.run"
local sources = require "pg.live.sources"
local trial = require "pg.live.trial"

local prepare = {}

local function equal(a, b)
  for _, t in ipairs { a, b } do
    for k in pairs(t) do if a[k] ~= b[k] then return false end end
  end
  return true
end

-- Settings as the command line of the run leaves them.
local function settings(trainer, given, new)
  local overrides = recipe.arguments(trainer.info.args)
  local r = recipe.resolve(given, overrides, new.info)
  allowed.check(trainer.recipe, r, new.info)
  if r.steps <= trainer.state.step then
    recipe.fail(new.info, "steps", "steps is %d, and step %d is behind us; pgrun stop ends the run", r.steps,
                trainer.state.step)
  end
  new.recipe, new.settings, new.about = r, run.settings(r), parts.about(r)
  new.about.tokens = trainer.about.tokens
end

local function model(trainer, new)
  local laid = recipe.guard(new.info, "model", parts.lay, new.recipe)
  new.model = adopt.join(laid, trainer.model, new.info)
  new.mfu = parts.mfu(new.recipe, new.model)
end

-- Data as before where nothing of it has changed; else new, at its place.
local function data(trainer, new)
  local old, r, info = trainer.recipe, new.recipe, new.info
  local same = equal(parts.data_options(old, trainer.model), parts.data_options(r, new.model))
  new.set = same and trainer.set or parts.set(r, info, new.model)
  local looked = same and (r.eval and r.eval.tokens) == (old.eval and old.eval.tokens)
  if looked then new.held_out = trainer.held_out
  else new.held_out = parts.held_out(r, info, new.set, new.model) end
  new.loader = trainer.loader
  if not (same and equal(parts.loader_options(old), parts.loader_options(r))) then
    new.loader = parts.loader(r, info, new.set)
    if same then new.loader:seek(trainer.loader.position) end
  end
  new.reshaped = not same or r.micro ~= old.micro
end

-- All but the data.
local function fill(trainer, offer, new)
  settings(trainer, offer.recipe, new)
  model(trainer, new)
end

local function version(trainer, offer, path, protect, new)
  new.info = { path = path, text = offer.text, args = trainer.info.args, run = trainer.info.run }
  sources.compile(offer, protect)
  local ok, message = protect(fill, trainer, offer, new)
  if not ok then error(message, 0) end
end

--- prepare.run(trainer, offer, path, protect, new): fills new; raises why it cannot be, with new.info.field, and leaves
-- there what is to be freed (prepare.free).  protect: pcall with limits, for code of the offer.  What is tried is a
-- copy: upvalues and modules of the one that is taken are as its file makes them.
function prepare.run(trainer, offer, path, protect, new)
  version(trainer, offer, path, protect, new)
  data(trainer, new)
  trial.run(trainer, new, protect)
  version(trainer, offer, path, protect, new)
end

--- prepare.free(new, trainer): what the trainer does not use of it (or of the one before).
function prepare.free(new, trainer)
  if new.loader and new.loader ~= trainer.loader then new.loader:close() end
end

return prepare
