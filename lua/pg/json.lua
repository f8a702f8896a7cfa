-- json.lua: JSON text to Lua values and back.  Reading is jansson's, through the walk pg_json_next
-- of runtime/file/json.c; writing is here.
--
-- Lua has no null and one kind of table.  In an object null means absent; in an array, where places
-- count, and alone, it is json.null.  A table with elements is an array, any other an object; an
-- empty array is json.array{}.  Whole numbers beyond 2^53 stay exact as int64_t.
local c = require "pg.c"
local fs = require "pg.fs"
local C, ffi = c.C, c.ffi

local json = { null = setmetatable({}, { __tostring = function() return "null" end }) }
local Array = {}
local DEEPEST = 2048 -- jansson's limit as well

--- json.array(t) -> t, written as an array even where it is empty.
function json.array(t) return setmetatable(t, Array) end

-- ---- reading ----
local kind, size = ffi.new "int[1]", ffi.new "int64_t[1]"
local key, text = ffi.new "const char *[1]", ffi.new "const char *[1]"
local real, integer = ffi.new "double[1]", ffi.new "int64_t[1]"

local function number(i)
  local n = tonumber(i)
  return n < 2^53 and n > -2^53 and n or ffi.new("int64_t", i)
end

-- The next value of the walk, and its key in an object.
local function next_value(walk)
  c.check(C.pg_json_next(walk, kind, key, text, size, real, integer))
  local k, n = kind[0], tonumber(size[0])
  local name = key[0] ~= nil and ffi.string(key[0]) or nil
  if k == C.PG_JSON_STRING then return ffi.string(text[0], n), name end
  if k == C.PG_JSON_INT then return number(integer[0]), name end
  if k == C.PG_JSON_REAL then return real[0], name end
  if k == C.PG_JSON_TRUE then return true, name end
  if k == C.PG_JSON_FALSE then return false, name end
  if k == C.PG_JSON_NULL then return json.null, name end
  local t = {}
  if k == C.PG_JSON_ARRAY then
    for i = 1, n do t[i] = next_value(walk) end
    if n == 0 then json.array(t) end
  else
    for _ = 1, n do
      local value, member = next_value(walk)
      if value ~= json.null then t[member] = value end
    end
  end
  return t, name
end

