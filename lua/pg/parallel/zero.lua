-- parallel/zero.lua: what ZeRO (Rajbhandari et al. 2020) does to values: where they are whole, and when.  What it
-- does to gradients is in reducer.lua, what a segment holds at each level in segment.lua.
--   1, 2  after an update the ranks of dp send one another their windows, the first segment first; an item of a
--         Sequential waits for its own before it runs, so that the rest travels meanwhile
--   3     values are whole only while an item runs: brought before it, with the next item's already under way,
--         dropped after it; the same again in backward, where marks on the tape stand for the two ends of an item.
--         Small items that share a segment come and go together, and a large item brings several
-- Parameters outside any item of a Sequential are waited for as soon as they are updated, and stay whole at level 3
-- (zero.outside lists them).
-- A segment counts who needs it (s.held): tied weights are needed by two items.  One that nobody needs stays until
-- another is brought: the last item's backward follows its forward.
local mesh = require "pg.mesh"
local tape = require "pg.tape"
local Tensor = require "pg.tensor"

local zero = {}
local idle = setmetatable({}, { __mode = "k" }) -- segments at level 3 that are here and that nobody needs

-- ---- holding ----

local function release(s)
  s.held = s.held - 1
  if s.held == 0 then idle[s] = true end
end

-- The values of these segments are here until they are released.
local function hold(segments)
  for _, s in ipairs(segments) do
    s.held = s.held + 1
    idle[s] = nil
  end
  for s in pairs(idle) do
    s:put_away()
    idle[s] = nil
  end
  for _, s in ipairs(segments) do s:bring() end
  for _, s in ipairs(segments) do s:ready() end
end

local function prefetch(segments)
  for _, s in ipairs(segments or {}) do
    idle[s] = nil
    s:bring()
  end
end

--- zero.settle(s): a backward has done with a segment whose item has no first end on the tape.
function zero.settle(s)
  if s.loose == 0 then return end
  s.held, s.loose = s.held - s.loose + 1, 0
  release(s)
end

-- ---- an item of a Sequential ----

-- The last end of an item: backward begins with it here.  a.has_first: there is the other end as well; a.before: the
-- segments of the item that backward comes to next.
local LAST = { name = "zero: an item's end", always = true, pass = function(_, _, dy) return dy end }
function LAST.grad_input(r)
  hold(r.a.segments)
  if not r.a.has_first then
    for _, s in ipairs(r.a.segments) do s.loose = s.loose + 1 end
  end
  prefetch(r.a.before)
end

-- The first end: backward is through; the reducer may send what the item has made.
local FIRST = { name = "zero: an item's start", always = true, pass = function(_, _, dy) return dy end }
function FIRST.grad_input(r)
  for _, s in ipairs(r.a.segments) do release(s) end
  local o = tape.walking
  if type(o.done) == "table" and not o.later then o.done:item_done(r.a.segments) end
end

--- zero.item_ends(records) -> by segment of items: how many first ends of its items a backward will pass; infinite
-- where one of them has none (its input wants no gradient).
function zero.item_ends(records)
  local ends = {}
  for _, r in ipairs(records) do
    if r.op == FIRST then
      for _, s in ipairs(r.a.segments) do ends[s] = (ends[s] or 0) + 1 end
    elseif r.op == LAST and not r.a.has_first then
      for _, s in ipairs(r.a.segments) do ends[s] = math.huge end
    end
  end
  return ends
end

local function mark(op, x, attributes)
  local y = x:detach()
  return tape.record(op, { x }, 1, {}, 0, y, attributes)
end

-- Level 3.  following: the next item's segments, nil after the last.
local function coming_and_going(segments, following)
  local has_first, before -- of the run under way
  return { before = function(x)
    hold(segments)
    prefetch(following)
    has_first, before = tape.wants(x), nil
    if not has_first then return x end
    local made_by = x.record
    if made_by and made_by.op == LAST then before = made_by.a.segments end
    return mark(FIRST, x, { segments = segments })
  end, after = function(y, ...)
    for _, s in ipairs(segments) do release(s) end
    if not tape.wants(y) then return y, ... end
    return mark(LAST, y, { segments = segments, has_first = has_first, before = before }), ...
  end }
