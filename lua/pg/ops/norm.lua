-- ops/norm.lua: RMSNorm and LayerNorm over the last dim.
local c = require "pg.c"
local Tensor = require "pg.tensor"
local tape = require "pg.tape"
local done = require("pg.watch").done
local C = c.C

local ops = {}

-- One statistic for each row: f32, or f64 for f64.
local function statistic(x)
  local width = x.shape[#x.shape] or c.fail("norm: a scalar has no last dim")
  return Tensor.empty({ width > 0 and x.count / width or 0 }, x.dtype == "f64" and "f64" or "f32")
end

local function raw(t) return t and t.raw or nil end

-- The C call fills dx and dw together, so it is asked once: by grad_input where dx is wanted.
local RMSNORM = { name = "rmsnorm", grad_input = function(r, dy, d, add)
  local s = r.saved
  c.check(C.pg_rmsnorm_grad(raw(d[1]), raw(d[2]), dy.raw, s[1].raw, raw(s[2]), s[3].raw, nil,
                            add[1] or 0, add[2] or 0))
end }

--- rmsnorm(x, w, eps) -> y like x.  x [..,D], w [D] or nil; eps defaults to 1e-5.
-- Zhang and Sennrich 2019.
function ops.rmsnorm(x, w, eps)
  local y, rstd = Tensor.like(x), statistic(x)
  done("rmsnorm", C.pg_rmsnorm(y.raw, rstd.raw, x:alive().raw, w and w:alive().raw, eps or 1e-5), y)
  if tape.wants(x, w) then tape.record(RMSNORM, { x, w }, 2, { x, w or false, rstd }, 3, y) end
  return y
end

local LAYERNORM = { name = "layernorm", grad_input = function(r, dy, d, add)
  local s = r.saved
  c.check(C.pg_layernorm_grad(raw(d[1]), raw(d[2]), raw(d[3]), dy.raw, s[1].raw, raw(s[2]), s[3].raw,
                              s[4].raw, nil, add[1] or 0, add[2] or 0, add[3] or 0))
end }

--- layernorm(x, w, b, eps) -> y like x.  x [..,D], w and b [D] or nil; eps defaults to 1e-5.
-- Ba, Kiros and Hinton 2016.
function ops.layernorm(x, w, b, eps)
  local y, mean, rstd = Tensor.like(x), statistic(x), statistic(x)
  done("layernorm", C.pg_layernorm(y.raw, mean.raw, rstd.raw, x:alive().raw, w and w:alive().raw,
                                   b and b:alive().raw, eps or 1e-5), y)
  if tape.wants(x, w, b) then
    tape.record(LAYERNORM, { x, w, b }, 3, { x, w or false, mean, rstd }, 4, y)
  end
  return y
end

return ops
