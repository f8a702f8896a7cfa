-- describe.lua: plain descriptions of things that are built later, so that the command line can reach
-- into them first: llama{ blocks = 4 } is a table with the field blocks, and --model.blocks=8 sets it.
-- A schema names every field: { kind, default, doc }, kind one of "integer", "number", "boolean",
-- "string", "table", "function", "any", or a list of the strings allowed; low =, high = and below = limit
-- a number, or each number of a list.  No number is infinite or NaN.
local c = require "pg.c"

local describe = {}
local EXACT = 2^53 -- integers up to it are exact in a Lua number

--- describe.is(x) -> true for a description.
function describe.is(x)
  local meta = type(x) == "table" and getmetatable(x)
  return type(meta) == "table" and meta.is_description == true
end

local function fits(value, kind)
  if type(kind) == "table" then
    for _, v in ipairs(kind) do if v == value then return true end end
    return false, "one of " .. table.concat(kind, ", ")
  end
  local number = kind == "any" or kind == "number" or kind == "integer"
  if number and type(value) == "number" and not (value > -math.huge and value < math.huge) then
    return false, kind == "integer" and "an integer" or "a finite number"
  end
  if kind == "any" then return true end
  if kind == "integer" then
    local whole = type(value) == "number" and value == math.floor(value)
    if whole and math.abs(value) > EXACT then return false, "an integer of at most 2^53" end
    return whole, "an integer"
  end
  return type(value) == kind, "a " .. kind
end

local function outside(x, entry)
  if type(x) ~= "number" then return false end
  return entry.low and x < entry.low or entry.high and x > entry.high or entry.below and x >= entry.below
end

-- "at least 0 and below 1"
local function limits(entry)
  local parts = {}
  if entry.low then parts[1] = ("at least %.10g"):format(entry.low) end
  if entry.high then parts[#parts + 1] = ("at most %.10g"):format(entry.high) end
  if entry.below then parts[#parts + 1] = ("below %.10g"):format(entry.below) end
  return table.concat(parts, " and ")
end

--- describe.fault(value, entry) -> nil, or what a value of this entry of a schema must be ("an integer",
-- "at least 1").
function describe.fault(value, entry)
  local fine, wants = fits(value, entry[1])
  if not fine then return wants end
  for _, x in ipairs(type(value) == "table" and value or { value }) do
    if type(x) == "number" and not fits(x, "number") or outside(x, entry) then
      return (type(value) == "table" and "numbers, each " or "") .. (limits(entry) ~= "" and limits(entry) or "finite")
    end
  end
end

--- describe.show(value) -> how messages name it: "ten" in quotes, a number, "a table".
function describe.show(value)
  local kind = type(value)
  if kind == "string" then return ('"%s"'):format(value) end
  if kind == "table" and not describe.is(value) and #value > 0 and #value < 9 then
    local parts = {}
    for i, x in ipairs(value) do parts[i] = type(x) == "table" and "..." or describe.show(x) end
    return "{ " .. table.concat(parts, ", ") .. " }"
  end
  if kind == "number" or kind == "boolean" or kind == "nil" or kind == "cdata" then return tostring(value) end
  return "a " .. kind
end

--- describe.fits(value, kind) -> whether it is of the kind, and what that is ("an integer").
describe.fits = fits

-- Raise where the value is none for the entry.
local function check(value, entry, what)
  local wants = describe.fault(value, entry)
  if wants then c.fail("%s is %s; it must be %s", what, describe.show(value), wants) end
  return value
end

--- describe.fill(settings, schema, what) -> a copy with defaults; unknown keys and wrong kinds are refused.
function describe.fill(settings, schema, what)
  local names = c.names(schema)
  c.keys(settings, names, what)
  local out = {}
  for _, k in ipairs(names) do
    local value = settings[k]
    if value == nil then value = schema[k][2] end
    if value ~= nil then out[k] = check(value, schema[k], what .. "." .. k) end
  end
  return out
end

--- describe.new(name, schema, build, presets) -> a function that makes descriptions:
-- f{ settings } or f "preset".  build(filled settings) is called by describe.build.
function describe.new(name, schema, build, presets)
  local meta = { is_description = true, name = name, schema = schema, build = build }
  return function(settings)
    if type(settings) == "string" then
      local preset = presets and presets[settings]
      if not preset then
        c.fail('%s: "%s" is no known size (%s)', name, settings, table.concat(c.names(presets or {}), ", "))
      end
      settings = preset
    end
    if settings ~= nil and type(settings) ~= "table" then
      c.fail("%s wants a table of settings, got %s", name, describe.show(settings))
    end
    local copy = {}
    for k, v in pairs(settings or {}) do copy[k] = v end
    return setmetatable(c.keys(copy, c.names(schema), name), meta)
  end
end

--- describe.schema(d) -> the schema of a description; describe.name(d).
function describe.schema(d) return getmetatable(d).schema end
function describe.name(d) return getmetatable(d).name end

--- describe.build(d, ...) -> what it describes.
function describe.build(d, ...)
  local meta = getmetatable(d)
  return meta.build(describe.fill(d, meta.schema, meta.name), ...)
end

return describe
