-- ops/elementwise.lua: numbers one by one: unary functions, arithmetic with broadcast, dropout, cast.
local c = require "pg.c"
local Tensor = require "pg.tensor"
local tape = require "pg.tape"
local done = require("pg.watch").done
local C = c.C

local ops = {}

local function same_shape(a, b)
  if #a.shape ~= #b.shape then return false end
  for i = 1, #a.shape do if a.shape[i] ~= b.shape[i] then return false end end
  return true
end

-- Unary ----------------------------------------------------------------------------------------

local UNARY = { name = "unary", grad_input = function(r, dy, d, add)
  c.check(C.pg_unary_grad(d[1].raw, dy.raw, r.saved[1].raw, r.a.kind, add[1]))
end }

local function unary(name, kind)
  local attributes = { kind = kind }
  local op = setmetatable({ name = name }, { __index = UNARY })
  return function(x)
    local y = Tensor.like(x)
    done(name, C.pg_unary(y.raw, x:alive().raw, kind), y)
    if tape.wants(x) then tape.record(op, { x }, 1, { x }, 1, y, attributes) end
    return y
  end
end

--- relu, silu, gelu (exact), gelu_tanh, tanh, sigmoid, exp, log, sqrt, square, neg, abs (x) -> y like x.
ops.relu, ops.silu = unary("relu", C.PG_RELU), unary("silu", C.PG_SILU)
ops.gelu, ops.gelu_tanh = unary("gelu", C.PG_GELU), unary("gelu_tanh", C.PG_GELU_TANH)
ops.tanh, ops.sigmoid = unary("tanh", C.PG_TANH), unary("sigmoid", C.PG_SIGMOID)
ops.exp, ops.log, ops.sqrt = unary("exp", C.PG_EXP), unary("log", C.PG_LOG), unary("sqrt", C.PG_SQRT)
ops.square, ops.neg, ops.abs = unary("square", C.PG_SQUARE), unary("neg", C.PG_NEG), unary("abs", C.PG_ABS)

-- Binary ---------------------------------------------------------------------------------------

-- Sum dy [.., shape of b] into db, which is smaller or has fewer dims of 1.
local function reduce_into(db, dy, add)
  if same_shape(db, dy) then return c.check(C.pg_axpby(db.raw, dy.raw, 1, add)) end
  local rows = dy:view({ dy.count / math.max(db.count, 1), db.count })
  c.check(C.pg_reduce(db.raw, rows.raw, C.PG_SUM, 0, add))
  rows:release()
end

-- d += x op y, reduced to d's shape where it is smaller.
local function accumulate(d, x, y, kind, add, sign)
  if sign == nil and same_shape(d, x) then
    return c.check(C.pg_binary(d.raw, x.raw, y.raw, kind, add))
  end
  local product = Tensor.like(x)
  c.check(C.pg_binary(product.raw, x.raw, y.raw, kind, 0))
  if sign then c.check(C.pg_axpby(product.raw, product.raw, sign, 0)) end
  reduce_into(d, product, add)
  product:release()
end

-- dy where x - y > 0, to d.
local function masked(d, dy, x, y, add)
  local difference, part = Tensor.like(dy), Tensor.like(dy)
  c.check(C.pg_axpby(difference.raw, x.raw, 1, 0))
  c.check(C.pg_binary(difference.raw, difference.raw, y.raw, C.PG_SUB, 0))
  c.check(C.pg_unary_grad(part.raw, dy.raw, difference.raw, C.PG_RELU, 0))
  reduce_into(d, part, add)
  difference:release()
  part:release()
end

-- y spread to the shape of `like`.
local function spread(y, like)
  if same_shape(y, like) then return y end
  local out = Tensor.zeros(like.shape, like.dtype)
  c.check(C.pg_binary(out.raw, out.raw, y.raw, C.PG_ADD, 0))
  return out
end

local ADD = { name = "add", pass = function(r, i, dy) return (i == 1 or r.a.same) and dy or nil end,
  grad_input = function(_, dy, d, add) if d[2] then reduce_into(d[2], dy, add[2]) end end }

local SUB = { name = "sub", pass = function(_, i, dy) return i == 1 and dy or nil end,
  grad_input = function(_, dy, d, add)
    if not d[2] then return end
    local negative = Tensor.like(dy)
    c.check(C.pg_axpby(negative.raw, dy.raw, -1, 0))
    reduce_into(d[2], negative, add[2])
    negative:release()
  end }

local MUL = { name = "mul", grad_input = function(r, dy, d, add)
  if d[1] then accumulate(d[1], dy, r.saved[2], C.PG_MUL, add[1]) end
  if d[2] then accumulate(d[2], dy, r.saved[1], C.PG_MUL, add[2]) end
end }

-- d(a/b) = dy/b and -dy*(a/b)/b
local DIV = { name = "div", grad_input = function(r, dy, d, add)
  if d[1] then accumulate(d[1], dy, r.saved[2], C.PG_DIV, add[1]) end
  if d[2] then
    local quotient = Tensor.like(dy)
    c.check(C.pg_binary(quotient.raw, r.saved[1].raw, r.saved[2].raw, C.PG_DIV, 0))
    c.check(C.pg_binary(quotient.raw, quotient.raw, dy.raw, C.PG_MUL, 0))
    accumulate(d[2], quotient, r.saved[2], C.PG_DIV, add[2], -1)
    quotient:release()
  end
end }

