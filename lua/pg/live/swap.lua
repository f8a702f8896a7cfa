-- live/swap.lua: pgrun swap: a new recipe for a training that goes on.  All ranks compile the same texts (sources.lua),
-- agree that it can be taken, and take it before the same step; or none does and the old one goes on.  What the
-- optimiser has learnt, the position in the data and the count of steps stay.  Every offer goes to the journal.
-- May change: loss, on_step, optim.rate, steps, log, save, sample, and how often eval looks.
local agree = require "pg.agree"
local host = require "pg.host"
local journal = require "pg.live.journal"
local log = require "pg.log"
local recipe = require "pg.recipe"
local run = require "pg.run"
local sources = require "pg.live.sources"

local swap = {}
local FREE = { "loss", "on_step", "optim%.rate", "steps", "log", "save", "sample", "eval%.every", "eval%.batches" }

local function is_free(path)
  for _, name in ipairs(FREE) do
    if path:find("^" .. name .. "$") or path:find("^" .. name .. "%.") then return true end
  end
  return false
end

local function shown(value)
  if value == nil then return "not set" end
  return type(value) == "table" and "a table" or tostring(value)
end

-- The first field, by name, that differs and may not: path, old, new.
local function locked(old, new, prefix)
  local keys, list = {}, {}
  for _, t in ipairs { old, new } do for k in pairs(t) do keys[k] = true end end
  for k in pairs(keys) do list[#list + 1] = k end
  table.sort(list, function(a, b) return tostring(a) < tostring(b) end)
  for _, k in ipairs(list) do
    local path, a, b = prefix .. tostring(k), old[k], new[k]
    if is_free(path) then a, b = nil, nil end
    if type(a) == "table" and type(b) == "table" then
      local found, x, y = locked(a, b, path .. ".")
      if found then return found, x, y end
    elseif a ~= b then
      return path, a, b
    end
  end
end

-- The settings of an offer -> settings, plain settings; raises why they cannot be taken, with the field.
local function check(trainer, offer, path)
  local overrides = recipe.arguments(trainer.info.args)
  local new = recipe.resolve(offer.recipe, overrides, { path = path, text = offer.text })
  local plain = run.settings(new)
  local field, was, is = locked(trainer.settings, plain, "")
  if field then
    error({ field = field, reason = ("%s was %s, is %s; it cannot change while a run goes on: pgrun stop saves, and "
      .. "--resume goes on with what its checkpoint allows"):format(field, shown(was), shown(is)) }, 0)
  end
  if new.steps <= trainer.state.step then
    error({ field = "steps", reason = ("steps is %d, and step %d is behind us; pgrun stop ends the run"):format(
      new.steps, trainer.state.step) }, 0)
  end
  return new, plain
end

local function settings_of(optim)
  local out = {}
  for k, v in pairs(optim) do if k ~= 1 then out[k] = v end end
  return out
end

-- From the next step on.
local function take(trainer, offer, new, plain)
  trainer.about.steps = new.steps
  trainer.optim:swap(settings_of(new.optim), trainer.about)
  trainer.recipe, trainer.settings, trainer.state.steps = new, plain, new.steps
  sources.commit(offer.modules)
end

-- Every rank's try -> settings, plain | nil, reason, rank, field.
local function agreed(trainer, offer, path)
  local ok, new, plain = pcall(check, trainer, offer, path)
  local wrong = not ok and (type(new) == "table" and new or { reason = tostring(new) }) or nil
  local first = agree.first(wrong and ("%d %s\n%s"):format(host.rank, wrong.field or "", wrong.reason) or nil)
  if not first then return new, plain end
  local rank, field, reason = first:match "^(%d+) ([^\n]*)\n(.*)$"
  return nil, reason, tonumber(rank), field ~= "" and field or nil
end

local function note(trainer, entry)
  if host.rank ~= 0 then return end
  entry.step = trainer.state.step
  local ok, why = pcall(journal.write, trainer.state.run, entry)
  if not ok then log.text("%s", why) end
end

--- swap.run(trainer, path, protect) -> true | nil, reason.  Between two steps, on all ranks.  protect(f, ...): pcall
-- with a time limit, for code of the offer.
function swap.run(trainer, path, protect)
  local offer, reason, rank = sources.offer(path, protect)
  local new, plain, field
  if offer then
    new, reason, rank, field = agreed(trainer, offer, path)
    plain = reason
  end
  if not new then
    note(trainer, { accepted = false, reason = reason, rank = rank, field = field, hash = offer and offer.hash,
                    text = offer and offer.text })
    log.text("step %d: %s was offered and refused: %s", trainer.state.step, path, reason)
    return nil, reason
  end
  take(trainer, offer, new, plain)
  note(trainer, { accepted = true, hash = offer.hash, text = offer.text })
  log.text("step %d: %s from here on", trainer.state.step, path)
  return true
end

return swap
