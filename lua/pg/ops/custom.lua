-- ops/custom.lua: ops whose gradient is written in Lua, and recomputation.
local c = require "pg.c"
local scope = require "pg.scope"
local tape = require "pg.tape"
local elementwise = require "pg.ops.elementwise"
local C = c.C

local ops = {}

-- Write or add the tensor `g` that a rule returned to where the tape wants it.
local function deliver(g, d, add, i, name)
  if not d then return end
  if not g then
    if add == 0 then d:fill(0) end
    return
  end
  if g.count ~= d.count then
    c.fail("%s: its gradient for input %d is %s, the input is %s", name, i, g:describe(), d:describe())
  end
  c.check(C.pg_axpby(d.raw, g:alive().raw, 1, add))
end

local CUSTOM_INDEX = { grad_input = function(r, dy, d, add)
  local grads = { scope.light(r.a.grad, r.a.context, dy) }
  for i = 1, r.count do deliver(grads[i], d[i], add[i], i, r.op.name) end
end }

--- op{ name=, forward = f(ctx, ...) -> y, grad = g(ctx, dy) -> dx1, dx2, ... } -> a function.
-- forward is run unrecorded; ctx.save(t) keeps what grad needs; grad returns a gradient (or nil) for
-- each tensor argument, in order.
function ops.op(rule)
  c.keys(rule, { "name", "forward", "grad" }, "op")
  local name = rule.name or "custom op"
  if type(rule.forward) ~= "function" or type(rule.grad) ~= "function" then
    c.fail("op: %s needs the functions forward and grad", name)
  end
  local op = setmetatable({ name = name }, { __index = CUSTOM_INDEX })
  return function(...)
    local inputs, n = {}, 0
    for i = 1, select("#", ...) do
      local v = select(i, ...)
      if type(v) == "table" and v.is_tensor then n = n + 1 inputs[n] = v end
    end
    local saved = {}
    local context = { save = function(t) saved[#saved + 1] = t return t end }
    local y = tape.no_grad(rule.forward, context, ...)
    if type(y) ~= "table" or not y.is_tensor then c.fail("op: forward of %s must return one tensor", name) end
    for i = 1, n do if inputs[i] == y then y = y:detach() end end
    local any = false
    for i = 1, n do any = any or tape.wants(inputs[i]) end
    if any then
      tape.record(op, inputs, n, saved, #saved, y, { grad = rule.grad, context = context })
    end
    return y
  end
end

local function run_again(f, leaves, n, dy)
  tape.enabled = true
  local y = f(unpack(leaves, 1, n))
  if y.requires_grad and not y.record then y = elementwise.scale(y, 1) end -- f hands on what it got
  if y.record then tape.backward({ y }, { dy }) end
end

-- Run again what was run unrecorded, this time recorded, and walk it.
local RECOMPUTE = { name = "recompute", always = true, grad_input = function(r, dy, d, add)
  local leaves = {}
  for i = 1, r.count do
    leaves[i] = r.inputs[i]:detach()
    leaves[i].requires_grad = d[i] ~= nil
    if d[i] then leaves[i].grad, leaves[i].grad_fresh = d[i], add[i] == 0 end
  end
  local calls, context = elementwise.dropout_calls, tape.context
  elementwise.dropout_calls, tape.context = r.a.dropout_calls, r.a.tape_context
  local ok, message = pcall(scope.light, run_again, r.a.f, leaves, r.count, dy)
  tape.enabled = false
  elementwise.dropout_calls, tape.context = calls, context
  if not ok then error(message, 0) end
  for i = 1, r.count do
    if leaves[i].grad_fresh and d[i] then d[i]:fill(0) end
    leaves[i].grad = nil
  end
end }

--- recompute(f, x, ...) -> f(x, ...), run unrecorded; backward runs it again, recorded.  Trades the
-- activations inside f for a second forward.  f: tensors in, one tensor out; a module, or a function
-- that may use parameters (whose gradients then count as ready only when the whole backward ends).
function ops.recompute(f, ...)
  if not tape.enabled then return f(...) end
  local inputs = { ... }
  local n = select("#", ...)
  local calls = elementwise.dropout_calls
  local y = tape.no_grad(scope.light, f, ...)
  if type(y) ~= "table" or not y.is_tensor then c.fail "recompute: the function must return one tensor" end
  for i = 1, n do if inputs[i] == y then y = y:detach() end end
  -- Parameters inside f are not among the inputs, so it is always recorded.
  return tape.record(RECOMPUTE, inputs, n, inputs, n, y, {
    f = f, dropout_calls = calls, tape_context = tape.context,
    hidden_leaves = type(f) == "table" and f.is_module and f:parameters() or "unknown" })
end

return ops
