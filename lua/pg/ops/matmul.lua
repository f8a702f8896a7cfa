-- ops/matmul.lua: matrix products and the linear layer.
local c = require "pg.c"
local Tensor = require "pg.tensor"
local tape = require "pg.tape"
local gemm = require "pg.gemm"
local done = require("pg.watch").done
local C = c.C

local ops = {}
local options, product, before_epilogue = gemm.options, gemm.product, gemm.before_epilogue

-- y = A B with A = a or a^T, B = b or b^T:  dA = dy B^T, dB = A^T dy, transposed back where needed.
local function grad_a(da, dy, b, ta, tb, beta)
  if ta then product(da, b, dy, tb, true, beta) else product(da, dy, b, false, not tb, beta) end
end
local function grad_b(db, dy, a, ta, tb, beta)
  if tb then product(db, dy, a, true, ta, beta) else product(db, a, dy, not ta, false, beta) end
end

local MATMUL = { name = "matmul", grad_input = function(r, dy, d, add)
  local a, b = r.saved[1], r.saved[2]
  if d[1] then grad_a(d[1], dy, b, r.a.ta, r.a.tb, add[1]) end
  if d[2] then grad_b(d[2], dy, a, r.a.ta, r.a.tb, add[2]) end
end }

--- matmul(a, b, o) -> y [..,M,N] = a [..,M,K] b [..,K,N].  o.ta, o.tb: that side is stored transposed.
-- b may be 2-D and shared by all of a's leading dims.
function ops.matmul(a, b, o)
  local ta, tb = o and o.ta or false, o and o.tb or false
  local na, nb = #a.shape, #b.shape
  if na < 2 or nb < 2 then
    c.fail("matmul: a is %s, b is %s; both need at least 2 dims", a:describe(), b:describe())
  end
  if nb == 2 and na > 2 and ta then
    c.fail("matmul: a is %s with ta and b is %s; with ta both need the same leading dims",
           a:describe(), b:describe())
  end
  local shape = {}
  for i = 1, na - 2 do shape[i] = a.shape[i] end
  shape[na - 1] = a.shape[ta and na or na - 1]
  shape[na] = b.shape[tb and nb - 1 or nb]
  local y = Tensor.empty(shape, a.dtype)
  done("matmul", C.pg_matmul(y.raw, a:alive().raw, b:alive().raw, options(ta, tb)), y)
  if tape.wants(a, b) then tape.record(MATMUL, { a, b }, 2, { a, b }, 2, y, { ta = ta, tb = tb }) end
  return y
end

-- Linear keeps weights as [out,in] (PyTorch, Hugging Face): y = x w^T + bias.
local LINEAR = { name = "linear", weights = { [2] = true, [3] = true }, mixed = true, remakes = { true },
  again_if = function(r) return r.a.activation end,
  again = gemm.again, again_needs = gemm.again_needs,
  grad_input = function(r, dy, d, add)
    if not d[1] then return end
    product(d[1], before_epilogue(r, dy), r.saved[2], false, false, add[1], gemm.slope(r.inputs[1], add[1]))
  end,
  grad_weight = function(r, dy, d, add)
    local g = before_epilogue(r, dy)
    local rows = g:view({ -1, g.shape[#g.shape] })
    if d[2] then
      local x, again = tape.saved(r, 1)
      local x2 = x:view({ -1, x.shape[#x.shape] })
      product(d[2], rows, x2, true, false, add[2])
      x2:release()
      if again then x:release() end
    end
    if d[3] then c.check(C.pg_reduce(d[3].raw, rows.raw, C.PG_SUM, 0, add[3])) end
    rows:release()
  end }

--- linear(x, w, bias, activation) -> y [..,out].  x [..,in], w [out,in], bias [out] or nil;
-- activation nil, "gelu" or "gelu_tanh", done by the product itself.
function ops.linear(x, w, bias, activation)
  local shape = { unpack(x.shape) }
  shape[#shape] = w.shape[1]
  local y = Tensor.empty(shape, x.dtype)
  local epilogue = gemm.epilogue(activation)
  local records = tape.wants(x, w, bias)
  local aux = epilogue and records and Tensor.like(y) or nil
  if bias then bias:alive() end
  done("linear", gemm.linear(y, x:alive(), w:alive(), bias, epilogue, aux), y)
  if records then
    tape.record(LINEAR, { x, w, bias }, 3, { x, w, aux or false }, 3, y, { activation = activation })
  end
  return y
end

return ops
