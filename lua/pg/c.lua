-- c.lua: the one file that requires ffi.  It reads runtime/pg.h, and turns status codes into Lua
-- errors that begin with the user's file and line.  Never reloaded: declarations cannot be undone.
local ffi = require "ffi"

ffi.cdef((require("pg.header"):gsub("\n#[^\n]*", "\n")))
local C = ffi.C

local c = { C = C, ffi = ffi, IGNORE = -100 } -- IGNORE: a target that does not count, where nobody says otherwise

-- Frames of these chunks are ours; a message points at the first frame that is none of them.
local function is_ours(source)
  return source:find("^@lua/pg/") or source:find("/lua/pg/", 1, true) or source == "=[C]"
end

--- c.position() -> "models/tiny.lua:14: ", or "" where no user frame is on the stack.
function c.position()
  for level = 2, 60 do
    local info = debug.getinfo(level, "Sl")
    if not info then return "" end
    if info.what ~= "C" and not is_ours(info.source) and info.currentline > 0 then
      return ("%s:%d: "):format(info.short_src, info.currentline)
    end
  end
  return ""
end

--- c.fail(format, ...): raise a message at the user's line.
function c.fail(format, ...)
  local text = select("#", ...) > 0 and format:format(...) or format
  error(c.position() .. text, 0)
end

--- c.plain(message) -> what c.fail was given, caught under the same frame of the user's.
function c.plain(message)
  local at = c.position()
  return message:sub(1, #at) == at and message:sub(#at + 1) or message
end

--- c.check(rc) -> rc.  Raises what pg_errmsg() says where rc is negative; c.code keeps the code.
function c.check(rc)
  if rc < 0 then
    c.code = rc
    if rc == C.PG_EINTR then error("interrupted", 0) end
    error(c.position() .. ffi.string(C.pg_errmsg()), 0)
  end
  return rc
end

--- c.collect(): a full collection of both heaps; finalizers give their blocks back.
function c.collect()
  collectgarbage()
  collectgarbage()
  C.pg_mem_collected()
end

--- c.int(x, what) -> x.  Refuses anything that is not an exact integer.
function c.int(x, what)
  if type(x) ~= "number" then
    c.fail("%s is %s, not an integer", what, type(x) == "string" and ('"%s"'):format(x) or type(x))
  end
  if x ~= math.floor(x) then c.fail("%s is %.17g, not an integer", what, x) end
  if x > 2^53 or x < -2^53 then
    c.fail("%s is %.0f: a Lua number is exact only up to 2^53; write it as a string or as 123LL", what, x)
  end
  return x
end

--- c.within(x, what, low, high) -> x.  An exact integer in [low, high]; high may be left out.
function c.within(x, what, low, high)
  c.int(x, what)
  if x < low then c.fail("%s is %.0f; it must be at least %.0f", what, x, low) end
  if high and x > high then c.fail("%s is %.0f; it must be at most %.0f", what, x, high) end
  return x
end

-- Decimal digits -> int64; nil where it is none or does not fit.
local function parse_int64(text)
  local sign, digits = text:match "^%s*([-+]?)(%d+)%s*$"
  if not digits or #(digits:gsub("^0+", "")) > 19 then return nil end
  local value = 0ULL
  for d in digits:gmatch "%d" do value = value * 10 + tonumber(d) end
  local limit = sign == "-" and 0x8000000000000000ULL or 0x7fffffffffffffffULL
  if value > limit then return nil end
  return ffi.cast("int64_t", sign == "-" and -value or value)
end

--- c.int64(x, what) -> int64_t.  x: an exact number, a 64-bit literal, or a string of digits.
function c.int64(x, what)
  if type(x) == "cdata" and (ffi.istype("int64_t", x) or ffi.istype("uint64_t", x)) then
    return ffi.cast("int64_t", x)
  end
  if type(x) == "string" then
    return parse_int64(x) or c.fail('%s is "%s", not a 64-bit integer', what, x)
  end
  if type(x) == "number" and x == math.floor(x) and (x >= 2^53 or x <= -2^53) then
    c.fail("%s is %.0f: a Lua number is exact only below 2^53; write it as a string or as 123LL", what, x)
  end
  return ffi.cast("int64_t", c.int(x, what))
end

--- c.hash(text, seed) -> uint64_t.  The key of a named stream of random numbers.
function c.hash(text, seed)
  if type(text) ~= "string" then c.fail("a key of random numbers is a text, got %s", type(text)) end
  return C.pg_hash(text, #text, seed or 0)
end

-- Edit distance, for "did you mean".
local function distance(a, b)
  local row = {}
  for j = 0, #b do row[j] = j end
  for i = 1, #a do
    local diagonal = row[0]
    row[0] = i
    for j = 1, #b do
      local cost = a:byte(i) == b:byte(j) and diagonal or diagonal + 1
      diagonal = row[j]
      row[j] = math.min(cost, row[j] + 1, row[j - 1] + 1)
    end
  end
  return row[#b]
end

--- c.nearest(word, words) -> the nearest of a list, or nil where none is near.
function c.nearest(word, words)
  local best, least = nil, math.max(2, math.floor(#word / 2)) + 1
  for _, w in ipairs(words) do
    local d = distance(word, w)
    if d < least then best, least = w, d end
  end
  return best
end

--- c.device() -> "cpu" or "cuda": where new tensors live.
function c.device() return ffi.string(C.pg_device()) end

--- c.shapes_only() -> true while tensors are made with shapes and no numbers.
function c.shapes_only()
  local on = C.pg_shape_only(0) -- it tells by being set
  C.pg_shape_only(on)
  return on ~= 0
end

--- c.names(t) -> its keys, which are strings, in order of the alphabet.
function c.names(t)
  local names = {}
  for name in pairs(t) do names[#names + 1] = name end
  table.sort(names)
  return names
end

--- c.product(list, first, last) -> of its numbers from first (1) to last (all): the elements of a shape.
function c.product(list, first, last)
  local n = 1
  for i = first or 1, last or #list do n = n * list[i] end
  return n
end

--- c.keys(t, known, what): refuse a key of t that is not in the list `known`.
function c.keys(t, known, what)
  if type(t) ~= "table" then c.fail("%s wants a table of settings, got %s", what, type(t)) end
  local set = {}
  for _, k in ipairs(known) do set[k] = true end
  for k in pairs(t) do
    if not set[k] then
      local near = type(k) == "string" and c.nearest(k, known)
      c.fail("%s: unknown key %s%s (known: %s)", what, tostring(k),
             near and (", did you mean " .. near .. "?") or "", table.concat(known, ", "))
    end
  end
  return t
end

return c