end

local function waiting(segments)
  return { before = function(x)
    for _, s in ipairs(segments) do s:ready() end
    return x
  end, after = function(...) return ... end }
end

-- ---- a model ----

-- Segments of a module's parameters, lent ones included, but those that Sequentials inside it see to.
local function segments_of(module)
  local list, seen = {}, {}
  module:each_module(function(m)
    if not m.items then return end
    for _, item in ipairs(m.items) do
      for _, p in ipairs(item:parameters()) do if p.segment then seen[p.segment] = true end end
    end
  end)
  for _, p in ipairs(module:parameters()) do
    local s = p.segment
    if s and not seen[s] then
      seen[s] = true
      list[#list + 1] = s
    end
  end
  return list
end

--- zero.attach(model) -> model, whose Sequentials see to the values of their items.  After pg.build and before an
-- optimiser; all ranks call it; a second call changes nothing.
function zero.attach(model)
  if mesh.layout.zero == 0 or mesh.dp.size == 1 or model.zero_attached then return model end
  model.zero_attached = true
  local wrap, kept = mesh.layout.zero == 3 and coming_and_going or waiting, {}
  model:each_module(function(m)
    if not m.items then return end
    local lists = {}
    for i, item in ipairs(m.items) do
      lists[i] = segments_of(item)
      for _, s in ipairs(lists[i]) do kept[s] = true end
    end
    m.around = {}
    for i = 1, #lists do m.around[i] = #lists[i] > 0 and wrap(lists[i], lists[i + 1]) end
  end)
  for _, s in ipairs(model.segments) do
    s.in_item = kept[s] -- an item waits for it
    if s.level == 3 and not s.in_item and not s.stays then s:whole_values() end
  end
  return model
end

--- zero.outside(segments) -> those whose values stay whole at level 3.
function zero.outside(segments)
  local list = {}
  for _, s in ipairs(segments) do if s.stays then list[#list + 1] = s end end
  return list
end

-- ---- after an update ----

--- zero.ready(segments): their values are whole and of now, but for those that come and go.
function zero.ready(segments)
  for _, s in ipairs(segments) do s:ready() end
end

--- zero.gather_values(segments): the same after windows were written (segment:write_numbers); all ranks of dp call it.
function zero.gather_values(segments)
  for _, s in ipairs(segments) do s:updated() end
  zero.ready(segments)
end

--- zero.abandon(segments): a step that will not be finished leaves them as it found them: no gradient, values as
-- before it; what was under way is forgotten.
function zero.abandon(segments)
  for _, s in ipairs(segments) do
    idle[s] = nil
    s:abandon()
  end
end

-- ---- the plan ----

--- zero.sent(segments, micro) -> bytes that this rank sends over dp in a step of `micro` micro-batches, by rings:
-- (n - 1) / n of a buffer for each reduce-scatter or all-gather, twice that for an all-reduce; and in how many of
-- these.  At level 3 at most: what two items in a row need is brought once.
function zero.sent(segments, micro)
  local bytes, calls = 0, 0
  for _, s in ipairs(segments) do
    local n = s.axis.size
    local grad = s.count * Tensor.sizes[s.grad_dtype]
    local value = s.count * Tensor.sizes[s.dtype]
    local reduced = s.level < 2 and 1 or micro
    local gathered = s.level == 3 and not s.stays and 2 * micro or 1
    local moved = s.level == 0 and 2 * grad or reduced * grad + gathered * value
    bytes = bytes + moved * (n - 1) / n
    calls = calls + (n == 1 and 0 or s.level == 0 and 1 or reduced + gathered)
  end
  return bytes, calls
end

return zero