-- Where a and b are equal neither gets a gradient.
local function extreme(name, sign)
  return { name = name, grad_input = function(r, dy, d, add)
    local a, b = r.saved[1], spread(r.saved[2], r.saved[1])
    local x, y = a, b
    if sign < 0 then x, y = b, a end
    if d[1] then masked(d[1], dy, x, y, add[1]) end
    if d[2] then masked(d[2], dy, y, x, add[2]) end
    if b ~= r.saved[2] then b:release() end
  end }
end

local kinds = {
  add = { C.PG_ADD, ADD, swap = true }, sub = { C.PG_SUB, SUB }, mul = { C.PG_MUL, MUL, swap = true },
  div = { C.PG_DIV, DIV }, maximum = { C.PG_MAX, extreme("maximum", 1), swap = true },
  minimum = { C.PG_MIN, extreme("minimum", -1), swap = true },
}

local function is_tensor(x) return type(x) == "table" and x.is_tensor end

-- The operand x beside `other`: a number becomes a tensor of the other's dtype.
local function operand(x, other, name)
  if is_tensor(x) then return x end
  if type(x) == "number" and is_tensor(other) then return Tensor.full({}, x, other.dtype) end
  c.fail("%s: a %s and a %s; give two tensors, or a tensor and a number", name,
         is_tensor(other) and "tensor" or type(other), type(x))
end

-- Whether both inputs of a record have one shape, so that a gradient fits both as it is.
local SAME, BROADCAST = { same = true }, { same = false }

local function binary(name)
  local kind, op, swap = kinds[name][1], kinds[name][2], kinds[name].swap
  local saves = (name == "add" or name == "sub") and 0 or 2
  return function(a, b)
    a, b = operand(a, b, name), operand(b, a, name)
    if a.count < b.count and #a.shape <= #b.shape or a.count == b.count and #a.shape < #b.shape then
      if swap then a, b = b, a else a = ops.add(Tensor.zeros(b.shape, b.dtype), a) end
    end
    local y = Tensor.like(a)
    done(name, C.pg_binary(y.raw, a:alive().raw, b:alive().raw, kind, 0), y)
    if tape.wants(a, b) then
      tape.record(op, { a, b }, 2, saves > 0 and { a, b } or {}, saves, y,
                  same_shape(a, b) and SAME or BROADCAST)
    end
    return y
  end
end

--- add, sub, mul, div, maximum, minimum (a, b) -> y.  b: a's shape, a suffix of it, or one element;
-- either may be a number.
ops.add, ops.sub, ops.mul, ops.div = binary "add", binary "sub", binary "mul", binary "div"
ops.maximum, ops.minimum = binary "maximum", binary "minimum"

local SCALE = { name = "scale", grad_input = function(r, dy, d, add)
  c.check(C.pg_axpby(d[1].raw, dy.raw, r.a.factor, add[1]))
end }

--- scale(x, factor) -> factor * x.
function ops.scale(x, factor)
  local y = Tensor.like(x)
  done("scale", C.pg_axpby(y.raw, x:alive().raw, factor, 0), y)
  if tape.wants(x) then tape.record(SCALE, { x }, 1, {}, 0, y, { factor = factor }) end
  return y
end

local CAST = { name = "cast", grad_input = function(_, dy, d, add)
  if add[1] == 0 then return c.check(C.pg_copy(d[1].raw, dy.raw)) end
  local same = dy:to(d[1].dtype)
  c.check(C.pg_axpby(d[1].raw, same.raw, 1, 1))
  same:release()
end }

--- cast(x, dtype) -> x in another dtype; the gradient is cast back.
function ops.cast(x, dtype)
  if x.dtype == dtype then return x end
  local y = Tensor.empty(x.shape, dtype)
  done("cast", C.pg_copy(y.raw, x:alive().raw), y)
  if tape.wants(x) then tape.record(CAST, { x }, 1, {}, 0, y) end
  return y
end

-- Dropout --------------------------------------------------------------------------------------

local DROPOUT = { name = "dropout", grad_input = function(r, dy, d, add)
  local a, step = r.a, r.saved[1]
  c.check(C.pg_dropout(d[1].raw, dy.raw, a.p, step and step.raw or nil, a.key, a.first, a.cols,
                       a.stride, add[1]))
end }

ops.dropout_calls = 0 -- keys of calls that name none; recompute puts it back for its second run

--- dropout(x, p, o) -> y.  Zeroes with probability p, the rest divided by 1 - p.  o.key (uint64 or a
-- name) and o.step (a step block) make the mask a function of the run, the step and the place:
-- element i has global index o.first + (i / o.cols) * o.stride + i % o.cols.
function ops.dropout(x, p, o)
  o = o or {}
  if p < 0 or p >= 1 then c.fail("dropout: p is %g, outside [0,1)", p) end
  if p == 0 then return x end
  local key = o.key
  if not key then
    ops.dropout_calls = ops.dropout_calls + 1
    key = "dropout call " .. ops.dropout_calls
  end
  if type(key) == "string" then key = c.hash(key) end
  local a = { p = p, key = key, first = o.first or 0, cols = o.cols or 0, stride = o.stride or 0 }
  local y = Tensor.like(x)
  done("dropout", C.pg_dropout(y.raw, x:alive().raw, p, o.step and o.step.raw, key, a.first, a.cols,
                               a.stride, 0), y)
  if tape.wants(x) then tape.record(DROPOUT, { x }, 1, { o.step or false }, 1, y, a) end
  return y
end

return ops
