-- ops/comm.lua: collectives with gradients.  Each changes how the ranks of an axis hold a tensor, and its gradient
-- is the change back (Shoeybi et al. 2019; rows: Korthikanti et al. 2022).  Three ways to hold one:
--   whole     every rank has all of it, and all its gradient
--   parts     every rank has rows, or columns, of its own
--   addends   every rank has something of full size; the tensor is their sum
--
--   copy_to_ranks          whole -> whole, used for work of each rank's own      gradient: addends -> whole
--   reduce_from_ranks      addends -> whole                                      gradient: as it is
--   gather_rows            rows -> whole, used for work of each rank's own       gradient: addends -> rows
--   reduce_scatter_rows    addends -> rows                                       gradient: rows -> whole
--   join_rows, gather_columns   rows, columns -> whole                           gradient: own part
-- An axis of size one changes nothing, and gives back x itself.
local c = require "pg.c"
local mesh = require "pg.mesh"
local Tensor = require "pg.tensor"
local tape = require "pg.tape"
local done = require("pg.watch").done
local C = c.C

local ops = {}

-- Every rank's own x has slope 1 in the sum; optim:step() averages over the ranks, so each share is given
-- `size` times, which the average takes back.
local SUM_VALUES = { name = "sum_values", grad_input = function(r, dy, d, add)
  c.check(C.pg_axpby(d[1].raw, dy.raw, r.a.size, add[1]))
end }

--- sum_values(x, axis) -> the sum of x over the ranks of an axis, for losses of plain scripts, whose gradients
-- optim:step() averages over the ranks.
function ops.sum_values(x, axis)
  axis = axis or mesh.ready().dp
  if axis.size == 1 then return x end
  local y = x:clone()
  axis:all_reduce(y)
  if tape.wants(x) then tape.record(SUM_VALUES, { x }, 1, {}, 0, y, { size = axis.size }) end
  return y
end

--- all_reduce(x, axis, op) -> the same, unrecorded, for numbers to look at.
function ops.all_reduce(x, axis, op)
  local y = x:clone()
  axis = axis or mesh.ready().world
  axis:all_reduce(y, op)
  return y
end

-- fill(t) writes a gradient to d, or adds it there.
local function deliver(d, add, fill)
  local t = add == 1 and Tensor.like(d) or d
  fill(t)
  if add == 0 then return end
  c.check(C.pg_axpby(d.raw, t.raw, 1, 1))
  t:release()
end

-- Whole tensors ---------------------------------------------------------------------------------

local COPY = { name = "copy_to_ranks", grad_input = function(r, dy, d, add)
  deliver(d[1], add[1], function(t)
    t:copy_from(dy)
    r.a.axis:all_reduce(t)
  end)
end }

--- copy_to_ranks(x, axis) -> x, which each rank goes on to use in its own way; the gradient is summed over them.
function ops.copy_to_ranks(x, axis)
  if axis.size == 1 then return x end
  local y = x:detach()
  if tape.wants(x) then tape.record(COPY, { x }, 1, {}, 0, y, { axis = axis }) end
  return y
end

local REDUCE = { name = "reduce_from_ranks", pass = function(_, _, dy) return dy end, grad_input = function() end }

--- reduce_from_ranks(x, axis) -> the sum of the ranks' x, on all; its gradient is every addend's.
function ops.reduce_from_ranks(x, axis)
  if axis.size == 1 then return x end
  local y = x:clone()
  axis:all_reduce(y)
  if tape.wants(x) then tape.record(REDUCE, { x }, 1, {}, 0, y) end
  return y
end

-- Rows ------------------------------------------------------------------------------------------

-- The shape of x with `times` as many rows.
local function with_rows(x, times)
  local shape = { unpack(x.shape) }
  shape[1] = (shape[1] or c.fail("rows over ranks: a scalar has none")) * times
  return shape
end

local function gathered(x, axis)
  local y = Tensor.empty(with_rows(x, axis.size), x.dtype)
  axis:all_gather(y, x)
  return y
end

local GATHER_ROWS = { name = "gather_rows", grad_input = function(r, dy, d, add)
  deliver(d[1], add[1], function(t) r.a.axis:reduce_scatter(t, dy) end)
end }
local JOIN_ROWS = { name = "join_rows", grad_input = function(r, dy, d, add)
  c.check(C.pg_slice(d[1].raw, dy.raw, 0, r.a.axis.rank * r.a.rows, add[1]))
end }

