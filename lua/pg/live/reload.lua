-- live/reload.lua: pg.reload "module": new code for a module of the user's, in a program that goes on.
-- The module's tables stay the tables they are and take the new fields; whoever holds one of its functions, in a
-- table, an upvalue or a local of a running function, gets the new one in its place.  What is kept: a field named
-- `state`, of the module or of a table in it.  Everything else is as the new file makes it; its locals start afresh.
-- A function that is running ends with its old code.  See help page live.
local c = require "pg.c"
local host = require "pg.host"

jit.off(true, true)

local reload = {}
local SELF = debug.getinfo(1, "S").source
local KEPT = "state"

-- ---- the new version ----

local function find(name)
  if name:find "^models%." then
    local text, where = host.module(name)
    if text then return text, where end
  end
  local file, tried = package.searchpath(name, package.path)
  if not file then c.fail("reload: there is no file for module %s any more:%s", name, tried) end
  local handle = assert(io.open(file, "rb"))
  local text = handle:read "*a"
  handle:close()
  return text, file
end

-- What the file of a module returns now.
local function load_new(name)
  local text, where = find(name)
  local chunk, wrong = loadstring(text:gsub("^#[^\n]*", ""), "@" .. where)
  if not chunk then error(wrong, 0) end
  local value = chunk(name)
  if value == nil then value = true end
  return value
end

-- ---- old for new ----

local function is_class(t) return rawget(t, "__index") == t end

-- Tables that are only places for fields: objects with a metatable are exchanged whole.
local function is_place(t) return type(t) == "table" and (getmetatable(t) == nil or is_class(t)) end

-- map: old function -> new function, new table -> old table.  Fields of the new table go into the old one, but not
-- those of a table that is `state`.
local match
local states

local function match_tables(map, old, new)
  if map[new] then return end
  map[new] = old
  for key, value in pairs(new) do
    local before = rawget(old, key)
    if key == KEPT and type(before) == "table" and type(value) == "table" then map[value], states[value] = before, true
    else match(map, before, value) end
  end
  local before, after = getmetatable(old), getmetatable(new)
  if before ~= after and type(before) == "table" and type(after) == "table" then match_tables(map, before, after) end
end

-- Local functions that the two versions of a function use under the same name.
local function match_upvalues(map, old, new)
  local names = {}
  for i = 1, 255 do
    local name, value = debug.getupvalue(old, i)
    if not name then break end
    names[name] = value
  end
  for i = 1, 255 do
    local name, value = debug.getupvalue(new, i)
    if not name then break end
    if type(value) == "function" or is_place(value) then match(map, names[name], value) end
  end
end

function match(map, old, new)
  if old == new or type(old) ~= type(new) then return end
  if type(new) == "function" then
    if map[old] then return end
    local from, to = debug.getinfo(old, "S"), debug.getinfo(new, "S")
    if from.what == "C" or from.source ~= to.source then return end -- not this module's
    map[old] = new
    match_upvalues(map, old, new)
  elseif is_place(old) and is_place(new) then
    match_tables(map, old, new)
  end
end

local function fill(map)
  local pairs_of_tables = {}
  for new, old in pairs(map) do
    if type(new) == "table" and not states[new] then pairs_of_tables[new] = old end
  end
  for new, old in pairs(pairs_of_tables) do
    for key in pairs(old) do
      if rawget(new, key) == nil and key ~= KEPT then rawset(old, key, nil) end
    end
    for key, value in pairs(new) do
      local before, place = rawget(old, key), pairs_of_tables[value]
      local stays = before ~= nil and (key == KEPT or place == before)
      if not stays then rawset(old, key, value) end
    end
    if getmetatable(old) == nil then setmetatable(old, getmetatable(new)) end
  end
end

-- ---- everything that can be reached ----

local Walk = {}
Walk.__index = Walk

-- The new one for a value that is to go, or nil.
function Walk:new_for(value)
  local kind = type(value)
  if kind == "function" or kind == "table" then return self.map[value] end
end