--- json.decode(text, name) -> value.  name: of the file, for messages, which tell line and column.
-- A key that occurs twice is refused, as are integers beyond 64 bits.
function json.decode(source, name)
  if type(source) ~= "string" then c.fail("json: decode wants a string, got %s", type(source)) end
  local slot = ffi.new "pg_json *[1]"
  local rc = C.pg_json_parse(slot, source, #source)
  if rc < 0 and name then c.fail("%s: %s", name, ffi.string(C.pg_errmsg())) end
  c.check(rc)
  local walk = ffi.gc(slot[0], C.pg_json_free)
  local value = next_value(walk)
  C.pg_json_free(ffi.gc(walk, nil))
  return value
end

--- json.read(path) -> value.
function json.read(path) return json.decode(fs.read(path), path) end

-- ---- writing ----
local escapes = { ['"'] = '\\"', ["\\"] = "\\\\", ["\b"] = "\\b", ["\f"] = "\\f", ["\n"] = "\\n",
                  ["\r"] = "\\r", ["\t"] = "\\t" }
local function escape(char) return escapes[char] or ("\\u%04x"):format(char:byte()) end

-- Well-formed UTF-8 by its first two bytes (Unicode 15, table 3-7): the range of the lead, that of
-- the second byte, and how many follow.
local sequences = {
  { 0xc2, 0xdf, 0x80, 0xbf, 0 }, { 0xe0, 0xe0, 0xa0, 0xbf, 1 }, { 0xe1, 0xec, 0x80, 0xbf, 1 },
  { 0xed, 0xed, 0x80, 0x9f, 1 }, { 0xee, 0xef, 0x80, 0xbf, 1 }, { 0xf0, 0xf0, 0x90, 0xbf, 2 },
  { 0xf1, 0xf3, 0x80, 0xbf, 2 }, { 0xf4, 0xf4, 0x80, 0x8f, 2 },
}

-- Bytes of the sequence that starts at i with a byte above 0x7f; nil where it is none.
local function sequence(s, i)
  local lead, second = s:byte(i, i + 1)
  for _, r in ipairs(sequences) do
    if lead >= r[1] and lead <= r[2] then
      if not second or second < r[3] or second > r[4] then return nil end
      return s:find("^" .. ("[\128-\191]"):rep(r[5]), i + 2) and 2 + r[5] or nil
    end
  end
end

-- s, if it is UTF-8; where it is not: U+FFFD for each stray byte, or nil and the byte's place.
local function utf8(s, replace)
  local from, parts = 1, {}
  local i = s:find "[\128-\255]"
  while i do
    local n = sequence(s, i)
    if not n then
      if not replace then return nil, i end
      parts[#parts + 1] = s:sub(from, i - 1) .. "\239\191\189"
      from, n = i + 1, 1
    end
    i = s:find("[\128-\255]", i + n)
  end
  return #parts > 0 and table.concat(parts) .. s:sub(from) or s
end

local function quoted(s, options, path)
  local clean, at = utf8(s, options.replace)
  if not clean then
    c.fail("json: %s is no UTF-8 at byte %d; replace = true writes U+FFFD there", path, at)
  end
  return '"' .. clean:gsub('[%c"\\]', escape) .. '"'
end

-- Whole numbers without an exponent; others in the fewest digits that read back the same.  A number
-- of 2^53 or more keeps a point or an exponent, so that it is read as a number and not as int64_t.
local function number_text(x, options, path)
  if x ~= x or x == math.huge or x == -math.huge then
    if options.nonfinite == "null" then return "null" end
    c.fail('json: %s is %s, which JSON cannot hold; nonfinite = "null" writes null', path,
           tostring(x))
  end
  if x == math.floor(x) and x < 2^53 and x > -2^53 then
    return x == 0 and 1 / x < 0 and "-0.0" or ("%.0f"):format(x)
  end
  local s
  for digits = options.digits or 15, options.digits or 17 do
    s = ("%." .. digits .. "g"):format(x)
    if tonumber(s) == x then break end
  end
  return s:find "[.e]" and s or s .. ".0"
end

local write

-- n items between brackets; each(i) writes one.
local function write_items(out, brackets, n, each, options, depth)
  local line = options.indent and "\n" .. (" "):rep(options.indent * (depth + 1)) or ""
  out[#out + 1] = brackets:sub(1, 1)
  for i = 1, n do
    out[#out + 1] = (i > 1 and "," or "") .. line
    each(i)
  end
  if n > 0 and options.indent then out[#out + 1] = line:sub(1, -1 - options.indent) end
  out[#out + 1] = brackets:sub(2)
end

local function write_array(out, t, options, path, depth)
  local count = 0
  for _ in pairs(t) do count = count + 1 end
  if count ~= #t then c.fail("json: %s has both list elements and keys, or a gap", path) end
  write_items(out, "[]", #t, function(i)
    write(out, t[i], options, ("%s[%d]"):format(path, i), depth + 1)
  end, options, depth)
end

local function write_object(out, t, options, path, depth)
  local keys = {}
  for k in pairs(t) do
    if type(k) ~= "string" then
      c.fail("json: %s has the key %s; keys are strings", path, tostring(k))
    end
    keys[#keys + 1] = k
  end
  table.sort(keys)
  write_items(out, "{}", #keys, function(i)
    local k = keys[i]
    out[#out + 1] = quoted(k, options, path .. "'s key") .. (options.indent and ": " or ":")
    write(out, t[k], options, path .. "." .. k, depth + 1)
  end, options, depth)
end

function write(out, value, options, path, depth)
  local kind_of = type(value)
  if depth > DEEPEST then c.fail("json: deeper than %d tables: does one hold itself?", DEEPEST) end
  if value == json.null then
    out[#out + 1] = "null"
  elseif kind_of == "table" then
    local as_array = #value > 0 or getmetatable(value) == Array
    return (as_array and write_array or write_object)(out, value, options, path, depth)
  elseif kind_of == "string" then
    out[#out + 1] = quoted(value, options, path)
  elseif kind_of == "number" then
    out[#out + 1] = number_text(value, options, path)
  elseif kind_of == "boolean" then
    out[#out + 1] = tostring(value)
  elseif kind_of == "cdata" and (ffi.istype("int64_t", value) or ffi.istype("uint64_t", value)) then
    out[#out + 1] = tostring(value):match "^-?%d+"
  else
    c.fail("json: %s is a %s, which JSON cannot hold", path, kind_of)
  end
end

--- json.encode(value, options) -> text on one line, keys sorted: equal values, equal text.
-- options: indent = blanks a level (then on many lines); digits = at most so many for numbers that
-- are not whole (default: as many as they need); nonfinite = "null" for NaN and infinities and
-- replace = true for strings that are no UTF-8, both of which raise otherwise.
function json.encode(value, options)
  options = c.keys(options or {}, { "indent", "digits", "nonfinite", "replace" }, "json.encode")
  local out = {}
  write(out, value, options, "value", 0)
  return table.concat(out)
end

--- json.write(path, value, options): a whole file at once, with a last line break.
function json.write(path, value, options) fs.write(path, json.encode(value, options) .. "\n") end

return json
