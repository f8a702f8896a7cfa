-- gemm.lua: one matrix product with its epilogue, as matmul, split_linear and vocab (ops/) share it.
local c = require "pg.c"
local Tensor = require "pg.tensor"
local C, ffi = c.C, c.ffi

local gemm = {}
local block = ffi.new "pg_gemm"
local epilogues = { -- of the product, of the gradient that a product makes, and the activation alone
  gelu = { C.PG_EPILOGUE_GELU, C.PG_EPILOGUE_GELU_GRAD, C.PG_GELU },
  gelu_tanh = { C.PG_EPILOGUE_GELU_TANH, C.PG_EPILOGUE_GELU_TANH_GRAD, C.PG_GELU_TANH },
}

--- gemm.options(ta, tb, alpha, beta, bias, epilogue, aux) -> the one options block, filled; it is read during
-- the call only.
function gemm.options(ta, tb, alpha, beta, bias, epilogue, aux)
  block.transpose_a, block.transpose_b = ta and 1 or 0, tb and 1 or 0
  block.alpha, block.beta = alpha or 1, beta or 0
  block.bias, block.aux = bias and bias.raw, aux and aux.raw
  block.epilogue = epilogue or C.PG_EPILOGUE_NONE
  block.scale_a, block.scale_b = nil, nil
  return block
end

--- gemm.product(out, a, b, ta, tb, beta, epilogue, aux): out = epilogue(a b) + beta out, unrecorded.
function gemm.product(out, a, b, ta, tb, beta, epilogue, aux)
  c.check(C.pg_matmul(out.raw, a.raw, b.raw, gemm.options(ta, tb, 1, beta, nil, epilogue, aux)))
end

--- gemm.linear(y, x, w, bias, epilogue, aux) -> status of y = epilogue(x w^T + bias).
function gemm.linear(y, x, w, bias, epilogue, aux)
  return C.pg_matmul(y.raw, x.raw, w.raw, gemm.options(false, true, 1, 0, bias, epilogue, aux))
end

--- gemm.epilogue(activation) -> the code of an activation that the product itself does, or nil for none.
function gemm.epilogue(activation)
  if not activation then return nil end
  return (epilogues[activation] or c.fail("linear: activation %s is unknown (gelu, gelu_tanh)", activation))[1]
end

--- gemm.slope(x, add) -> the epilogue and aux by which a product that makes the gradient of x makes the one before
-- x's activation at once, which is then what its record gets; nil where x has none, or others add to its gradient.
function gemm.slope(x, add)
  local r = x.record
  if not (r and r.op.again == gemm.again and r.a.activation) or r.reads > 1 or add ~= 0 then return nil end
  r.has_slope = true
  return epilogues[r.a.activation][2], r.saved[3]
end

--- gemm.before_epilogue(r, dy) -> the gradient before the epilogue of record r: dy itself, or dy times the slope of
-- r.a.activation at the saved value r.saved[3].  Both halves of a rule need it, so the record owns it as r.extra.
function gemm.before_epilogue(r, dy)
  local aux = r.saved[3]
  if not aux or r.has_slope then return dy end
  if not r.extra then
    r.extra = Tensor.like(dy):keep()
    c.check(C.pg_unary_grad(r.extra.raw, dy.raw, aux.raw, epilogues[r.a.activation][3], 0))
  end
  return r.extra
end

gemm.again_needs = { [3] = true }
--- gemm.again(saved, a) -> the result of a record with an activation, from the value before it.
function gemm.again(saved, a)
  local y = Tensor.like(saved[3])
  c.check(C.pg_unary(y.raw, saved[3].raw, epilogues[a.activation][3]))
  return y
end

return gemm
