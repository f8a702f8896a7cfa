-- live/undo.lua: a step that is abandoned before its update leaves the training as it was: undo.keep(trainer) notes
-- what a step and a new recipe change, undo.restore puts it back.  Parameters, moments and the count of updates are
-- not among it: nothing has touched them.
local adopt = require "pg.live.adopt"
local c = require "pg.c"
local guard = require "pg.live.guard"
local trial = require "pg.live.trial"

local undo = {}
local OF_TRAINER = { "recipe", "info", "settings", "set", "held_out", "loader", "about", "mfu", "stopping" }
local OF_STATE = { "step", "steps", "tokens", "epoch", "position", "loss" }

local function pick(t, keys)
  local out = {}
  for _, key in ipairs(keys) do out[key] = t[key] end
  return out
end

local function put(t, keys, kept)
  for _, key in ipairs(keys) do t[key] = kept[key] end
end

-- The recipe's functions may hold the table itself.
local function refill(t, kept)
  for k in pairs(t) do t[k] = nil end
  for k, v in pairs(kept) do t[k] = v end
end

--- undo.keep(trainer) -> what undo.restore takes.  Between two steps, on all ranks.
function undo.keep(trainer)
  return { process = guard.keep(), engine = trainer.engine:keep(), optim = trainer.optim:keep(),
           model = trainer.model, trainer = pick(trainer, OF_TRAINER), state = pick(trainer.state, OF_STATE),
           shown = trial.copy(trainer.shown), tokens = trainer.about.tokens, position = trainer.loader.position }
end

--- undo.restore(trainer, kept): on all ranks, once their groups are whole.
function undo.restore(trainer, kept)
  if trainer.model ~= kept.model then adopt.give_back(trainer, kept.model) end
  put(trainer, OF_TRAINER, kept.trainer)
  put(trainer.state, OF_STATE, kept.state)
  refill(trainer.shown, kept.shown)
  trainer.about.tokens = kept.tokens
  trainer.engine:abandon(kept.engine)
  kept.optim()
  guard.restore(kept.process)
  trainer.loader:seek(kept.position)
  c.collect() -- what the step has left
end

return undo
