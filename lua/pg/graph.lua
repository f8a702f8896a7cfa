-- graph.lua: pg.graph(f) -> g: what f computes is recorded once and then given to the GPU as a whole, which starts it
-- without waiting for the host between small ops.  g(...) returns what f returns, with the same bits.
-- The first calls run f as it is: algorithms are chosen, tables made, the pool fills.  The next one records: f runs
-- once more on the host while the device only takes notes, with arguments in tensors of the graph's own.  From then on
-- a call copies its arguments there and launches; the host's part of f does not run.  What the host knows of gradients
-- (which leaves have one, whether the next is added) is set as f left it; where it stands differently before a call,
-- or arguments are of another kind, another recording is made, a few at most, and beyond them f runs as it is.
-- A device without graphs (the CPU) always runs f.
-- What cannot be recorded ends the recording with its reason: that is told once, and f runs as it is from then on.
local c = require "pg.c"
local elementwise = require "pg.ops.elementwise"
local log = require "pg.log"
local random = require "pg.random"
local scope = require "pg.scope"
local step = require "pg.step"
local tape = require "pg.tape"
local watch = require "pg.watch"
local Tensor = require "pg.tensor"
local C, ffi = c.C, c.ffi

local graph = {}
local FIRST = 2 -- calls of a kind that run f as it is
local MOST = 4  -- recordings of a graph at a time
local KINDS = 64 -- of calls that are told apart
local DEEP = 4  -- levels of tables among the arguments
local recording = false
local all = setmetatable({}, { __mode = "k" }) -- every Graph
local slot = ffi.new "pg_graph *[1]"

local Graph = {}
Graph.__index = Graph

--- graph.new(f, name) -> g.  name: for the line that says why f is not recorded.
function graph.new(f, name)
  if type(f) ~= "function" then c.fail("graph: a function is wanted, got %s", type(f)) end
  local g = setmetatable({ f = f, name = name or "graph", kinds = {}, n_kinds = 0, count = 0, replays = 0 }, Graph)
  all[g] = true
  return g
end

-- ---- arguments ----

-- The step block and parameters are used where they lie; other tensors are copied.
local function stays(t) return t == step.tensor or t.segment ~= nil end

