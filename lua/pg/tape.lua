-- tape.lua: what was computed, and the walk back.  Each recorded tensor points at its record, and a
-- record at its inputs; backward() gathers what a loss reaches, in order of recording, and walks it
-- from the end.  A record is data (op, inputs, saved tensors, attributes), never a closure:
--   op = { name, grad_input = f(r, dy, d, add), grad_weight = the same, weights = { [2] = true },
--          pass = f(r, i, dy), always = true where grad_input is called even if no input wants a gradient,
--          settle = f(r): waits for what grad_input has left under way, such as a sum over ranks,
--          mixed = true, based = true (below) }
-- A rule is told for each input i what is wanted: d[i] == nil nothing; else write there (add[i] = 0)
-- or add there (add[i] = 1).  Inputs marked as weights are served by grad_weight, which may run later
-- than grad_input (zero-bubble pipelines).  Where the attribute in_place is i, nobody reads the numbers of
-- input i again, and its gradient may be written over them: d[i] is then the input itself.  pass gives
-- a gradient that needs no computing (a view of dy or dy itself), or nil.  again = f(saved, a) makes the
-- op's result once more (tape.saved), from what it has saved at the places again_needs (nil: all).  Saved
-- tensors are owned by the record until it has been walked.
-- A leaf's gradient may have another dtype than the leaf (leaf.grad_dtype: f32 beside bf16).  A mixed op
-- writes such gradients of its weights (the inputs marked so; where none is, all but the first) itself; for
-- others they are made in the leaf's dtype and then added.  A based op is f(r, dy, d, add, base): where
-- others still read the gradient that input 1 has so far, it gets this as base[1] and writes the sum to d[1].
local c = require "pg.c"
local scope = require "pg.scope"
local Tensor = require "pg.tensor"
local watch = require "pg.watch"
local C = c.C

-- What the present micro-batch is, for ops that draw random numbers: step (the step block), sample0 (place
-- of its first sample in the global batch), training (false: no dropout).  A recomputed block sees the
-- context that its first run saw.
-- leaves: { of =, depth = }: how each leaf born at that depth of scopes was before its gradient changed; or nil.
-- remake: what a norm or an activation made, and a product saves for its weight's gradient, is not kept but
-- made again from what the norm saved (recompute = "norms").
local tape = { enabled = true, remake = false, context = { training = true, sample0 = 0 } }
local sequence = 0

local Record = {}
Record.__index = Record

--- r:drop(): forget the record and give its saved tensors back.
function Record:drop()
  local saved = self.saved
  if not saved then return end
  self.saved = nil
  for i = 1, self.saved_count do
    if saved[i] then saved[i]:release() end
  end
  if self.extra then self.extra:release() end
  self.inputs, self.extra, self.dropped = nil, nil, true
end

--- tape.wanted(t) -> whether a gradient goes to t, or through it.
local function wanted(t) return t ~= nil and (t.requires_grad or t.record ~= nil) end
tape.wanted = wanted

--- tape.wants(a, b, ...) -> true if a gradient will be asked for one of them.
function tape.wants(a, b, d, e)
  return tape.enabled and (wanted(a) or wanted(b) or wanted(d) or wanted(e))
end

-- Stands among a record's saved tensors for one that is made again: it owns what the op that made it had saved.
local Remade = {}
Remade.__index = Remade
function Remade:retain()
  for i = 1, self.count do if self.saved[i] then self.saved[i]:retain() end end
  return self
end
function Remade:release()
  for i = 1, self.count do if self.saved[i] then self.saved[i]:release() end end
end

-- What has been put off may run when ZeRO-3 has dropped the parameters: it takes copies of those it needs, which are
-- a norm's own, a row each.
function Remade:keep_parameters()
  for i = 1, self.count do
    local t = self.saved[i]
    if t and t.segment and t.segment.level == 3 then
      self.saved[i] = t:clone():keep()
      t:release()
    end
  end
end

local function remade(t)
  local r = t.record
  if not (r and r.op.again and r.saved and (not r.op.again_if or r.op.again_if(r))) then return t end
  local saved, needs = {}, r.op.again_needs
  for i = 1, r.saved_count do saved[i] = (not needs or needs[i]) and r.saved[i] or false end
  return setmetatable({ op = r.op, saved = saved, count = r.saved_count, a = r.a }, Remade)
end

--- tape.saved(r, i) -> the i-th saved tensor of record r, and true where it was made again: the caller then
-- releases it.  Only for places that the op names in op.remakes.
function tape.saved(r, i)
  local t = r.saved[i]
  if getmetatable(t) ~= Remade then return t, false end
  return t.op.again(t.saved, t.a), true
end

--- tape.record(op, inputs, n, saved, m, out, attributes): remember that out came from inputs by op.
-- inputs has n places (holes allowed), saved has m.  attributes are copied into the record.
function tape.record(op, inputs, n, saved, m, out, attributes)
  sequence = sequence + 1
  local r = setmetatable({ op = op, inputs = inputs, count = n, saved = saved, saved_count = m,
                           sequence = sequence, a = attributes, out_shape = out.shape,
                           out_dtype = out.dtype }, Record)
  for i = 1, m do
    if saved[i] then
      if tape.remake and op.remakes and op.remakes[i] then saved[i] = remade(saved[i]) end
      saved[i]:retain()
    end
  end
  out.record = r
  scope.keep_record(r)
  return out
