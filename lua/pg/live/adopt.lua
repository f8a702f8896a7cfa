-- live/adopt.lua: new code of a model over the parameters that it has.  The new recipe's model is laid out as this rank
-- holds the running one (layout.lua) but without numbers; where every parameter has its name, shape and place in both,
-- those of the new one take the numbers, gradients and segments of the old.  Until adopt.take nothing of the old one is
-- touched.
local allowed = require "pg.live.allowed"
local zero = require "pg.parallel.zero"

local adopt = {}
local TAKEN = { "raw", "dtype", "grad_dtype", "segment", "lies_in", "offset", "grad", "grad_fresh", "frozen" }

-- Its parameters, absent ones too, by name and in order.
local function parameters(model)
  local by_name, order, seen = {}, {}, {}
  model:each_parameter(function(p, prefix)
    if not prefix or seen[p] then return end
    seen[p], by_name[p.name] = true, p
    order[#order + 1] = p
  end)
  return by_name, order
end

local function shape_text(p) return "[" .. table.concat(p.whole or p.shape, ",") .. "]" end

-- How the numbers of a parameter lie: pieces of it, and the segment it is in.
local function place_text(p)
  local texts = { p.home, table.concat(p.shape, ",") }
  for _, piece in ipairs(p.pieces) do
    texts[#texts + 1] = ("%s %d %s"):format(piece.name, piece.first, table.concat(piece.shape, ","))
  end
  return table.concat(texts, ";")
end

local function compare(new, old, info)
  local before, known = parameters(old)
  local now, order = parameters(new)
  for _, p in ipairs(order) do
    local other = before[p.name]
    if not other then allowed.model(info, "parameter %s is new", p.name) end
    if shape_text(p) ~= shape_text(other) then
      allowed.model(info, "parameter %s was %s, is %s", p.name, shape_text(other), shape_text(p))
    end
    if place_text(p) ~= place_text(other) then allowed.model(info, "parameter %s lies elsewhere in it", p.name) end
  end
  for _, p in ipairs(known) do
    if not now[p.name] then allowed.model(info, "parameter %s is gone", p.name) end
  end
  return before, order
end

--- adopt.join(new, old, info): the parameters of `new` have the numbers of those of `old`; raises what differs.
function adopt.join(new, old, info)
  local before, order = compare(new, old, info)
  for _, p in ipairs(order) do
    for _, key in ipairs(TAKEN) do p[key] = before[p.name][key] end
  end
  return new
end

-- The parameters of its segments are those of this model.
local function put(segments, model)
  local by_name = parameters(model)
  for _, s in ipairs(segments) do
    for i, p in ipairs(s.params) do s.params[i] = by_name[p.name] end
  end
end

--- adopt.take(trainer, model): a model that was joined to the trainer's is the one that is trained.
function adopt.take(trainer, model)
  local segments = trainer.model.segments
  put(segments, model)
  model.segments, trainer.model = segments, model
  zero.attach(model)
end

--- adopt.give_back(trainer, model): the one before is again.
function adopt.give_back(trainer, model)
  put(model.segments, model)
  trainer.model = model
end

return adopt
