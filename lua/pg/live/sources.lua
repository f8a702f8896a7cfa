-- live/sources.lua: the texts that a recipe consists of: its script and every module that it requires and that is
-- not pgrun's own.  For a change while it runs: the first rank finds out cheaply that a file is another one, reads
-- all of them, and sends the texts; each rank compiles these very texts into modules of their own, beside the ones
-- that are running, which stay untouched until somebody commits.
local c = require "pg.c"
local agree = require "pg.agree"
local fs = require "pg.fs"
local guard = require "pg.live.guard"
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

-- Modules that lie beside a script are found while f runs.
local function with_folder(file, f)
  local before, place = package.path, file:match "^(.*)/[^/]*$"
  if place then package.path = ("%s/?.lua;%s/?/init.lua;%s"):format(place, place, before) end
  local ok, wrong = pcall(f)
  package.path = before
  return ok, wrong
end

-- A module of pgrun itself or of Lua: every version of a recipe shares it.
local function is_shared(module)
  return module == "pg" or module:find "^pg%." ~= nil or module == "ffi" or module:find "^jit%f[.%z]" ~= nil
    or package.preload[module] ~= nil or (package.loaded[module] ~= nil and _G[module] == package.loaded[module])
end

local function strip(text) return (text:gsub("^#[^\n]*", "")) end

-- ---- loading ----

-- math and os of a version: while it is only tried (version.trying), it draws no numbers of the running recipe's and
-- cannot end the process.
local function libraries(version)
  local apart = guard.libraries().math
  local function either(name)
    return function(...) return (version.trying and apart or math)[name](...) end
  end
  local function exit(...)
    if version.trying then error("os.exit: a recipe that is only tried ends no process", 2) end
    os.exit(...)
  end
  return setmetatable({ random = either "random", randomseed = either "randomseed" }, { __index = math }),
         setmetatable({ exit = exit }, { __index = os })
end

-- Run the script with a require of its own.  get(module) -> { name =, text = } | nil: left to the real one.
-- -> what the script returns, its modules.  Globals it sets stay in an environment of this version.
local function load_all(script, get, version)
  local loaded, loading = {}, {}
  local env = setmetatable({}, { __index = _G })
  env.math, env.os = libraries(version)
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

-- Where require has looked is left out.
local function line_of(message)
  return (tostring(message):gsub("^%s+", ""):match "[^\n]*":gsub("not found:$", "not found"))
end

local function is_user(module)
  return type(module) == "string" and not is_shared(module)
end

-- Modules of people's that have been loaded, in order of the alphabet.
local function loaded_modules()
  local names = {}
  for module in pairs(package.loaded) do if is_user(module) then names[#names + 1] = module end end
  table.sort(names)
  return names
end

-- A list of files, each once.
local function gatherer(list)
  local seen = {}
  return function(name, file, text, module)
    if seen[name] then return seen[name] end
    local f = { name = name, text = text or "", file = file, module = module }
    list[#list + 1], seen[name] = f, f
    if file ~= "" then f.text, f.stamp = sources.read(file) end
    return f
  end
end

-- What is required by the end, in functions, is not seen when the script is run: those that have been loaded so far.
local function take_loaded(take)
  for _, module in ipairs(loaded_modules()) do
    local name, file, text = find(module)
    if name then take(name, file, text, module) end
  end
end

--- sources.collect(path, list) -> a list of { name, text, file, stamp, module = nil for the script }: what the recipe
-- in that file consists of now.  Raises what is wrong with it, with file and line; list (or nil) then has what was
-- read.
function sources.collect(path, list)
  list = list or {}
  local take = gatherer(list)
  local known, file = host.source(path)
  if not known then error(path .. ": no such file", 0) end
  local script = take(path, file, known)
  local function get(module)
    local name, found, text = find(module)
    return name and take(name, found, text, module)
  end
  local ok, wrong = with_folder(file, function()
    load_all(script, get, { trying = true })
    take_loaded(take)
  end)
  if not ok then error(line_of(wrong), 0) end
  return list
end

local running = {} -- hashes of the modules' texts, by name in messages

local function note_running(list)
  running = {}
  for _, f in ipairs(list) do running[f.name] = c.hash(f.text) end
end

--- sources.running(path) -> the same of the recipe that is running, from the files as they are, without running them.
function sources.running(path)
  local list = {}
  local take = gatherer(list)
  local text, file = host.source(path)
  if not text then return list end
  take(path, file, text)
  with_folder(file, function() take_loaded(take) end)
  note_running(list)
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

--- sources.load(list) -> the recipe's table, its modules by name, the version | nil, message.  Only these texts are
-- run.  version.trying (true) is set to false by sources.commit.
function sources.load(list)
  local by_module, version = {}, { trying = true }
  for _, f in ipairs(list) do if f.module then by_module[f.module] = f end end
  local ok, given, modules = pcall(load_all, list[1], function(module) return by_module[module] end, version)
  if not ok then return nil, line_of(given) end
  return given, modules, version
end

--- sources.commit(offer): later calls of require see these.
function sources.commit(offer)
  for name, value in pairs(offer.modules) do package.loaded[name] = value end
  note_running(offer.list)
  offer.version.trying = false
end

-- Texts of modules that differ from those that run, by name.
local function changed(list)
  local out
  for _, f in ipairs(list) do
    if f.module and running[f.name] ~= c.hash(f.text) then
      out = out or {}
      out[f.name] = f.text
    end
  end
  return out
end

-- What rank 0 sends: "+" and the texts, or "-" and the reason; files: what it has read.
local function send(path, protect, files)
  local ok, wrong = protect(sources.collect, path, files)
  return ok and "+" .. sources.pack(files) or "-" .. tostring(wrong)
end

--- sources.offer(path, protect) -> on all ranks { path =, text =, hash =, list = }; without list where rank 0 cannot
-- read it, and the reason.  On rank 0 also files, as sources.collect gives them, and changed, the texts of modules that
-- are not those that run.  All ranks call it.  protect: pcall, or one with limits.
function sources.offer(path, protect)
  local offer, files = { path = path }, {}
  local packed = agree.text(send, path, protect or pcall, files)
  if host.rank == 0 then
    offer.files, offer.changed, offer.text = files, changed(files), files[1] and files[1].text
    offer.hash = sources.hash(sources.pack(files))
  end
  if packed:sub(1, 1) == "-" then return offer, packed:sub(2) end
  offer.list = sources.unpack(packed:sub(2))
  offer.text, offer.hash = offer.list[1].text, sources.hash(packed:sub(2))
  return offer
end

--- sources.compile(offer, protect): on this rank, from these texts: offer.recipe, its modules, version; raises what is
-- wrong.
function sources.compile(offer, protect)
  local ran, given, modules, version = (protect or pcall)(sources.load, offer.list)
  if not ran then given, modules = nil, given end
  if not given then error(modules, 0) end
  offer.recipe, offer.modules, offer.version = given, modules, version
end

-- ---- watching ----

local Watch = {}
Watch.__index = Watch

--- sources.watch(list) -> a watch over the files of what sources.collect returned.
function sources.watch(list) return setmetatable({ files = {}, known = {} }, Watch):add(list) end

--- watch:add(list) -> watch: those of the list that it does not look at yet as well.
function Watch:add(list)
  for _, f in ipairs(list) do
    if f.file and f.file ~= "" and not self.known[f.file] then
      self.known[f.file] = true
      self.files[#self.files + 1] = { file = f.file, stamp = f.stamp, hash = c.hash(f.text), name = f.name }
    end
  end
  return self
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
