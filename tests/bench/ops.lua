-- ops.lua: the time of single ops on the device, beside their floors: bytes at the copy rate, products at the
-- rate of a good one.  Warm, the mean of many calls that follow one another.
--   pgrun tests/bench/ops.lua [--shape=gpt2_1.5b] [--rows=16384]
local c = require "pg.c"
local gemm = require "pg.gemm"
local Tensor = require "pg.tensor"
local C = c.C

local SHAPES = { -- width, hidden width, width of attention, layernorm?  _tp2: a rank's half of each layer
  ["gpt2_1.5b"] = { 1600, 6400, 1600, true }, gpt2_124m = { 768, 3072, 768, true },
  llama7b = { 4096, 11008, 4096, false }, llama7b_tp2 = { 4096, 5504, 2048, false },
}
local COPY, PRODUCTS = 4.2e12, 740e12 -- bytes and FLOPs a second
local WARM, SECONDS = 3, 0.05

local o = { shape = "gpt2_1.5b", rows = "16384" }
for _, word in ipairs(arg) do
  local key, value = word:match "^%-%-(%w+)=(.+)$"
  if not o[key] then c.fail("ops.lua: unknown option %s", word) end
  o[key] = value
end
local n, shape = tonumber(o.rows), SHAPES[o.shape] or c.fail("ops.lua: no shape %s", o.shape)
local D, F, A, layer = unpack(shape)

-- Seconds of one call.
local function time(f)
  for _ = 1, WARM do f() end
  c.check(C.pg_sync())
  local calls, start = 4, C.pg_time()
  for _ = 1, calls do f() end
  c.check(C.pg_sync())
  calls = math.max(4, math.min(1000, math.ceil(SECONDS / ((C.pg_time() - start) / calls))))
  start = C.pg_time()
  for _ = 1, calls do f() end
  c.check(C.pg_sync())
  return (C.pg_time() - start) / calls
end

local function tell(name, seconds, floor)
  print(("%-44s %8.1f us  floor %8.1f us  %5.2f"):format(name, seconds * 1e6, floor * 1e6, seconds / floor))
end

local function moves(name, bytes, f) tell(name, time(f), bytes / COPY) end
local function multiplies(name, flops, f) tell(name, time(f), flops / PRODUCTS) end
local function random(dims, dtype)
  local t = Tensor.empty(dims, dtype or "bf16")
  c.check(C.pg_random_normal(t.raw, 1, 1, 0, 0.02, 0, 0, 0))
  return t
end

-- ---- norms ----
local x, dy, y, base = random { n, D }, random { n, D }, random { n, D }, random { n, D }
local w, b = random { D }, random { D }
local dw, db = random({ D }, "f32"), random({ D }, "f32")
local mean, rstd = Tensor.empty({ n }, "f32"), Tensor.empty({ n }, "f32")
local nd = n * D * 2
if layer then
  moves("layernorm", 2 * nd, function()
    c.check(C.pg_layernorm(y.raw, mean.raw, rstd.raw, x.raw, w.raw, b.raw, 1e-5))
  end)
  moves("add_layernorm", 4 * nd, function()
    c.check(C.pg_add_layernorm(y.raw, base.raw, mean.raw, rstd.raw, x.raw, dy.raw, w.raw, b.raw, 1e-5))
  end)
  moves("layernorm_grad, with a base", 4 * nd, function()
    c.check(C.pg_layernorm_grad(y.raw, dw.raw, db.raw, dy.raw, x.raw, w.raw, mean.raw, rstd.raw, base.raw, 0, 1, 1))
  end)
else
  moves("rmsnorm", 2 * nd, function() c.check(C.pg_rmsnorm(y.raw, rstd.raw, x.raw, w.raw, 1e-5)) end)
  moves("add_rmsnorm", 4 * nd, function()
    c.check(C.pg_add_rmsnorm(y.raw, base.raw, rstd.raw, x.raw, dy.raw, w.raw, 1e-5))
  end)
  moves("rmsnorm_grad, with a base", 4 * nd, function()
    c.check(C.pg_rmsnorm_grad(y.raw, dw.raw, dy.raw, x.raw, w.raw, rstd.raw, base.raw, 0, 1))
  end)
end
moves("copy", 2 * nd, function() c.check(C.pg_copy(y.raw, x.raw)) end)
moves("add", 3 * nd, function() c.check(C.pg_binary(y.raw, x.raw, base.raw, C.PG_ADD, 0)) end)

-- ---- linear layers ----
-- of_gelu: its input is what GELU made.
local function linear(name, inner, outer, epilogue, of_gelu)
  local a, g, weight = random { n, inner }, random { n, outer }, random { outer, inner }
  local grad = random({ outer, inner }, "f32")
  local bias, dbias = layer and random { outer } or nil, random({ outer }, "f32")
  local out, aux, da = random { n, outer }, epilogue and random { n, outer } or nil, random { n, inner }
  local flops = 2 * n * inner * outer
  multiplies(name .. " forward", flops, function() c.check(gemm.linear(out, a, weight, bias, epilogue, aux)) end)
  if epilogue then
    multiplies(name .. " forward without epilogue", flops, function()
      c.check(gemm.linear(out, a, weight, bias))
    end)
    moves(name .. " gradient of gelu", 3 * 2 * n * outer, function()
      c.check(C.pg_unary_grad(out.raw, g.raw, aux.raw, C.PG_GELU_TANH, 0))
    end)
  end
  multiplies(name .. " gradient of input", flops, function() gemm.product(da, g, weight) end)
  if of_gelu then
    local before = random { n, inner }
    multiplies(name .. " gradient before GELU", flops, function()
      gemm.product(da, g, weight, false, false, 0, C.PG_EPILOGUE_GELU_TANH_GRAD, before)
    end)
    before:free()
  end
  multiplies(name .. " gradient of weight, added", flops, function()
    gemm.product(grad, g, a, true, false, 1)
  end)
  if bias then
    moves(name .. " gradient of bias, added", 2 * n * outer, function()
      c.check(C.pg_reduce(dbias.raw, g.raw, C.PG_SUM, 0, 1))
    end)
  end
  for _, t in ipairs { a, g, weight, grad, out, da } do t:free() end
  if aux then aux:free() end
end
linear("qkv", D, 3 * A)
linear("out", A, D)
if layer then
  linear("up", D, F, C.PG_EPILOGUE_GELU_TANH)
else
  linear("gate and up", D, 2 * F)
  local both, grad, h, dboth = random { n, 2 * F }, random { n, F }, random { n, F }, random { n, 2 * F }
  moves("swiglu", 3 * 2 * n * F, function() c.check(C.pg_swiglu(h.raw, both.raw)) end)
  moves("swiglu_grad", 5 * 2 * n * F, function() c.check(C.pg_swiglu_grad(dboth.raw, grad.raw, both.raw, 0)) end)
  for _, t in ipairs { both, grad, h, dboth } do t:free() end
end
linear("down", F, D, nil, layer)
