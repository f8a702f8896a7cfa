--- The prompt: what a line means, how values print, what a Tab offers, and help().
-- Neighbours: runtime/host/repl.c reads the lines and runs them.  A line is an expression if it
-- compiles with "return " before it; a chunk that stops at <eof> wants more lines.

jit.off(true, true)                     -- this file switches the compiler; it must not be compiled itself

local host = require "pg.host"

local repl = {}

-- How much of a table is shown.
local SHOWN = 32                        -- entries
local WIDTH = 100                       -- columns before a table is broken into lines

---- values ----

local function is_name(s)
  return type(s) == "string" and s:match("^[%a_][%w_]*$") ~= nil
end

local function has_tostring(v)
  local meta = debug.getmetatable(v)
  return type(meta) == "table" and rawget(meta, "__tostring") ~= nil
end

-- A value inside a table: one short line.
local function brief(v)
  if type(v) == "string" then
    local text = string.format("%q", #v > 60 and v:sub(1, 57) .. "..." or v)
    return (text:gsub("\\\n", "\\n"))
  elseif type(v) == "table" and not has_tostring(v) then
    return next(v) == nil and "{}" or "{...}"
  end
  local text = tostring(v)
  local first = text:match("^[^\n]*")
  return #first < #text and first .. " ..." or first
end

-- Keys after the array part, in an order that does not change: numbers, then the rest by name.
local function other_keys(t, count)
  local keys = {}
  for k in next, t do
    local listed = type(k) == "number" and k >= 1 and k <= count and k % 1 == 0
    if not listed then keys[#keys + 1] = k end
  end
  table.sort(keys, function(a, b)
    local na, nb = type(a) == "number", type(b) == "number"
    if na and nb then return a < b end
    if na ~= nb then return na end
    return tostring(a) < tostring(b)
  end)
  return keys
end

local function show_table(t)
  local parts, count = {}, #t
  for i = 1, math.min(count, SHOWN) do parts[i] = brief(rawget(t, i)) end
  local left = count - #parts
  for _, k in ipairs(other_keys(t, count)) do
    if #parts < SHOWN then
      local key = is_name(k) and k or "[" .. brief(k) .. "]"
      parts[#parts + 1] = key .. " = " .. brief(rawget(t, k))
    else
      left = left + 1
    end
  end
  if left > 0 then parts[#parts + 1] = string.format("... %d more", left) end
  local line = "{" .. table.concat(parts, ", ") .. "}"
  if #line <= WIDTH then return line end
  return "{\n  " .. table.concat(parts, ",\n  ") .. "\n}"
end

--- show(value) -> text.  A table without __tostring is shown one level deep.
function repl.show(v)
  if type(v) == "table" and not has_tostring(v) then return show_table(v) end
  return tostring(v)
end

---- completion ----

-- Call see(key) for each string key of v and of the tables its metatable leads to.
local function each_key(v, see)
  for _ = 1, 16 do                      -- a chain of __index may be a ring
    if type(v) == "table" then
      for k in next, v do if is_name(k) then see(k) end end
    end
    local meta = debug.getmetatable(v)
    local index = type(meta) == "table" and rawget(meta, "__index")
    if type(index) ~= "table" then return end
    v = index
  end
end

--- complete("pg.te") -> { "pg.tensor", ... }, sorted.  Names, fields after '.', methods after ':'.
function repl.complete(text)
  local owner, sep, start = text:match("^(.-)([.:]?)([%w_]*)$")
  local value = _G
  if sep ~= "" then
    for name in owner:gmatch("[^.:]+") do
      local found, field = pcall(function() return value[name] end)
      if not found or field == nil then return {} end
      value = field
    end
  elseif owner ~= "" then
    return {}
  end
  local seen, matches = {}, {}
  local function see(key)
    if seen[key] or key:sub(1, #start) ~= start then return end
    if key:sub(1, 1) == "_" and start:sub(1, 1) ~= "_" then return end
    seen[key] = true
    matches[#matches + 1] = owner .. sep .. key
  end
  each_key(value, see)
  if value == _G then
    see "pg"                            -- there, but loaded at the first use
  elseif sep == ":" then                -- only what can be called
    for i = #matches, 1, -1 do
      local _, field = pcall(function() return value[matches[i]:sub(#owner + 2)] end)
      if type(field) ~= "function" then table.remove(matches, i) end
    end
  end
  table.sort(matches)
  return matches
end

---- help ----

-- The "---" comment that stands above line `defined` of a source, or nil.
local function comment_above(text, defined)
  local lines, n = {}, 0
  for line in (text .. "\n"):gmatch("(.-)\n") do
    n = n + 1
    if n >= defined then break end
    lines[n] = line
  end
  local first = defined
  while first > 1 and lines[first - 1]:match("^%s*%-%-") do first = first - 1 end
  while first < defined and not lines[first]:match("^%s*%-%-%-") do first = first + 1 end
  if first == defined then return nil end
  for i = first, defined - 1 do lines[i] = lines[i]:gsub("^%s*%-%-%-? ?", "") end
  return table.concat(lines, "\n", first, defined - 1)
end

-- What stands above a line of a source; info as debug.getinfo gives it.
local function describe_place(info, line)
  local at = string.format("%s:%d", info.short_src, line)
  local name = info.source:match("^@(.*)")
  local text = name and host.source(name)
  local comment = text and comment_above(text, line)
  return comment and comment .. "\n(" .. at .. ")" or "defined at " .. at .. ", without a comment"
end

local function describe_function(f)
  local info = debug.getinfo(f, "S")
  if info.what == "C" then return "a function of Lua itself or written in C" end
  return describe_place(info, info.linedefined)
end

-- "pg.matmul" -> the value, or nil.
local function resolve(path)
  local value = _G
  for name in path:gmatch("[^.:]+") do
    local found, field = pcall(function() return value[name] end)
    if not found or field == nil then return nil end
    value = field
  end
  return value
end

--- topics() -> "data, recipe, ...": the pages there are.
function repl.topics()
  local names = {}
  for _, path in ipairs(host.list "lua/pg/help/") do
    names[#names + 1] = path:match("([^/]+)%.md$")
  end
  table.sort(names)
  return #names > 0 and table.concat(names, ", ") or "none yet"
end

local function describe_methods(t)
  local names = {}
  each_key(t, function(key)
    if key:sub(1, 1) ~= "_" then names[#names + 1] = key end
  end)
  table.sort(names)
  return "a table with " .. (#names > 0 and table.concat(names, ", ") or "no names in it")
end

--- describe(x) -> text, known.  x: nothing, a topic ("recipe"), a name ("pg.matmul"), or a function.
function repl.describe(x)
  if x == nil then
    return "help \"TOPIC\" shows a page, help(f) tells of a function.  Topics: " .. repl.topics(), true
  elseif type(x) == "function" then
    return describe_function(x), true
  elseif type(x) == "table" then
    local place, meta = rawget(x, "defined_at"), getmetatable(x)
    if place then return describe_place(place, place.currentline), true end -- a class of modules
    if meta and type(meta.__call) == "function" then return describe_function(meta.__call), true end
    return describe_methods(x), true
  elseif type(x) ~= "string" then
    return "a " .. type(x) .. ": " .. tostring(x), true
  end
  local page = x:match "^[%w_-]+$" and host.source("lua/pg/help/" .. x .. ".md")
  if page then return (page:gsub("\n+$", "")), true end
  local value = resolve(x)
  if type(value) == "string" then return "the text " .. brief(value), true end
  if value ~= nil then return repl.describe(value) end
  return string.format("no topic or name %q.  Topics: %s", x, repl.topics()), false
end

---- lines ----

local function same(...) return ... end

--- repl.compile(text) -> function | nil, message, wants_more.  env: its globals.
local function compile(text, env)
  local expression = text:gsub("^%s*=", "", 1)
  -- as an argument, not "return EXPRESSION": a tail call would leave no line for the traceback
  local close = expression:find("--", 1, true) and "\n)" or ")"
  local chunk = loadstring("local same = ... return same(" .. expression .. close, "=prompt")
  if chunk then
    setfenv(chunk, env or _G)
    return function() return chunk(same) end
  end
  local message
  chunk, message = loadstring(expression == text and text or "return " .. expression, "=prompt")
  if chunk then return setfenv(chunk, env or _G) end
  return nil, message, message:sub(-7) == "'<eof>'"
end
repl.compile = compile

--- repl.where("@0,3 x") -> "0,3", "x"; nil, the line, where it does not begin so.
function repl.where(text)
  local where, rest = text:match "^%s*@(%S+)%s+(.*)$"
  if where then return where, rest end
  return nil, text
end

--- repl.read(native) -> chunk, text: lines that together make sense | nil, message | nil at the end | false if given
-- up.  A line may begin with the ranks that it is for.
function repl.read(native)
  local text = native.read("> ")
  if not text then return text end
  while true do
    local _, code = repl.where(text)
    local chunk, message, more = compile(code)
    if chunk then return chunk, text end
    if not more then return nil, message end
    local line = native.read(">> ")
    if line == false then return false end
    if line == nil then return nil, message end
    text = text .. "\n" .. line
  end
end

--- repl.results(...) -> the values of an expression as one text; nil where there are none.
function repl.results(...)
  local parts = {}
  for i = 1, select("#", ...) do parts[i] = repl.show((select(i, ...))) end
  return parts[1] and table.concat(parts, "\t")
end
local function print_results(...) io.write(repl.results(...), "\n") end

-- True if the line did its work.
local function finish(ok, ...)
  local count = select("#", ...)
  if not ok then
    io.stdout:flush()
    io.stderr:write(tostring((...)), "\n")
    return false
  end
  if count > 0 then
    -- a __tostring may fail, too
    local printed, message = pcall(print_results, ...)
    if not printed then io.stderr:write(tostring(message), "\n") end
  end
  io.stdout:flush()
  return true
end

-- Compiled code cannot be interrupted, so lines are interpreted.
local function run_interpreted(native, chunk)
  local was_on = jit.status()
  jit.flush()
  jit.off()
  local well = finish(native.guard(chunk))
  if was_on then jit.on() end
  return well
end

--- run(native) -> true if every line did its work.  native: what runtime/host/repl.c offers.
function repl.run(native)
  local all_well = true
  _G.help = _G.help or function(x) print((repl.describe(x))) end
  while true do
    local chunk, message = repl.read(native)
    if chunk then
      all_well = run_interpreted(native, chunk) and all_well
    elseif message then
      io.stderr:write(message, "\n")
      all_well = false
    elseif chunk == nil then
      return all_well
    end
    if native.ended() then return false end
  end
end

return repl