--- gather_rows(x, axis) -> y [N,..].  x [N/R,..] is a rank's part of N rows; each rank goes on to use them in its
-- own way, so that the gradient is summed over the ranks and scattered.
function ops.gather_rows(x, axis)
  if axis.size == 1 then return x end
  local y = gathered(x, axis)
  if tape.wants(x) then tape.record(GATHER_ROWS, { x }, 1, {}, 0, y, { axis = axis }) end
  return y
end

--- join_rows(x, axis) -> the same rows, with which all ranks go on to do the same: each takes its own part of the
-- gradient, which all have whole.
function ops.join_rows(x, axis)
  if axis.size == 1 then return x end
  local y = gathered(x, axis)
  if tape.wants(x) then tape.record(JOIN_ROWS, { x }, 1, {}, 0, y, { axis = axis, rows = x.shape[1] }) end
  return y
end

local SCATTER_ROWS = { name = "reduce_scatter_rows", grad_input = function(r, dy, d, add)
  deliver(d[1], add[1], function(t) r.a.axis:all_gather(t, dy) end)
end }

--- reduce_scatter_rows(x, axis) -> y [N/R,..], this rank's rows of the sum of the ranks' x [N,..].
function ops.reduce_scatter_rows(x, axis)
  if axis.size == 1 then return x end
  local shape = with_rows(x, 1 / axis.size)
  if shape[1] ~= math.floor(shape[1]) then
    c.fail("reduce_scatter_rows: %s has %d rows, which %d ranks do not divide", x:describe(), x.shape[1], axis.size)
  end
  local y = Tensor.empty(shape, x.dtype)
  axis:reduce_scatter(y, x)
  if tape.wants(x) then tape.record(SCATTER_ROWS, { x }, 1, {}, 0, y, { axis = axis }) end
  return y
end

-- Columns ---------------------------------------------------------------------------------------

-- Columns of dy from `first` on; those past its end are padding, and have none.
local GATHER_COLUMNS = { name = "gather_columns", grad_input = function(r, dy, d, add)
  local x, first = d[1]:view({ -1, r.a.width }), r.a.axis.rank * r.a.width
  local rows = dy:view({ -1, r.a.columns })
  local here = math.max(0, math.min(r.a.width, r.a.columns - first))
  if here == r.a.width then c.check(C.pg_slice(x.raw, rows.raw, 1, first, add[1]))
  else
    if add[1] == 0 then x:fill(0) end
    if here > 0 then
      local part = Tensor.empty({ x.shape[1], here }, x.dtype)
      c.check(C.pg_slice(part.raw, rows.raw, 1, first, 0))
      c.check(C.pg_place(x.raw, part.raw, 1, 0, 1))
      part:release()
    end
  end
  x:release()
  rows:release()
end }

local order = c.ffi.new("int32_t[3]", 1, 0, 2)

--- gather_columns(x, axis, columns) -> y [..,columns] from the ranks' x [..,C], whose last columns, past
-- `columns` (R C) in all, are padding.  All ranks go on to do the same with it.
function ops.gather_columns(x, axis, columns)
  if axis.size == 1 then return x end
  local width = x.shape[#x.shape] or c.fail("gather_columns: a scalar has no columns")
  local rows, shape = x.count / math.max(width, 1), { unpack(x.shape) }
  columns = columns or width * axis.size
  shape[#shape] = columns
  local parts = Tensor.empty({ axis.size, rows, width }, x.dtype)
  axis:all_gather(parts, x)
  local y = Tensor.empty({ rows, axis.size, width }, x.dtype)
  done("gather_columns", C.pg_permute(y.raw, parts.raw, order, 0), y)
  parts:release()
  if columns < width * axis.size then
    local all = y:view({ rows, axis.size * width })
    y:release()
    y = Tensor.empty({ rows, columns }, x.dtype)
    done("gather_columns", C.pg_slice(y.raw, all.raw, 1, 0, 0), y)
    all:release()
  end
  y = y:view(shape)
  if tape.wants(x) then
    tape.record(GATHER_COLUMNS, { x }, 1, {}, 0, y, { axis = axis, width = width, columns = columns })
  end
  return y
end

return ops
