-- live/allowed.lua: which fields of a recipe may change while it trains, and the way out for those that may not.
local describe = require "pg.describe"
local recipe = require "pg.recipe"

local allowed = {}

-- What is looked at between steps, or has no numbers of its own on any rank.
local FREE = { loss = true, on_step = true, optim = true, steps = true, log = true, save = true, sample = true,
               eval = true, data = true, micro = true, recompute = true, live = true, graphs = true }
local FIXED = { ["optim.1"] = true, ["optim.moments"] = true } -- of those
local NAMES = { ["optim.1"] = "optim" }

local RESUME = "pgrun stop RUN saves the run, and --resume=RUN with the new recipe goes on so"
local ANEW = "that is another training: pgrun stop RUN ends this one, then start it as a run of its own"

-- What a checkpoint allows.
local function way(path)
  local resumed = path:find "^layout" or path == "precision" or path == "deterministic" or path == "optim.moments"
  return resumed and RESUME or ANEW
end

local function show(value)
  if value == nil then return "not set" end
  if describe.is(value) then return describe.name(value) end
  return describe.show(value)
end

-- Functions and modules are compared by what comes of them (adopt.lua), schedules by their code.
local function same(a, b)
  if a == b then return true end
  if type(a) ~= type(b) then return false end
  if type(a) == "function" then
    local ok, x, y = pcall(function() return string.dump(a, true), string.dump(b, true) end)
    return ok and x == y
  end
  return type(a) == "table" and a.is_module and b.is_module
end

local function keys_of(a, b)
  local seen, list = {}, {}
  for _, t in ipairs { a, b } do
    for k in pairs(t) do
      if not seen[k] then list[#list + 1] = k end
      seen[k] = true
    end
  end
  table.sort(list, function(x, y) return tostring(x) < tostring(y) end)
  return list
end

local function plain(x) return type(x) == "table" and not x.is_module end

-- The first field, by name, that differs and may not -> path, old, new.  A model that is no description on one side is
-- judged by what it makes.
local function locked(old, new, prefix, free)
  for _, k in ipairs(keys_of(old, new)) do
    local path, a, b = prefix .. tostring(k), old[k], new[k]
    local inside = free or prefix == "" and FREE[k]
    local described = describe.is(a) and describe.is(b)
    if described and describe.name(a) ~= describe.name(b) then return path, a, b end
    if described or path ~= "model" and plain(a) and plain(b) then
      local found, x, y = locked(a, b, path .. ".", inside)
      if found then return found, x, y end
    elseif path ~= "model" and (FIXED[path] or not inside) and not same(a, b) then
      return path, a, b
    end
  end
end

--- allowed.check(old, new, info): raises where settings differ that may not, at the field's line of the new recipe.
function allowed.check(old, new, info)
  local path, was, is = locked(old, new, "", false)
  if not path then return end
  recipe.fail(info, path, "%s was %s, is %s; it cannot change while a run goes on: %s", NAMES[path] or path, show(was),
              show(is), way(path))
end

--- allowed.model(info, format, ...): raise that the new model is another one.
function allowed.model(info, format, ...)
  recipe.fail(info, "model", "model: %s; parameters cannot change while a run goes on: %s", format:format(...), ANEW)
end

return allowed
