-- live/swap.lua: a new recipe for a training that goes on, in two parts.
--   swap.offer       between two steps: rank 0 sends the texts, every rank compiles them, makes what they name beside
--                    what is running and tries it (prepare.lua, trial.lua); all ranks vote
--   swap.first_step  the next step is made with the new recipe, up to the update.  Where a rank raises, those who wait
--                    for it are cancelled, all go back to before the step (undo.lua), and it is made with the old one
-- So all ranks change before the same step or none does, and the losses of a run that refuses are those of a run that
-- was never asked.  Every offer goes to the journal, to the run's lines and back to who made it.
local adopt = require "pg.live.adopt"
local agree = require "pg.agree"
local budget = require "pg.live.budget"
local c = require "pg.c"
local groups = require "pg.live.groups"
local guard = require "pg.live.guard"
local host = require "pg.host"
local journal = require "pg.live.journal"
local log = require "pg.log"
local parts = require "pg.train_parts"
local prepare = require "pg.live.prepare"
local recipe = require "pg.recipe"
local scope = require "pg.scope"
local sources = require "pg.live.sources"
local tape = require "pg.tape"
local undo = require "pg.live.undo"
local zero = require "pg.parallel.zero"
local C = c.C

local swap = {}
-- Seconds that ranks wait for one another in a first step: so many, and so many times the last step.
local PATIENCE, TIMES = 60, 10
local TAKEN = { "recipe", "info", "settings", "set", "held_out", "loader", "about", "mfu" }

-- ---- what is told of an offer ----

-- step: the first that is made with it, or would have been.
local function note(trainer, step, offer, entry)
  entry.step, entry.hash, entry.text, entry.modules = step, offer.hash, offer.text, offer.changed
  local ok, why = pcall(journal.write, trainer.state.run, entry)
  if not ok then log.text("%s", why) end
end

-- On all ranks; told by the first.  wrong: { reason, rank, field }.  The step is the next.
local function refuse(trainer, offer, wrong, reply)
  if host.rank ~= 0 then return end
  local step = trainer.state.step + 1
  local who = wrong.rank > 0 and ("rank %d: "):format(wrong.rank) or ""
  note(trainer, step, offer, { accepted = false, reason = wrong.reason, rank = wrong.rank, field = wrong.field })
  log.text("step %d: %s was offered and refused: %s%s", step, offer.path, who, wrong.reason)
  reply("E", who .. wrong.reason, offer)
end

-- The same once its first step is through, up to the update.
local function accept(trainer, change)
  local offer, step = change.offer, trainer.state.step
  sources.commit(offer)
  trainer.swapped = ("; the recipe is %s, since step %d"):format(offer.path, step)
  if host.rank ~= 0 then return end
  note(trainer, step, offer, { accepted = true })
  local told = ("%s from step %d on; the run stood still for %.1f ms"):format(offer.path, step, change.pause * 1000)
  log.text("%s", told)
  change.reply("K", told, offer)
end

-- ---- between two steps ----

-- pcall with limits of time and instructions, for code that has just been loaded.
local function limits(session)
  local function results(held, ok, ...)
    if not held then return false, ok end -- out of time
    return ok, ...
  end
  return function(...) return results(session:protect(budget.run, ...)) end
end

-- The first rank that could not prepare it -> { reason, rank, field }, or nil.  axis: of all ranks, and of those that
-- are cancelled in the first step none: a rank that is through goes on while others are still in here.
local function first_fault(ok, message, info, axis)
  local mine = not ok and ("%s\n%s"):format(info and info.field or "", tostring(message)) or nil
  local text, rank = agree.first(mine, axis)
  if not text then return nil end
  local field, reason = text:match "^([^\n]*)\n(.*)$"
  return { reason = reason, rank = rank, field = field ~= "" and field or nil }
end