function Walk:push(value)
  local kind = type(value)
  if kind ~= "table" and kind ~= "function" and kind ~= "thread" and kind ~= "userdata" then return end
  if self.seen[value] then return end
  self.seen[value] = true
  self.count = self.count + 1
  self.stack[self.count] = value
end

-- A list to which the new file has added a function that it held already (a hook): once is meant.
local function drop_twice(t, value)
  local first
  for i = 1, #t do
    if rawget(t, i) == value then
      if first then return table.remove(t, i) end
      first = i
    end
  end
end

function Walk:table(t)
  local keys
  for key, value in next, t do
    local instead = self:new_for(value)
    if instead then
      rawset(t, key, instead)
      value = instead
      if type(key) == "number" and type(instead) == "function" then
        self.lists[t] = self.lists[t] or {}
        self.lists[t][instead] = true
      end
    end
    if self:new_for(key) then
      keys = keys or {}
      keys[#keys + 1] = key
    end
    self:push(key)
    self:push(value)
  end
  for _, key in ipairs(keys or {}) do
    local value = rawget(t, key)
    rawset(t, key, nil)
    rawset(t, self:new_for(key), value)
  end
  local meta = debug.getmetatable(t)
  if self:new_for(meta) then debug.setmetatable(t, self:new_for(meta)) end
  self:push(debug.getmetatable(t))
end

Walk["function"] = function(self, f)
  for i = 1, 255 do
    local name, value = debug.getupvalue(f, i)
    if not name then break end
    local instead = self:new_for(value)
    if instead then debug.setupvalue(f, i, instead) end
    self:push(instead or value)
  end
  self:push(debug.getfenv(f))
end

function Walk:userdata(u)
  self:push(debug.getmetatable(u))
  self:push(debug.getfenv(u))
end

-- The locals of one running function of a thread.
function Walk:frame(thread, level)
  local info = debug.getinfo(thread, level, "Sf")
  if not info then return false end
  self:push(info.func)
  if info.what == "C" or info.source == SELF then return true end
  for i = 1, 250 do
    local name, value = debug.getlocal(thread, level, i)
    if not name then break end
    local instead = name:sub(1, 2) ~= "(*" and self:new_for(value) -- a temporary belongs to the call under way
    if instead then debug.setlocal(thread, level, i, instead) end
    self:push(instead or value)
  end
  return true
end

function Walk:thread(thread)
  local level = 0
  while self:frame(thread, level) do level = level + 1 end
end

local function replace_all(map)
  local walk = setmetatable({ map = map, seen = {}, stack = {}, count = 0, lists = {} }, Walk)
  for _, own in ipairs { map, walk, walk.seen, walk.stack, walk.lists } do walk.seen[own] = true end
  for _, root in ipairs { debug.getregistry(), package.loaded, _G, debug.getmetatable "" } do walk:push(root) end
  walk:push(coroutine.running() or nil) -- the main thread is in the registry
  while walk.count > 0 do
    local value = walk.stack[walk.count]
    walk.stack[walk.count] = nil
    walk.count = walk.count - 1
    walk[type(value)](walk, value)
  end
  for list, twice in pairs(walk.lists) do
    for value in pairs(twice) do drop_twice(list, value) end
  end
end

--- pg.reload "module" -> the module.  Its file is read again; a mistake in it is raised and changes nothing.
function reload.module(name)
  if type(name) ~= "string" then c.fail("reload: the name of a module is wanted, got %s", type(name)) end
  local old = package.loaded[name]
  if name == "pg" or name:find "^pg%." or package.preload[name] or (old ~= nil and _G[name] == old) then
    c.fail("reload: %s is pgrun's own; modules of yours can be loaded again", name)
  end
  if old == nil then c.fail("reload: no module %s has been loaded; require it", name) end
  local new, map = load_new(name), {}
  states = {}
  match(map, old, new)
  fill(map)
  local result = type(new) == "table" and map[new] or new
  package.loaded[name] = result
  replace_all(map)
  local graph = package.loaded["pg.graph"]
  if graph then graph.forget() end -- and so have recordings
  jit.flush() -- compiled code has its functions written in
  return result
end

return reload
