-- describe.lua: plain descriptions of things that are built later, so that the command line can reach
-- into them first: llama{ blocks = 4 } is a table with the field blocks, and --model.blocks=8 sets it.
-- A schema names every field: { kind, default, doc }, kind one of "integer", "number", "boolean",
-- "string", "table", "function", "any", or a list of the strings allowed.
local c = require "pg.c"


local describe = {}

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
  if kind == "any" then return true end
  if kind == "integer" then
    return type(value) == "number" and value == math.floor(value), "an integer"
  end
  return type(value) == kind, "a " .. kind
end

--- describe.fits(value, kind) -> whether it is of the kind, and what that is ("an integer").
describe.fits = fits

--- describe.check(value, kind, what): raise where the value is not of the kind.
function describe.check(value, kind, what)
  local good, wants = fits(value, kind)
  if not good then
    c.fail("%s is %s; it must be %s", what,
           type(value) == "string" and ('"%s"'):format(value) or tostring(value), wants)
  end
  return value
end

--- describe.fill(settings, schema, what) -> a copy with defaults; unknown keys and wrong kinds are refused.
function describe.fill(settings, schema, what)
  local names = {}
  for k in pairs(schema) do names[#names + 1] = k end
  table.sort(names)
  c.keys(settings, names, what)
  local out = {}
  for _, k in ipairs(names) do
    local value = settings[k]
    if value == nil then value = schema[k][2] end
    if value ~= nil then out[k] = describe.check(value, schema[k][1], what .. "." .. k) end
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
        local known = {}
        for k in pairs(presets or {}) do known[#known + 1] = k end
        table.sort(known)
        c.fail('%s: "%s" is no known size (%s)', name, settings, table.concat(known, ", "))
      end
      settings = preset
    end
    local copy = {}
    for k, v in pairs(settings or {}) do copy[k] = v end
    local names = {}
    for k in pairs(schema) do names[#names + 1] = k end
    table.sort(names)
    c.keys(copy, names, name)
    return setmetatable(copy, meta)
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