local function sorted_keys(t)
  local keys = {}
  for k in pairs(t) do keys[#keys + 1] = k end
  table.sort(keys, function(a, b)
    if type(a) == type(b) and type(a) ~= "table" then return a < b end
    return tostring(a) < tostring(b)
  end)
  return keys
end

-- A plain value in words: no two values have the same ones.
local function plain(value)
  if type(value) == "number" then return ("%.17g"):format(value) end
  if type(value) == "string" then return ("%q"):format(value) end
  return type(value) .. " " .. tostring(value)
end

-- What kind of value it is, as words: two calls whose words are equal may share a recording.  Tensors that are copied
-- are listed, each once.
local function look(value, list, words, level)
  if type(value) ~= "table" or getmetatable(value) and not value.is_tensor then
    words[#words + 1] = plain(value)
  elseif not value.is_tensor then
    if level > DEEP then c.fail("graph: arguments are tables of more than %d levels", DEEP) end
    words[#words + 1] = "{"
    for _, k in ipairs(sorted_keys(value)) do
      words[#words + 1] = plain(k)
      look(value[k], list, words, level + 1)
    end
    words[#words + 1] = "}"
  elseif stays(value) then
    words[#words + 1] = tostring(value.raw)
  else
    if value.record or value.requires_grad then
      c.fail("graph: an argument %s wants a gradient, which would end there; compute it in the function, or "
             .. "t:detach() it", value:describe())
    end
    value:alive()
    if not list[value] then
      list[#list + 1] = value
      list[value] = #list
    end
    words[#words + 1] = value:describe() .. list[value]
  end
end

-- Everything else that decides what f computes, as far as the host knows it.
local function look_around(words)
  local context = tape.context
  words[#words + 1] = ("%s %s %s %s %s"):format(tostring(tape.enabled), tostring(tape.remake),
    tostring(context.training), tostring(context.sample0), tostring(context.step ~= nil))
end

-- The arguments with tensors of the graph's own in the place of those of the list.
local function with_own(value, list, own)
  if type(value) ~= "table" then return value end
  if value.is_tensor then return own[list[value]] or value end
  if getmetatable(value) then return value end
  local copy = {}
  for k, v in pairs(value) do copy[k] = with_own(v, list, own) end
  return copy
end

local function own_tensors(list)
  local own = {}
  C.pg_mem_tag "graphs"
  for i, t in ipairs(list) do own[i] = Tensor.like(t):keep():copy_from(t) end
  C.pg_mem_tag "activations"
  return own
end

-- ---- gradients ----

local function fresh(t) return t.grad_fresh and true or false end

-- leaf -> how it was before f used it; f has made its gradient where it had none.
local function leaves_fit(leaves)
  for t, was in pairs(leaves) do
    if not t.requires_grad or t.raw ~= was.raw or (t.grad or false) ~= was.grad or fresh(t) ~= was.fresh then
      return false
    end
  end
  return true
end

local function leaves_done(leaves)
  for t, was in pairs(leaves) do t.grad, t.grad_fresh = was.grad or was.made, false end
end

local function leaves_back(leaves)
  for t, was in pairs(leaves) do t.grad, t.grad_fresh = was.grad or nil, was.fresh end
end

-- ---- recording ----

-- Tensors among the values are the graph's: their numbers are there as long as it is, or somebody holds them.
local function keep(value, level)
  if type(value) ~= "table" then return end
  if value.is_tensor then
    if value.raw then value:keep() end
  elseif level < DEEP and not getmetatable(value) then
    for _, v in pairs(value) do keep(v, level + 1) end
  end
end

local COUNTED = "dropout, randn or rand without a key takes its numbers from a count of calls on the host; give it "
  .. "a key"

-- f while the device takes notes -> the recording; nil, reason.
local function run_recorded(g, words, n)
  local before, context = { random.calls, elementwise.dropout_calls }, tape.context
  local leaves = {}
  recording, tape.leaves = true, { of = leaves, depth = scope.depth() }
  local r = { leaves = leaves }
  local function done(ok, ...)
    recording, tape.leaves = false, nil
    if ok then r.results, r.n = { ... }, select("#", ...) else r.reason = tostring((...)) end
  end
  done(pcall(scope.run, g.f, unpack(words, 1, n)))
  if not r.reason then
    if random.calls ~= before[1] or elementwise.dropout_calls ~= before[2] then r.reason = COUNTED
    elseif c.code == C.PG_EINTR or c.code == C.PG_ENOMEM then -- f caught it
      r.reason = "an op was not done this time"
    end
  end
  local rc = C.pg_graph_end(not r.reason and slot or nil)
  if rc < 0 and not r.reason then r.reason = ffi.string(C.pg_errmsg()) end -- as well
  if not r.reason then
    r.handle = ffi.gc(slot[0], C.pg_graph_free)
    for i = 1, r.n do keep(r.results[i], 1) end
    for t, was in pairs(leaves) do was.made = t.grad end
    leaves_back(leaves) -- it is done by the launch that follows
    return r
  end
  leaves_back(leaves)
  random.calls, elementwise.dropout_calls, tape.context = before[1], before[2], context
  return nil, r.reason
end

local function free_tensors(list) for _, t in ipairs(list) do t:free() end end

-- From now on f runs as it is.
local function give_up(g, reason)
  if c.code == C.PG_EINTR then error("interrupted", 0) end
  g.reason = reason
  log.text("%s runs as it is, without a recording: %s", g.name, reason)
end

-- nil where the device has no graphs, or it cannot be recorded.
local function record(g, list, words, n)
  c.collect() -- what nobody uses becomes room for it
  c.code = nil
  local ok, own = pcall(own_tensors, list)
  if not ok then return give_up(g, own) end
  local rc = C.pg_graph_begin()
  if rc < 0 then
    free_tensors(own)
    if rc == C.PG_EGRAPH then
      g.none = true
      return nil
    end
    c.code = rc
    return give_up(g, ffi.string(C.pg_errmsg()))
  end
  local given = {}
  for i = 1, n do given[i] = with_own(words[i], list, own) end
  local r, reason = run_recorded(g, given, n)
  if r then
    r.own, r.given = own, given -- what the kind of a call names stays what it is
    g.count = g.count + 1
    return r
  end
  free_tensors(own)
  return give_up(g, reason)
end

-- ---- calling ----

local function launch(g, r, list)
  for i, t in ipairs(list) do
    if t ~= r.own[i] then r.own[i]:copy_from(t) end
  end
  c.check(C.pg_graph_launch(r.handle))
  leaves_done(r.leaves)
  g.replays = g.replays + 1
  return unpack(r.results, 1, r.n)
end

local function too_many(g)
  if g.told then return nil end
  g.told = true
  log.text("%s runs as it is where its calls differ too much: %d recordings of %d kinds of arguments", g.name, g.count,
           g.n_kinds)
end

-- The recording for this call, made now where its time has come; nil: f runs as it is.
local function recording_for(g, key, list, words, n)
  local kind = g.kinds[key]
  if not kind then
    if g.n_kinds >= KINDS then return too_many(g) end
    kind = { calls = 0 }
    g.kinds[key], g.n_kinds = kind, g.n_kinds + 1
  end
  for _, r in ipairs(kind) do
    if leaves_fit(r.leaves) then return r end
  end
  kind.calls = kind.calls + 1
  if kind.calls <= FIRST then return nil end
  if g.count >= MOST then return too_many(g) end
  local r = record(g, list, words, n)
  kind[#kind + 1] = r
  return r
end

--- g(...) -> what f returns.  Tensors among it are the same ones in every call that was recorded, with numbers that
-- stay until the next; the tape knows nothing of them, so backward belongs into f.
function Graph:__call(...)
  local list, kind, words, n = {}, {}, { ... }, select("#", ...)
  for i = 1, n do look(words[i], list, kind, 1) end -- the same arguments are refused on every device
  if self.none or self.reason or recording or c.shapes_only() or watch.looks() then return scope.run(self.f, ...) end
  look_around(kind)
  local r = recording_for(self, table.concat(kind, "\n"), list, words, n)
  if r then return launch(self, r, list) end
  return scope.run(self.f, ...)
end

--- g:free(): its recordings and their memory are given back; a call makes new ones.
function Graph:free()
  for _, kind in pairs(self.kinds) do
    for _, r in ipairs(kind) do
      C.pg_graph_free(ffi.gc(r.handle, nil))
      free_tensors(r.own)
    end
  end
  self.kinds, self.n_kinds, self.count, self.reason = {}, 0, 0, nil
end

--- g:state() -> { recordings =, replays =, bytes =, reason = }: how often f was recorded, and launched so; what the
-- recordings hold; why there are none.
function Graph:state()
  local bytes = 0
  for _, kind in pairs(self.kinds) do
    for _, r in ipairs(kind) do bytes = bytes + tonumber(C.pg_graph_bytes(r.handle)) end
  end
  return { recordings = self.count, replays = self.replays, bytes = bytes,
           reason = self.reason or self.none and "this device has no graphs" or nil }
end

--- graph.forget(): code has changed: whatever was recorded is recorded anew.
function graph.forget()
  for g in pairs(all) do g:free() end
end

return graph