end

--- tape.no_grad(f, ...) -> what f returns, with nothing recorded.
function tape.no_grad(f, ...)
  local before = tape.enabled
  tape.enabled = false
  local function finish(ok, ...)
    tape.enabled = before
    if not ok then error((...), 0) end
    return ...
  end
  return finish(pcall(f, ...))
end

-- Leaves that a record uses without having them as inputs (a recomputed module).  "unknown" means that
-- no leaf can be called ready before the end.
local function count_hidden(r, uses)
  local hidden = r.a and r.a.hidden_leaves
  if hidden == "unknown" then uses.unknown = true
  elseif hidden then for _, t in ipairs(hidden) do uses[t] = (uses[t] or 0) + 1 end end
end

-- All records that `roots` reach, and how often each leaf is used; of each record, how many gradients of its output
-- will be added up (reads).
local function reach(roots)
  local records, uses, seen, stack = {}, {}, {}, {}
  local function read(r)
    r.reads = (r.reads or 0) + 1
    stack[#stack + 1] = r
  end
  for i = 1, #roots do read(roots[i]) end
  while #stack > 0 do
    local r = table.remove(stack)
    if not seen[r] then
      seen[r] = true
      if r.dropped then
        c.fail("backward: %s was walked already, or its scope has ended; run the forward again", r.op.name)
      end
      records[#records + 1] = r
      count_hidden(r, uses)
      for i = 1, r.count do
        local t = r.inputs[i]
        if t then
          if t.record then read(t.record)
          elseif t.requires_grad then uses[t] = (uses[t] or 0) + 1 end
        end
      end
    end
  end
  table.sort(records, function(a, b) return a.sequence > b.sequence end)
  return records, uses
end

-- Where the gradient of leaf t goes: its own t.grad, written the first time of a step, then added to.
-- Not for a mixed op and of another dtype: a tensor like t, and then what it goes to in the end and how.
local function leaf_target(t, mixed)
  local leaves = tape.leaves
  if leaves and not leaves.of[t] and not scope.inside(t, leaves.depth) then
    leaves.of[t] = { grad = t.grad or false, fresh = t.grad_fresh and true or false, raw = t.raw }
  end
  if not t.grad then
    t.grad = Tensor.empty(t.shape, t.grad_dtype or t.dtype):keep()
    t.grad_fresh = true
  elseif t.grad_fresh and t.segment then
    t.segment:open_grad() -- under ZeRO its buffer comes and goes
  end
  local add = t.grad_fresh and 0 or 1
  t.grad_fresh = false
  if mixed or t.grad.dtype == t.dtype then return t.grad, add end
  return Tensor.empty(t.shape, t.dtype), 0, t.grad, add
end

-- Where the gradient of an intermediate tensor goes; in_place: over the tensor itself.  The record is its
-- only owner; one that was passed on without a copy and is still seen elsewhere is copied before it is
-- added to; for a based op it is returned as the base of a new one.
local function inner_target(t, based, in_place)
  local r = t.record
  local g = r.grad
  if not g then
    r.grad = in_place and t:retain() or Tensor.empty(t.shape, t.dtype):keep()
    return r.grad, 0
  end
  if g.owners > 1 or C.pg_tensor_handles(g.raw) > 1 then
    if based then
      r.grad = Tensor.empty(t.shape, t.dtype):keep()
      return r.grad, 0, g
    end
    r.grad = g:clone():keep()
    g:release()
  end
  return r.grad, 1
end

-- Hand the gradient dy on to input i without computing; true where the op allows it.
local function passed(r, i, t, dy)
  local g = r.op.pass and r.op.pass(r, i, dy)
  if not g then return false end
  if t.record and not t.record.grad then
    t.record.grad = g == dy and g:retain() or g:keep()
    return true
  end
  local target, add
  if t.record then target, add = inner_target(t) else target, add = leaf_target(t, true) end
  c.check(C.pg_axpby(target.raw, g:alive().raw, 1, add))
  if g ~= dy then g:release() end
  return true
end

local function is_weight(op, i) return op.weights and op.weights[i] or false end

local function is_mixed(op, i)
  if not op.mixed then return false end
  if op.weights then return is_weight(op, i) end
  return i > 1
end

-- Gather what is wanted of record r into d, add, base; weights: which half of the inputs.  Returns whether
-- there is anything, and for leaves that get it later { [i] = { gradient, add } }.
local function targets(r, dy, weights, d, add, base)
  local any, later, op = false, nil, r.op
  local in_place = r.a and r.a.in_place
  for i = 1, r.count do
    local t = r.inputs[i]
    if t and is_weight(op, i) == weights and wanted(t) and not passed(r, i, t, dy) then
      any = true
      if t.record then
        d[i], add[i], base[i] = inner_target(t, op.based and i == 1, in_place == i)
      else
        local into, how
        d[i], add[i], into, how = leaf_target(t, is_mixed(op, i))
        if into then
          later = later or {}
          later[i] = { into, how }
        end
      end
    end
  end
  return any, later
end

local function settle(r) if r.op.settle then r.op.settle(r) end end

-- One half of a record's rule, for what is wanted.
local function apply(r, dy, weights)
  local d, add, base = {}, {}, {}
  local any, later = targets(r, dy, weights, d, add, base)
  if not any and (weights or not r.op.always) then return end
  local rule = weights and r.op.grad_weight or r.op.grad_input
  rule(r, dy, d, add, base)
  if later or watch.nan or watch.trace then settle(r) end
  watch.gradients(r, d)
  if base[1] then base[1]:release() end
  for i = 1, later and r.count or 0 do
    if later[i] then
      c.check(C.pg_axpby(later[i][1].raw, d[i].raw, 1, later[i][2]))
      d[i]:release()
    end
  end
end

local function leaf_used(t, uses, done)
  uses[t] = uses[t] - 1
  if uses[t] == 0 and done and not uses.unknown then done(t) end
end

local function leaves_done(r, uses, done)
  for i = 1, r.count do
    local t = r.inputs[i]
    if t and not t.record and t.requires_grad then leaf_used(t, uses, done) end
  end
  local hidden = r.a and r.a.hidden_leaves
  if type(hidden) == "table" then
    for _, t in ipairs(hidden) do leaf_used(t, uses, done) end
  end
end

local function put_off(later, r, dy)
  for i = 1, r.saved_count do
    if getmetatable(r.saved[i]) == Remade then r.saved[i]:keep_parameters() end
  end
  later[#later + 1] = { record = r, dy = dy }
end

-- One record: its input gradients now, its weight gradients now or (later given) put off: r.put_off.
local function walk(r, uses, done, later)
  local dy = r.grad
  r.grad = nil
  if dy then
    r.put_off = later ~= nil
    apply(r, dy, false)
    if r.op.weights then
      if later then
        put_off(later, r, dy)
        settle(r)
        return
      end
      apply(r, dy, true)
    end
    settle(r)
    dy:release()
  end
  leaves_done(r, uses, done)
  r:drop()
end

-- After an error: a second walk would add to what half a walk has left, so it is refused.
local function give_up(records)
  for _, r in ipairs(records) do
    if r.grad then r.grad:release() end
    r.grad = nil
    r:drop()
  end
end

-- An error of a rule, told as the gradient of its op.
local function in_gradient(r, message)
  local at = c.position()
  if type(message) ~= "string" or message:sub(1, #at) ~= at then return message end
  return ("%sgradient of %s: %s"):format(at, r.op.name, message:sub(#at + 1))
end

--- tape.backward(outputs, gradients, options): add d(sum of outputs . gradients) to the leaves.
-- options.done(leaf): called when a leaf has its whole gradient (an object with begin(records) hears first what will
-- be walked); options.later: a list that takes the weight gradients put off (tape.finish runs them).  Rules find the
-- options as tape.walking.
function tape.backward(outputs, gradients, options)
  options = options or {}
  local roots = {}
  for i, t in ipairs(outputs) do
    local r = t.record
    if not r then
      c.fail("backward: output %d %s was not computed from anything that requires a gradient", i, t:describe())
    end
    roots[i] = r
  end
  local records, uses = reach(roots)
  if type(options.done) == "table" then options.done:begin(records) end
  for i, r in ipairs(roots) do
    if r.grad then
      local sum = inner_target(outputs[i])
      c.check(C.pg_axpby(sum.raw, gradients[i]:alive().raw, 1, 1))
    else
      r.grad = gradients[i]:retain()
    end
  end
  local before, around = tape.enabled, tape.walking
  tape.enabled, tape.walking = false, options
  local now -- the record being walked
  local ok, message = pcall(scope.light, function()
    for i = 1, #records do
      now = records[i]
      walk(now, uses, options.done, options.later)
    end
  end)
  tape.enabled, tape.walking = before, around
  if not ok then
    give_up(records)
    error(in_gradient(now, message), 0)
  end
  if options.later then options.later.uses = uses end
end

--- tape.finish(later, done): the weight gradients that backward put off.
function tape.finish(later, done)
  for i = 1, #later do
    local r, dy = later[i].record, later[i].dy
    apply(r, dy, true)
    dy:release()
    leaves_done(r, later.uses, done)
    r:drop()
    later[i] = nil
  end
end

--- t:backward(seed, options): t has one element; seed (1) is its gradient.
function Tensor:backward(seed, options)
  if self.count ~= 1 then
    c.fail("backward: %s has %d elements; sum or mean it first", self:describe(), self.count)
  end
  scope.light(function()
    tape.backward({ self }, { Tensor.full(self.shape, seed or 1, self.dtype) }, options)
  end)
end

return tape
