-- ops/reduce.lua: sums, means, extremes; slicing, joining, turning.
local c = require "pg.c"
local Tensor = require "pg.tensor"
local tape = require "pg.tape"
local done = require("pg.watch").done
local C, ffi = c.C, c.ffi

local ops = {}

-- A dim as users give it (1-based, negative from the end, nil = all) -> 0-based, or -1 for all.
local function dim_of(x, dim, name)
  if dim == nil then return -1 end
  local n = #x.shape
  local d = c.int(dim, name .. ": dim")
  if d < 0 then d = n + 1 + d end
  if d < 1 or d > n then c.fail("%s: dim %d of %s; it has dims 1 to %d", name, dim, x:describe(), n) end
  return d - 1
end

-- x's shape without dim (or with 1 there, where kept).
local function reduced_shape(x, d, keep)
  local shape = {}
  if d < 0 then return keep and shape or {} end
  for i, size in ipairs(x.shape) do
    if i - 1 ~= d then shape[#shape + 1] = size
    elseif keep then shape[#shape + 1] = 1 end
  end
  return shape
end

local SUM = { name = "sum", grad_input = function(r, dy, d, add)
  c.check(C.pg_expand(d[1].raw, dy.raw, r.a.dim, r.a.scale, add[1]))
end }
local EXTREME = { name = "extreme", grad_input = function(r, dy, d, add)
  c.check(C.pg_reduce_grad(d[1].raw, dy.raw, r.saved[1].raw, r.saved[2].raw, r.a.kind, r.a.dim, add[1]))
end }

local function reduction(name, kind)
  local extreme = kind == C.PG_RMAX or kind == C.PG_RMIN
  return function(x, dim, keep)
    local d = dim_of(x, dim, name)
    local y = Tensor.empty(reduced_shape(x, d, keep), x.dtype)
    done(name, C.pg_reduce(y.raw, x:alive().raw, kind, d, 0), y)
    if tape.wants(x) then
      local n = d < 0 and x.count or x.shape[d + 1]
      local a = { dim = d, kind = kind, scale = kind == C.PG_MEAN and 1 / n or 1 }
      if extreme then tape.record(EXTREME, { x }, 1, { x, y }, 2, y, a)
      else tape.record(SUM, { x }, 1, {}, 0, y, a) end
    end
    return y
  end
end

--- sum, mean, max, min (x, dim, keep) -> y.  dim 1-based, negative from the end, nil = over all;
-- keep leaves a dim of 1.  The gradient of max and min goes to the first extreme.
ops.sum, ops.mean = reduction("sum", C.PG_SUM), reduction("mean", C.PG_MEAN)
ops.max, ops.min = reduction("max", C.PG_RMAX), reduction("min", C.PG_RMIN)

-- Rearranging -----------------------------------------------------------------------------------

local RESHAPE = { name = "reshape", pass = function(r, _, dy) return dy:view(r.a.shape) end,
  grad_input = function() end }

--- reshape(x, shape) -> a view; one dim may be -1.
function ops.reshape(x, shape)
  local count, rest = 1, false
  for i = 1, #shape do
    if shape[i] == -1 then rest = true else count = count * shape[i] end
  end
  if count ~= x.count and not (rest and x.count % count == 0) then
    c.fail("reshape: %s into {%s}: %d numbers do not become %d%s", x:describe(), table.concat(shape, ","), x.count,
           count, rest and " times a whole number" or "")
  end
  local y = x:view(shape)
  if tape.wants(x) then tape.record(RESHAPE, { x }, 1, {}, 0, y, { shape = x.shape }) end
  return y
end

local SLICE = { name = "slice", grad_input = function(r, dy, d, add)
  if add[1] == 0 then d[1]:fill(0) end
  c.check(C.pg_place(d[1].raw, dy.raw, r.a.dim, r.a.start, 1))
end }

--- slice(x, dim, first, count) -> a copy of `count` entries of dim from `first` (1-based) on.
function ops.slice(x, dim, first, count)
  local d = dim_of(x, dim or c.fail "slice: dim is missing (nil)", "slice")
  local shape = { unpack(x.shape) }
  shape[d + 1] = count
  if first < 1 or count < 0 or first - 1 + count > x.shape[d + 1] then
    c.fail("slice: %d entries from %d of dim %d of %s", count, first, d + 1, x:describe())
  end
  local y = Tensor.empty(shape, x.dtype)
  done("slice", C.pg_slice(y.raw, x:alive().raw, d, first - 1, 0), y)
  if tape.wants(x) then tape.record(SLICE, { x }, 1, {}, 0, y, { dim = d, start = first - 1 }) end
  return y
end

local CONCAT = { name = "concat", grad_input = function(r, dy, d, add)
  for i = 1, r.count do
    if d[i] then c.check(C.pg_slice(d[i].raw, dy.raw, r.a.dim, r.a.starts[i], add[i])) end
  end
end }

--- concat(list, dim) -> the tensors of the list one after another along dim.
function ops.concat(list, dim)
  if #list == 0 then c.fail("concat: an empty list") end
  local d = dim_of(list[1], dim or c.fail "concat: dim is missing (nil)", "concat")
  local shape, starts, total, any = { unpack(list[1].shape) }, {}, 0, false
  for i, x in ipairs(list) do
    for j = 1, math.max(#shape, #x.shape) do
      if j ~= d + 1 and x.shape[j] ~= shape[j] then
        c.fail("concat: tensor 1 is %s, tensor %d is %s; all dims but dim %d must be equal", list[1]:describe(), i,
               x:describe(), d + 1)
      end
    end
    if x.dtype ~= list[1].dtype then
      c.fail("concat: tensor 1 is %s, tensor %d is %s; their dtypes must be equal (cast one of them)",
             list[1]:describe(), i, x:describe())
    end
    starts[i] = total
    total = total + x.shape[d + 1]
    any = any or tape.wants(x)
  end
  shape[d + 1] = total
  local y = Tensor.empty(shape, list[1].dtype)
  for i, x in ipairs(list) do
    done("concat", C.pg_place(y.raw, x:alive().raw, d, starts[i], 0), y)
  end
  if any then tape.record(CONCAT, { unpack(list) }, #list, {}, 0, y, { dim = d, starts = starts }) end
  return y
end

local order_c = ffi.new "int32_t[8]"
local function permute_into(y, x, order, add)
  for i = 1, #order do order_c[i - 1] = order[i] - 1 end
  return C.pg_permute(y.raw, x.raw, order_c, add)
end

local PERMUTE = { name = "permute", grad_input = function(r, dy, d, add)
  c.check(permute_into(d[1], dy, r.a.inverse, add[1]))
end }

--- permute(x, order) -> a copy whose dim i is x's dim order[i] (1-based).
function ops.permute(x, order)
  local shape, inverse = {}, {}
  if #order ~= #x.shape then c.fail("permute: %d dims named for %s", #order, x:describe()) end
  for i = 1, #order do
    local d = order[i]
    if not x.shape[d] or inverse[d] then
      c.fail("permute: {%s} is no order of the dims of %s", table.concat(order, ","), x:describe())
    end
    shape[i], inverse[d] = x.shape[d], i
  end
  local y = Tensor.empty(shape, x.dtype)
  x:alive()
  done("permute", permute_into(y, x, order, 0), y)
  if tape.wants(x) then tape.record(PERMUTE, { x }, 1, {}, 0, y, { inverse = inverse }) end
  return y
end

--- transpose(x, i, j) -> a copy with two dims exchanged (default the last two).
function ops.transpose(x, i, j)
  local n = #x.shape
  local order = {}
  for d = 1, n do order[d] = d end
  i, j = i or n - 1, j or n
  if not (order[i] and order[j]) then
    c.fail("transpose: dims %s and %s of %s", tostring(i), tostring(j), x:describe())
  end
  order[i], order[j] = j, i
  return ops.permute(x, order)
end

return ops
