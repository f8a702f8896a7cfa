-- ops/comm.lua: collectives with gradients, as pairs: what is summed one way is copied the other.
local mesh = require "pg.mesh"
local tape = require "pg.tape"

local ops = {}

local SUM_VALUES = { name = "sum_values", pass = function(_, _, dy) return dy end, grad_input = function() end }

--- sum_values(x, axis) -> the sum of x over the ranks of an axis.  For losses: the gradient goes to
-- each rank's own share unchanged, because gradients are summed over the axis later.
function ops.sum_values(x, axis)
  axis = axis or mesh.ready().dp
  if axis.size == 1 then return x end
  local y = x:clone()
  axis:all_reduce(y)
  if tape.wants(x) then tape.record(SUM_VALUES, { x }, 1, {}, 0, y) end
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
