-- ops/comm.lua: collectives with gradients.
local c = require "pg.c"
local mesh = require "pg.mesh"
local tape = require "pg.tape"

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

return ops
