-- live/sources.lua: the texts that a recipe consists of: its script and every module that it requires and that is
-- not pgrun's own.  For a change while it runs: the first rank finds out cheaply that a file is another one, reads
-- all of them, and sends the texts; each rank compiles these very texts into modules of their own, beside the ones
-- that are running, which stay untouched until somebody commits.
local c = require "pg.c"
local agree = require "pg.agree"
local fs = require "pg.fs"
local host = require "pg.host"

local sources = {}
local SETTLE = 0.2 -- seconds that a changed file must have stood still before it is read
local TRIES = 5    -- readings of a file that changes meanwhile

-- ---- reading ----

-- Size and time of a file as one text; "" where there is none.
local function stamp(file)
  local ok, size = pcall(fs.size, file)
  if not ok then return "" end
  local timed, time = pcall(fs.mtime, file)
  return timed and ("%.0f %.9f"):format(size, time) or ""
end

--- sources.read(file) -> text, stamp: read twice and found equal; raises where the file is gone or never still.
-- again (for tests): called between two readings.
function sources.read(file, again)
  local text, before = nil, stamp(file)
  for _ = 1, TRIES do
    local first = fs.read(file)
    if again then again() end
    local second, after = fs.read(file), stamp(file)
    if first == second and before == after then return second, after end
    before, text = after, second
    host.nap(0.01)
  end
  error(("%s changes while it is read (%d bytes last); it is looked at again when it stands still")
        :format(file, #(text or "")), 0)
end

-- Where require finds a module that may be the recipe's -> name in messages, file ("" inside pgrun), text or nil.
local function find(module)
  if module:find "^models%." then
    local text, name, file = host.module(module)
    return name, file, text
  end
  local file = package.searchpath(module, package.path)
  return file, file
end

-- A module of pgrun itself or of Lua: every version of a recipe shares it.
local function is_shared(module)
  return module == "pg" or module:find "^pg%." ~= nil or module == "ffi" or module:find "^jit%f[.%z]" ~= nil
    or package.preload[module] ~= nil or (package.loaded[module] ~= nil and _G[module] == package.loaded[module])
end

local function strip(text) return (text:gsub("^#[^\n]*", "")) end

-- ---- loading ----

-- Run the script with a require of its own.  get(module) -> { name =, text = } | nil: left to the real one.
-- -> what the script returns, its modules.  Globals it sets stay in an environment of this version.
local function load_all(script, get)
  local loaded, loading = {}, {}
  local env = setmetatable({}, { __index = _G })
  local function run(file, ...)
    local chunk, wrong = loadstring(strip(file.text), "@" .. file.name)
    if not chunk then error(wrong, 0) end
    return setfenv(chunk, env)(...)
  end
  function env.require(module)
    if loaded[module] ~= nil then return loaded[module] end
    local file = not is_shared(module) and get(module)
    if not file then return require(module) end
    if loading[module] then error(("%s: requires itself, over others"):format(file.name), 2) end
    loading[module] = true
    local value = run(file, module)
    loading[module] = nil
    loaded[module] = value == nil or value
    return loaded[module]
  end
  env._G = env
  local given = run(script)
  if type(given) ~= "table" then
    error(("%s: it returns %s; a recipe is a table"):format(script.name, given == nil and "nothing" or type(given)), 0)
  end
  return given, loaded
end

local function lines_of(message)
  if type(message) ~= "string" then return tostring(message) end
  return (message:gsub("^%s+", ""))
end

-- Modules that lie beside a script are found while it is looked through.
local function with_folder(file, f)
  local before, place = package.path, file:match "^(.*)/[^/]*$"
  if place then package.path = ("%s/?.lua;%s/?/init.lua;%s"):format(place, place, before) end
  local ok, wrong = pcall(f)
  package.path = before
  return ok, wrong
end

--- sources.collect(path) -> a list of { name, text, file, stamp, module = nil for the script }: what the recipe in
-- that file consists of now.  Raises what is wrong with it, with file and line.
function sources.collect(path)
  local list = {}
  local function take(name, file, text, module)
    local mark
    if file ~= "" then text, mark = sources.read(file) end
    list[#list + 1] = { name = name, text = text, file = file, stamp = mark, module = module }
    return list[#list]
  end
  local known, file = host.source(path)
  if not known then error(path .. ": no such file", 0) end
  local script = take(path, file, known)
  local function get(module)
    local name, found, text = find(module)
    return name and take(name, found, text, module)
  end
  local ok, wrong = with_folder(file, function() load_all(script, get) end)
  if not ok then error(lines_of(wrong), 0) end
  return list
end

-- ---- sending ----

--- sources.pack(list) -> one text;  sources.unpack(text) -> the list (name, module, text).
function sources.pack(list)
  local parts = {}
  for _, f in ipairs(list) do
    local module = f.module or ""
    parts[#parts + 1] = ("%d %d %d\n%s%s%s"):format(#f.name, #module, #f.text, f.name, module, f.text)
  end
  return table.concat(parts)
end

function sources.unpack(packed)
  local list, at = {}, 1
  while at <= #packed do
    local first, last, name, module, text = packed:find("^(%d+) (%d+) (%d+)\n", at)
    if not first then error("a packed recipe is damaged", 0) end
    local f, from = {}, last + 1
    for key, n in pairs { name = { 0, name }, module = { name, module }, text = { name + module, text } } do
      f[key] = packed:sub(from + n[1], from + n[1] + n[2] - 1)
    end
    if f.module == "" then f.module = nil end
    list[#list + 1] = f
    at = from + name + module + text
  end
  return list
end

--- sources.hash(packed) -> 16 hexadecimal digits.
function sources.hash(packed) return bit.tohex(c.hash(packed)) end

--- sources.load(list) -> the recipe's table, its modules by name | nil, message.  Only these texts are run.
function sources.load(list)
  local by_module = {}
  for _, f in ipairs(list) do if f.module then by_module[f.module] = f end end
  local ok, given, modules = pcall(load_all, list[1], function(module) return by_module[module] end)
  if not ok then return nil, lines_of(given) end
  return given, modules
end

--- sources.commit(modules): later calls of require see these.
function sources.commit(modules)
  for name, value in pairs(modules) do package.loaded[name] = value end
end

--- sources.offer(path, protect) -> on all ranks { recipe =, modules =, list =, hash =, text = } | nil, message, rank:
-- the first rank whose copy could not be made.  All ranks call it; the same text runs on all.  protect: pcall, or one
-- with a time limit.
function sources.offer(path, protect)
  protect = protect or pcall
  local packed = agree.text(function()
    local ok, list = protect(sources.collect, path)
    return ok and "+" .. sources.pack(list) or "-" .. tostring(list)
  end)
  if packed:sub(1, 1) == "-" then return nil, packed:sub(2), 0 end
  local list = sources.unpack(packed:sub(2))
  local ran, given, modules = protect(sources.load, list)
  if not ran then given, modules = nil, given end
  local wrong = agree.first(not given and ("%d %s"):format(host.rank, modules) or nil)
  if wrong then
    local rank, message = wrong:match "^(%d+) (.*)$"
    return nil, message, tonumber(rank)
  end
  return { recipe = given, modules = modules, list = list, hash = sources.hash(packed:sub(2)), text = list[1].text }
end

-- ---- watching ----

local Watch = {}
Watch.__index = Watch

--- sources.watch(list) -> a watch over the files of what sources.collect returned.
function sources.watch(list)
  local w = setmetatable({ files = {} }, Watch)
  for _, f in ipairs(list) do
    if f.file and f.file ~= "" then
      w.files[#w.files + 1] = { file = f.file, stamp = f.stamp, hash = c.hash(f.text), name = f.name }
    end
  end
  return w
end

-- Whether the content differs, now that the file has stood still; a save without a change does not count.
local function differs(f, now)
  local ok, text = pcall(sources.read, f.file)
  if not ok then return false end
  f.stamp, f.seen = now, nil
  local hash = c.hash(text)
  local same = hash == f.hash
  f.hash = hash
  return not same
end

--- watch:changed(time) -> the name of a file whose content is another one now, or nil.  One stat a file; a change is
-- told once, when the file has stood still for a moment.  A file that is gone is waited for: editors rename.
function Watch:changed(time)
  time = time or c.C.pg_time()
  for _, f in ipairs(self.files) do
    local now = stamp(f.file)
    if now == f.stamp then f.seen = nil
    elseif now ~= f.seen then f.seen, f.since = now, time
    elseif now ~= "" and time - f.since >= SETTLE and differs(f, now) then return f.name end
  end
end

return sources
