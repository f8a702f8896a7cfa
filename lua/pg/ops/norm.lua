-- ops/norm.lua: RMSNorm and LayerNorm over the last dim, alone or of a sum.
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
local function alive(t) return t and t:alive().raw or nil end

-- The C call fills dx and dw together, so it is asked once: by grad_input where dx is wanted.
local RMSNORM = { name = "rmsnorm", mixed = true, based = true, grad_input = function(r, dy, d, add, base)
  local s = r.saved
  c.check(C.pg_rmsnorm_grad(raw(d[1]), raw(d[2]), dy.raw, s[1].raw, raw(s[2]), s[3].raw, raw(base[1]),
                            add[1] or 0, add[2] or 0))
end, again = function(s, a)
  local y, rstd = Tensor.like(s[1]), statistic(s[1])
  c.check(C.pg_rmsnorm(y.raw, rstd.raw, alive(s[1]), alive(s[2]), a.eps))
  rstd:release()
  return y
end, again_needs = { true, true } }

local LAYERNORM = { name = "layernorm", mixed = true, based = true, grad_input = function(r, dy, d, add, base)
  local s = r.saved
  c.check(C.pg_layernorm_grad(raw(d[1]), raw(d[2]), raw(d[3]), dy.raw, s[1].raw, raw(s[2]), s[3].raw, s[4].raw,
                              raw(base[1]), add[1] or 0, add[2] or 0, add[3] or 0))
end, again = function(s, a)
  local y, mean, rstd = Tensor.like(s[1]), statistic(s[1]), statistic(s[1])
  c.check(C.pg_layernorm(y.raw, mean.raw, rstd.raw, alive(s[1]), alive(s[2]), alive(s[5]), a.eps))
  mean:release()
  rstd:release()
  return y
end, again_needs = { true, true, [5] = true } }

local SUM = { name = "add", pass = function(_, _, dy) return dy end, grad_input = function() end }

-- sum = x + r, which the norm of it is recorded on.
local function record_sum(sum, x, r)
  if tape.wants(x, r) then tape.record(SUM, { x, r }, 2, {}, 0, sum) end
end

local function record_rmsnorm(y, x, w, rstd, eps)
  if tape.wants(x, w) then tape.record(RMSNORM, { x, w }, 2, { x, w or false, rstd }, 3, y, { eps = eps or 1e-5 }) end
  return y
end

local function record_layernorm(y, x, w, b, mean, rstd, eps)
  if tape.wants(x, w, b) then
    tape.record(LAYERNORM, { x, w, b }, 3, { x, w or false, mean, rstd, b or false }, 5, y, { eps = eps or 1e-5 })
  end
  return y
end

--- rmsnorm(x, w, eps) -> y like x.  x [..,D], w [D] or nil; eps defaults to 1e-5.
-- Zhang and Sennrich 2019.
function ops.rmsnorm(x, w, eps)
  local y, rstd = Tensor.like(x), statistic(x)
  done("rmsnorm", C.pg_rmsnorm(y.raw, rstd.raw, alive(x), alive(w), eps or 1e-5), y)
  return record_rmsnorm(y, x, w, rstd, eps)
end

--- add_rmsnorm(x, r, w, eps) -> sum, y.  sum = x + r and y = rmsnorm(sum, w, eps), in one pass.
function ops.add_rmsnorm(x, r, w, eps)
  local sum, y, rstd = Tensor.like(x), Tensor.like(x), statistic(x)
  done("add_rmsnorm", C.pg_add_rmsnorm(y.raw, sum.raw, rstd.raw, alive(x), alive(r), alive(w), eps or 1e-5), sum)
  record_sum(sum, x, r)
  return sum, record_rmsnorm(done("add_rmsnorm", 0, y), sum, w, rstd, eps)
end

--- layernorm(x, w, b, eps) -> y like x.  x [..,D], w and b [D] or nil; eps defaults to 1e-5.
-- Ba, Kiros and Hinton 2016.
function ops.layernorm(x, w, b, eps)
  local y, mean, rstd = Tensor.like(x), statistic(x), statistic(x)
  done("layernorm", C.pg_layernorm(y.raw, mean.raw, rstd.raw, alive(x), alive(w), alive(b), eps or 1e-5), y)
  return record_layernorm(y, x, w, b, mean, rstd, eps)
end

--- add_layernorm(x, r, w, b, eps) -> sum, y.  sum = x + r and y = layernorm(sum, w, b, eps), in one pass.
function ops.add_layernorm(x, r, w, b, eps)
  local sum, y, mean, rstd = Tensor.like(x), Tensor.like(x), statistic(x), statistic(x)
  done("add_layernorm", C.pg_add_layernorm(y.raw, sum.raw, mean.raw, rstd.raw, alive(x), alive(r), alive(w), alive(b),
                                           eps or 1e-5), sum)
  record_sum(sum, x, r)
  return sum, record_layernorm(done("add_layernorm", 0, y), sum, w, b, mean, rstd, eps)
end

return ops