-- The offer read, compiled, made and tried on this rank -> went well, the offer, why not, why it was not even read.
-- Its code may be stopped anywhere: what it changed of the process is put back.
local function prepared(trainer, path, protect, new)
  local kept = guard.keep()
  local offer, unread = sources.offer(path, protect)
  local ok, message = not unread, unread
  if ok then ok, message = agree.try(prepare.run, trainer, offer, path, protect, new) end
  guard.restore(kept)
  return ok, offer, message, unread
end

--- swap.offer(trainer, path, session, reply): on all ranks, between two steps.  session: of lines.lua; reply(kind,
-- text, offer): on the first rank, once it is known: now, or after the next step.  Where the ranks agree,
-- trainer.change is set and the next step is swap.first_step.
function swap.offer(trainer, path, session, reply)
  local began, protect, new = C.pg_time(), limits(session), {}
  local ok, offer, message, unread = prepared(trainer, path, protect, new)
  if unread then return refuse(trainer, offer, { reason = unread, rank = 0 }, reply) end
  zero.ready(trainer.engine.segments) -- before the vote: nobody waits in there when a rank gives up the step
  local wrong = first_fault(ok, message, new.info, session.service)
  if wrong then
    prepare.free(new, trainer)
    return refuse(trainer, offer, wrong, reply)
  end
  trainer.change = { new = new, offer = offer, reply = reply, session = session, pause = C.pg_time() - began }
end

-- ---- the first step ----

local function take(trainer, new)
  adopt.take(trainer, new.model)
  for _, key in ipairs(TAKEN) do trainer[key] = new[key] end
  trainer.state.steps = new.recipe.steps
  trainer.optim:swap(parts.optim(new.recipe), new.about)
  trainer.engine:adopt(new.model, new.recipe.layout.schedule)
  parts.record(new.recipe, trainer)
  tape.remake = parts.remade(new.recipe)
end

-- Everything of a step but its update -> what Trainer:gather returns, and its rate.
local function attempt(trainer, change)
  local before = C.pg_time()
  take(trainer, change.new)
  change.pause = change.pause + C.pg_time() - before
  local made = trainer:gather(change.new.reshaped)
  if not made.bad then
    made.rate = recipe.guard(trainer.info, "optim.rate", trainer.optim.next_rate, trainer.optim, trainer:show())
  end
  c.check(C.pg_sync()) -- what the device still has to tell belongs to this step
  return made
end

-- All ranks have come through, or the first that did not -> { reason, rank }: one with a mistake of its own before
-- those that waited for it.
local function first_failed(ok, message, axis)
  local own = not ok and c.code ~= C.PG_ECANCEL
  local reason, rank = agree.first(own and tostring(message) or nil, axis)
  if not reason then reason, rank = agree.first(not ok and tostring(message) or nil, axis) end
  return reason and { reason = reason, rank = rank }
end

--- swap.first_step(trainer) -> as Trainer:gather, of the new recipe or, where a rank raised, of the old.
function swap.first_step(trainer)
  local change, kept, all = trainer.change, undo.keep(trainer), groups.new(false)
  local session = change.session
  trainer.change = nil
  C.pg_comm_timeout(math.min(session.usual, PATIENCE + TIMES * (trainer.seconds_of_step or 0)))
  c.code = nil
  local ok, made = agree.try(scope.run, attempt, trainer, change)
  if not ok and c.code == C.PG_EINTR then error(made, 0) end
  if not ok then all:cancel("its first step with a new recipe failed: " .. tostring(made):match "[^\n]*") end
  C.pg_comm_timeout(session.usual)
  local wrong = first_failed(ok, made, session.service)
  if not wrong then
    prepare.free(kept.trainer, trainer)
    accept(trainer, change)
    return made
  end
  all:reform()
  undo.restore(trainer, kept)
  prepare.free(change.new, trainer)
  refuse(trainer, change.offer, wrong, change.reply)
  return trainer:gather()
end

return swap
