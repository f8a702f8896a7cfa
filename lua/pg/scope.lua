-- scope.lua: how long tensors live.  A scope is a stretch of time; tensors born in it die with it,
-- unless they are returned, saved by a record of the tape, or kept.
--
-- Every tensor counts its owners (t.owners): the scope it was born in is one, each record that saved
-- it, each gradient slot or collective in flight another.  At zero its numbers are given back at
-- once.  Without an open scope the Lua collector is the only owner.  Four kinds of scope:
--   step    pg.scope(f): protected; also drops the records made in it
--   light   a module's call: only its temporaries
--   held    entered several times: a micro-batch between its forward and its backward
--   loose   a turn of `for ... in data:steps()`: weak, so that a `break` leaves nothing behind.  Its
--           lists have holes where the collector has been; new entries fill them, so they stay short
local c = require "pg.c"
local scope = {}

-- A line of the prompt may be stopped at any instruction, so what is below `depth` is always whole.
local stack = {}        -- open scopes, innermost last
local depth = 0
local weak = { __mode = "v" }
local none = {}

--- scope.open(kind) -> token for scope.close.
function scope.open(kind)
  local loose = kind == "loose"
  local function list() return loose and setmetatable({}, weak) or {} end
  stack[depth + 1] = { loose = loose, tensors = list(), count = 0, records = kind ~= "light" and list() or nil }
  depth = depth + 1
  return depth
end

--- scope.adopt(t): a tensor is born (or handed over by an inner scope); the scope is one of its owners.
function scope.adopt(t)
  local top = stack[depth]
  if not top then return end
  local n = (top.loose and #top.tensors or top.count) + 1
  top.count = n
  top.tensors[n] = t
  t.scope = top
end

--- scope.keep_record(r): a record belongs to the nearest scope that is not a module's.
function scope.keep_record(r)
  for i = depth, 1, -1 do
    local records = stack[i].records
    if records then
      records[#records + 1] = r
      return
    end
  end
end

local function close_top(survivors)
  local top = stack[depth]
  depth = depth - 1
  stack[depth + 1] = nil
  for _, t in (top.loose and pairs or ipairs)(top.tensors) do
    if t.scope == top then
      t.scope = nil
      if survivors and survivors[t] then scope.adopt(t) else t:release() end
    end
  end
  for _, r in pairs(top.records or none) do r:drop() end
end

-- Tensors among the values that a scope returns; tables are searched three deep.
local function collect(values, n, found, level)
  for _, v in (n and ipairs or pairs)(values) do
    if type(v) == "table" then
      if v.is_tensor then found[v] = true
      elseif level < 3 and not v.is_module then collect(v, nil, found, level + 1) end
    end
  end
end

--- scope.close(token, ...): end it and all inside it; the tensors among ... go to the scope around.
function scope.close(token, ...)
  local survivors
  if select("#", ...) > 0 then
    survivors = {}
    local first = ...
    if type(first) == "table" and first.is_tensor then survivors[first] = true end
    if select("#", ...) > 1 or not survivors[first] then
      for i = 1, select("#", ...) do
        local v = select(i, ...)
        if type(v) == "table" then
          if v.is_tensor then survivors[v] = true
          elseif not v.is_module then collect(v, nil, survivors, 1) end
        end
      end
    end
  end
  while depth >= token do close_top(survivors) end
end

local function finish(token, ok, ...)
  if not ok then
    scope.close(token)
    error((...), 0)
  end
  scope.close(token, ...)
  return ...
end

-- A message is complete by itself; PG_TRACEBACK=1 adds the way that led there.
local tracing = os.getenv "PG_TRACEBACK" == "1"
local function traced(message)
  if not tracing or type(message) ~= "string" or message:find("\nstack traceback:", 1, true) then
    return message
  end
  return message .. "\n" .. debug.traceback("", 2):sub(2)
end

--- scope.run(f, ...) -> what f returns.  Tensors born in f die unless returned or kept.
function scope.run(f, ...)
  if f == nil then c.fail("scope: a function is wanted, got nil") end
  return finish(scope.open "step", xpcall(f, traced, ...))
end

--- scope.light(f, ...): the same around a module's call; records outlive it.
function scope.light(f, ...) return finish(scope.open "light", xpcall(f, traced, ...)) end

local Held = {}
Held.__index = Held

--- scope.hold() -> a scope that outlives a call: h:run(f, ...) runs f in it and leaves it as it is, with the
-- tensors and records made there; h:close() ends it.  Whoever makes one must close it, after an error too.
function scope.hold() return setmetatable({ tensors = {}, count = 0, records = {} }, Held) end

local function leave(token, ok, ...)
  while depth > token do close_top() end
  depth = depth - 1
  stack[depth + 1] = nil
  if not ok then error((...), 0) end
  return ...
end

function Held:run(f, ...)
  stack[depth + 1] = self
  depth = depth + 1
  return leave(depth, xpcall(f, traced, ...))
end

function Held:close()
  stack[depth + 1] = self
  depth = depth + 1
  close_top()
  self.tensors, self.count, self.records = {}, 0, {}
end

--- scope.plain() -> true where only the collector decides (no scope, or a loose one).
function scope.plain()
  for i = 1, depth do
    if not stack[i].loose then return false end
  end
  return true
end

--- scope.depth() -> how many are open.  scope.inside(t, d) -> true where t will die with one opened beyond depth d.
function scope.depth() return depth end
function scope.inside(t, d)
  for i = d + 1, depth do
    if t.scope == stack[i] then return true end
  end
  return false
end

--- scope.reset(to): after an error at the prompt, close what it left open.
function scope.reset(to) if depth > (to or 0) then scope.close((to or 0) + 1) end end

return scope
