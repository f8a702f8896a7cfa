-- cases.lua: the table of op cases that test_grad.lua (finite differences) and test_shapes.lua (the
-- shape backend) walk.  A case is { op =, name =, inputs = shapes, f = tensors -> y }: f is a function of
-- its inputs alone, so dropout is keyed and ids are written out.  An input's shape may carry low and high
-- (uniform between them; default: normal).  still = true: the op has no gradient.
local case = {}
local list = {}

local function add(op, name, inputs, f, more)
  local entry = more or {}
  entry.op, entry.name, entry.inputs, entry.f = op, op .. (name == "" and "" or "_" .. name), inputs, f
  list[#list + 1] = entry
end

local function positive(...) return { low = 0.5, high = 2, ... } end

for _, op in ipairs { "relu", "silu", "gelu", "gelu_tanh", "tanh", "sigmoid", "exp", "square", "neg", "abs" } do
  add(op, "", { { 3, 7 } }, function(x) return pg[op](x) end)
end
for _, op in ipairs { "log", "sqrt" } do
  add(op, "", { positive(3, 7) }, function(x) return pg[op](x) end)
end

for _, op in ipairs { "add", "sub", "mul", "div", "maximum", "minimum" } do
  local low = op == "div" and positive or function(...) return { ... } end
  local function f(a, b) return pg[op](a, b) end
  add(op, "same", { { 2, 3, 5 }, low(2, 3, 5) }, f)
  add(op, "suffix2", { { 2, 3, 5 }, low(3, 5) }, f)
  add(op, "suffix1", { { 2, 3, 5 }, low(5) }, f)
  add(op, "one", { { 2, 3, 5 }, low(1) }, f)
  add(op, "scalar", { { 3, 5 }, low() }, f)
  add(op, "wider_right", { low(5), low(2, 5) }, f)
  add(op, "one_left", { low(1), low(3, 5) }, f)
  add(op, "ones_in_front", { { 1, 1, 5 }, low(5) }, f)
  add(op, "ones_in_front_right", { low(5), low(1, 1, 5) }, f)
  add(op, "number", { { 3, 5 } }, function(a) return pg[op](a, 0.75) end)
  add(op, "number_left", { low(3, 5) }, function(a) return pg[op](0.75, a) end)
  if op ~= "maximum" and op ~= "minimum" then -- no slope where both are equal
    add(op, "itself", { low(3, 5) }, function(a) return pg[op](a, a) end)
    add(op, "itself_inner", { low(3, 5) }, function(a) local x = pg.exp(a) return pg[op](x, x) end)
  end
end

add("scale", "", { { 3, 5 } }, function(x) return pg.scale(x, -1.7) end)
add("cast", "to_itself", { { 3, 5 } }, function(x) return pg.cast(pg.exp(x), x.dtype) end)
add("cast", "to_f64", { { 3, 5 } }, function(x) return pg.cast(pg.exp(x), "f64") end)
add("dropout", "keyed", { { 4, 9 } }, function(x) return pg.dropout(x, 0.4, { key = "a" }) end)
add("dropout", "place", { { 4, 9 } }, function(x)
  return pg.dropout(x, 0.4, { key = "a", first = 7, cols = 9, stride = 20, step = pg.step.block() })
end)
add("dropout", "none", { { 4, 9 } }, function(x) return pg.dropout(pg.exp(x), 0) end)

-- a [M,K], b [K,N], and stored transposed
for ta = 0, 1 do
  for tb = 0, 1 do
    local o = { ta = ta == 1, tb = tb == 1 }
    local function f(a, b) return pg.matmul(a, b, o) end
    local a, b = ta == 1 and { 7, 5 } or { 5, 7 }, tb == 1 and { 3, 7 } or { 7, 3 }
    add("matmul", "flat_" .. ta .. tb, { a, b }, f)
    add("matmul", "batched_" .. ta .. tb, { { 2, 3, unpack(a) }, { 2, 3, unpack(b) } }, f)
    if ta == 0 then add("matmul", "fold_" .. tb, { { 2, 3, unpack(a) }, b }, f) end
  end
end
add("matmul", "itself", { { 5, 5 } }, function(a) return pg.matmul(a, a, { tb = true }) end)

for _, kind in ipairs { "none", "gelu", "gelu_tanh" } do
  local activation = kind ~= "none" and kind or nil
  add("linear", kind, { { 2, 3, 7 }, { 5, 7 }, { 5 } }, function(x, w, b) return pg.linear(x, w, b, activation) end)
  add("linear", kind .. "_no_bias", { { 3, 7 }, { 5, 7 } }, function(x, w) return pg.linear(x, w, nil, activation) end)
end
add("linear", "one_row", { { 7 }, { 5, 7 }, { 5 } },
  function(x, w, b) return pg.linear(pg.reshape(x, { 1, 7 }), w, b) end)

add("rmsnorm", "", { { 2, 3, 13 }, { 13 } }, function(x, w) return pg.rmsnorm(x, w, 1e-5) end)
add("rmsnorm", "plain", { { 3, 13 } }, function(x) return pg.rmsnorm(x) end)
add("layernorm", "", { { 2, 3, 13 }, { 13 }, { 13 } }, function(x, w, b) return pg.layernorm(x, w, b, 1e-5) end)
add("layernorm", "no_bias", { { 3, 13 }, { 13 } }, function(x, w) return pg.layernorm(x, w) end)
add("layernorm", "plain", { { 3, 13 } }, function(x) return pg.layernorm(x) end)

-- The sum goes on beside the norm, so that two gradients meet in it.
local function of_sum(norm, ...)
  local sum, y = norm(...)
  return pg.mul(sum, y)
end
add("add_rmsnorm", "", { { 2, 3, 13 }, { 2, 3, 13 }, { 13 } },
  function(x, r, w) return of_sum(pg.add_rmsnorm, x, r, w, 1e-5) end)
add("add_rmsnorm", "plain", { { 3, 13 }, { 3, 13 } }, function(x, r) return select(2, pg.add_rmsnorm(x, r)) end)
add("add_rmsnorm", "past", { { 3, 13 }, { 3, 13 }, { 13 } }, function(x, r, w)
  local sum, y = pg.add_rmsnorm(pg.exp(x), pg.tanh(r), w)
  return pg.add(sum, pg.tanh(y)) -- the sum's gradient is also that of the result
end)
add("add_rmsnorm", "itself", { { 3, 13 } }, function(x)
  local y = pg.tanh(x)
  return pg.add(pg.add_rmsnorm(y, y))
end)
add("add_layernorm", "", { { 2, 3, 13 }, { 2, 3, 13 }, { 13 }, { 13 } },
  function(x, r, w, b) return of_sum(pg.add_layernorm, x, r, w, b, 1e-5) end)
add("add_layernorm", "past", { { 3, 13 }, { 3, 13 }, { 13 }, { 13 } }, function(x, r, w, b)
  local sum, y = pg.add_layernorm(pg.exp(x), pg.tanh(r), w, b)
  return pg.add(sum, pg.tanh(y))
end)

add("rope_table", "", { { 1 } }, function(x) return (pg.rope_table(7, 6, 1000, x.dtype)) end, { still = true })
local function rope(columns, heads, start, o)
  return { { 2, 5, columns * 6 } }, function(x)
    local cos, sin = pg.rope_table(5 + start, 6, 10000, x.dtype == "f64" and "f64" or "f32")
    return pg.rope(o and pg.scale(x, 2) or x, cos, sin, heads, start, o)
  end
end
add("rope", "all", rope(3, 3, 0))
add("rope", "packed_late", rope(5, 3, 4))
add("rope", "in_place", rope(5, 3, 4, { in_place = true }))
add("rope", "shared_gradient", { { 2, 5, 12 } }, function(x)
  local cos, sin = pg.rope_table(5, 6, 10000, x.dtype == "f64" and "f64" or "f32")
  local y, z = pg.tanh(x), pg.exp(x)
  return pg.scale(pg.add(pg.rope(y, cos, sin, 2), z), 2) -- z has rope's own gradient
end)

-- name, H, G, T, Tk, options; K = 6, B = 2
local attention = {
  { "causal", 3, 3, 5, 5, { causal = true } }, { "full", 2, 2, 5, 5, {} },
  { "grouped", 4, 2, 5, 5, { causal = true } }, { "one_key_head", 3, 1, 5, 5, { causal = true } },
  { "few_rows", 2, 1, 3, 7, { causal = true } }, { "cross", 2, 2, 3, 7, {} },
  { "lengths", 2, 1, 5, 5, { lengths = { 3, 0 } } },
    { "lengths_causal", 2, 2, 5, 5, { lengths = { 3, 5 }, causal = true } },
  { "scaled", 2, 2, 5, 5, { scale = 0.3 } }, { "dropout", 2, 1, 5, 5, { dropout = 0.4, key = "a", causal = true } },
  { "dropout_step", 2, 2, 3, 5, { dropout = 0.4, key = "b", step = true, sample0 = 3, head0 = 2, heads_all = 8 } },
  { "long", 2, 2, 67, 67, { causal = true } },
}
for _, a in ipairs(attention) do
  local name, heads, groups, rows, keys, settings = unpack(a)
  local function options()
    local o = { heads = heads, kv_heads = groups }
    for k, v in pairs(settings) do o[k] = v end
    if o.lengths then o.lengths = pg.tensor(o.lengths, "i32") end
    if o.step then o.step = pg.step.block() end
    return o
  end
  local q, kv = { 2, rows, heads * 6 }, { 2, keys, groups * 6 }
  add("attention", name, { q, kv, kv }, function(x, k, v) return pg.attention(x, k, v, options()) end)
  if rows == keys then
    add("attention", name .. "_packed", { { 2, rows, (heads + 2 * groups) * 6 } },
        function(x) return pg.attention(x, nil, nil, options()) end)
  end
end
add("attention", "itself", { { 2, 5, 12 } }, function(x) return pg.attention(x, x, x, { heads = 2 }) end)
add("attention", "itself_inner", { { 2, 5, 12 } }, function(x)
  local y = pg.tanh(x)
  return pg.attention(y, y, y, { heads = 2 })
end)
add("attention", "same_keys", { { 2, 5, 12 }, { 2, 5, 12 } },
  function(q, k) return pg.attention(q, k, k, { heads = 2 }) end)
add("swiglu", "", { { 2, 3, 14 } }, function(x) return pg.swiglu(x) end)

add("softmax", "", { { 4, 11 } }, function(x) return pg.softmax(x) end)
add("log_softmax", "", { { 4, 11 } }, function(x) return pg.log_softmax(x) end)
add("embedding", "", { { 7, 5 } },
  function(t) return pg.embedding(t, pg.tensor({ { 3, 0, 6 }, { 3, 3, 1 } }, "i32")) end)
add("embedding", "i64", { { 7, 5 } }, function(t) return pg.embedding(t, pg.tensor({ 6, 6 }, "i64")) end)
add("embedding", "part", { { 4, 3 } }, function(t)
  return pg.embedding(t, pg.tensor({ { 7, 5, 0 }, { 8, 7, 11 } }, "i32"), { first = 5, vocab = 12 })
end)
add("embedding", "padded", { { 6, 3 } },
  function(t) return pg.embedding(t, pg.tensor({ 4, 1, 4 }, "i32"), { vocab = 5 }) end)

local targets = { { 3, -100, 10 }, { 0, 2, -100 } }
local function loss(reduction, rows, dtype, step)
  return function(x)
    return (pg.cross_entropy(x, pg.tensor(rows, dtype), { reduction = reduction, step = step and pg.step.block() }))
  end
end
add("cross_entropy", "mean", { { 2, 3, 11 } }, loss(nil, targets, "i32"))
add("cross_entropy", "mean_i64", { { 2, 3, 11 } }, loss("mean", targets, "i64"))
add("cross_entropy", "none", { { 2, 3, 11 } }, loss("none", targets, "i32"))
add("cross_entropy", "step", { { 2, 3, 11 } }, loss("mean", targets, "i32", true))
add("cross_entropy", "one_row", { { 1, 11 } }, loss("none", { 4 }, "i32"))
add("cross_entropy", "one_row_step", { { 1, 11 } }, loss("none", { 4 }, "i32", true))
add("cross_entropy", "in_place", { { 2, 3, 11 } }, function(x) -- over an intermediate tensor; beside another use
  local y = pg.tanh(x)
  local z = pg.scale(y, 3)
  local losses = pg.cross_entropy(z, pg.tensor(targets, "i32"), { in_place = true })
  return pg.add(losses, pg.cast(pg.sum(y), losses.dtype))
end)
add("cross_entropy", "in_place_leaf", { { 2, 3, 11 } }, function(x)
  return (pg.cross_entropy(x, pg.tensor(targets, "i32"), { in_place = true }))
end)
add("cross_entropy", "all_ignored", { { 2, 11 } }, loss("mean", { -100, -100 }, "i32"))
-- The ids cut over ranks, all of them played here: an axis whose all_gather brings the stats of every part.  The
-- value is that of one part, the gradient of its own columns comes from each.
local vocab_targets = { { 3, -100, 10 }, { 0, 4, 5 } }
local function cut_loss(widths, settings)
  return function(x)
    local c = require "pg.c"
    local rows, padded, stats, axes, firsts, first = 6, {}, {}, {}, {}, 0
    local ids = pg.tensor(vocab_targets, "i32")
    for i, width in ipairs(widths) do
      local part = pg.slice(x, 3, first + 1, width)
      padded[i] = pg.concat({ part, pg.full({ 2, 3, 2 }, 1e3, x.dtype) }, 3)
      stats[i] = pg.empty({ 2, rows }, x.dtype == "f64" and "f64" or "f32")
      c.check(c.C.pg_vocab_stats(stats[i].raw, padded[i].raw, ids.raw, first, width, 11, -100))
      firsts[i], first = first, first + width
    end
    local all = pg.concat(stats, 1)
    local y
    for i, width in ipairs(widths) do
      axes[i] = { size = #widths, all_gather = function(_, out) out:view({ 2 * #widths, rows }):copy_from(all) end }
      local o = { axis = axes[i], first = firsts[i], valid = width, vocab = 11 }
      for k, v in pairs(settings) do o[k] = v == "step" and pg.step.block() or v end
      local value = pg.vocab_cross_entropy(padded[i], ids, o)
      y = y and pg.add(y, pg.sub(value, value:detach())) or value
    end
    return y
  end
end
add("vocab_cross_entropy", "whole", { { 2, 3, 11 } },
  function(x) return (pg.vocab_cross_entropy(x, pg.tensor(vocab_targets, "i32"))) end)
add("vocab_cross_entropy", "padded", { { 2, 3, 11 } },
  function(x) return (pg.vocab_cross_entropy(x, pg.tensor({ 3, -100, 8, 0, 4, 5 }, "i32"), { valid = 9 })) end)
add("vocab_cross_entropy", "cut", { { 2, 3, 11 } }, cut_loss({ 5, 0, 6 }, {}))
add("vocab_cross_entropy", "cut_step_in_place", { { 2, 3, 11 } },
  cut_loss({ 1, 7, 3 }, { step = "step", in_place = true }))

for _, chunk in ipairs { 0, 1, 4, 6, 100 } do
  add("head_loss", "chunk" .. chunk, { { 2, 3, 5 }, { 11, 5 } }, function(x, w)
    return (pg.head_loss(pg.tanh(x), w, pg.tensor(vocab_targets, "i32"), { chunk = chunk }))
  end)
end
add("head_loss", "leaves", { { 6, 5 }, { 11, 5 } }, function(x, w)
  return (pg.head_loss(x, w, pg.tensor(vocab_targets, "i32"), { chunk = 4, step = pg.step.block() }))
end)
add("head_loss", "padded", { { 6, 5 }, { 11, 5 } }, function(x, w)
  return (pg.head_loss(x, w, pg.tensor({ 3, -100, 8, 0, 4, 5 }, "i32"), { chunk = 4, valid = 9, vocab = 9 }))
end)
add("argmax", "", { { 2, 3, 11 } }, function(x) return pg.argmax(x) end, { still = true })
add("sample", "", { { 3, 11 } }, function(x) return pg.sample(x, { seed = 3, top_k = 4 }) end, { still = true })

for _, op in ipairs { "sum", "mean", "max", "min" } do
  add(op, "all", { { 3, 4, 5 } }, function(x) return pg[op](x) end)
  add(op, "all_kept", { { 3, 4 } }, function(x) return pg[op](x, nil, true) end)
  for dim = 1, 3 do add(op, "dim" .. dim, { { 3, 4, 5 } }, function(x) return pg[op](x, dim) end) end
  add(op, "last_kept", { { 3, 4, 5 } }, function(x) return pg[op](x, -1, true) end)
end

add("reshape", "", { { 3, 4, 5 } }, function(x) return pg.reshape(x, { 5, -1 }) end)
add("reshape", "inner", { { 3, 4 } },
  function(x) local y = pg.exp(x) return pg.mul(pg.reshape(y, { 12 }), pg.reshape(y, { 12 })) end)
for dim = 1, 3 do
  add("slice", "dim" .. dim, { { 3, 4, 5 } }, function(x) return pg.slice(x, dim, 2, 2) end)
  local b = { 3, 4, 5 }
  b[dim] = 2
  add("concat", "dim" .. dim, { { 3, 4, 5 }, b }, function(x, y) return pg.concat({ x, y }, dim) end)
end
add("slice", "twice", { { 4, 3 } }, function(x) return pg.add(pg.slice(x, 1, 1, 3), pg.slice(x, 1, 2, 3)) end)
add("concat", "three_and_itself", { { 2, 3 }, { 2, 3 } }, function(x, y) return pg.concat({ x, y, x }, -1) end)
for _, order in ipairs { { 2, 1 }, { 3, 1, 2 }, { 1, 3, 2 }, { 3, 2, 1 }, { 1, 3, 2, 4 }, { 4, 2, 1, 3 } } do
  local shape = { 2, 3, 4, 5 }
  add("permute", table.concat(order), { { unpack(shape, 1, #order) } }, function(x) return pg.permute(x, order) end)
end
add("transpose", "", { { 2, 3, 4 } }, function(x) return pg.transpose(x) end)
add("transpose", "outer", { { 2, 3, 4 } }, function(x) return pg.transpose(x, 1, 3) end)

add("op", "one_input", { { 3, 5 } }, function(x)
  local f = pg.op { forward = function(context, a) context.a = context.save(a) return a * a * a end,
                    grad = function(context, dy) return dy * context.a * context.a * 3 end }
  return f(x)
end)
add("op", "two_inputs_one_without", { { 3, 5 }, { 3, 5 } }, function(x, y)
  local f = pg.op { name = "left", forward = function(_, a, factor) return pg.scale(a, factor) end,
                    grad = function(_, dy) return pg.scale(dy, 2) end }
  return pg.add(f(x, 2, y), y)
end)
add("op", "five_inputs", { { 3 }, { 3 }, { 3 }, { 3 }, { 3 } }, function(...)
  local f = pg.op { forward = function(_, a, b, d, e, g) return a + b + d + e + g end,
                    grad = function(_, dy) return dy, dy, dy, dy, dy end }
  return f(...)
end)
add("op", "hands_its_input_on", { { 3 } }, function(x)
  return pg.op { forward = function(_, a) return a end, grad = function(_, dy) return dy end }(pg.exp(x))
end)

add("recompute", "", { { 3, 7 }, { 5, 7 } }, function(x, w)
  return pg.recompute(function(a, b) return pg.tanh(pg.linear(pg.exp(a), b)) end, x, w)
end)
add("recompute", "nested", { { 3, 7 }, { 7, 7 } }, function(x, w)
  local function inner(a, b) return pg.tanh(pg.linear(a, b)) end
  return pg.recompute(function(a, b) return pg.recompute(inner, pg.recompute(inner, a, b), b) end, x, w)
end)
add("recompute", "captured", { { 3, 7 }, { 5, 7 } }, function(x, w)
  return pg.recompute(function(a) return pg.linear(a, w) end, pg.exp(x))
end)
add("recompute", "captured_alone", { { 5, 7 } }, function(w) -- the input wants no gradient
  return pg.recompute(function(a) return pg.linear(a, w) end, pg.ones({ 3, 7 }, w.dtype))
end)
add("recompute", "dropout", { { 4, 9 } }, function(x)
  require("pg.ops.elementwise").dropout_calls = 0
  return pg.recompute(function(a) return pg.dropout(pg.dropout(pg.exp(a), 0.3), 0.3) end, x)
end)
add("recompute", "identity", { { 4, 9 } }, function(x) return pg.recompute(function(a) return a end, pg.exp(x)) end)

add("sum_values", "", { { 3, 5 } }, function(x) return pg.sum_values(pg.square(x)) end)
add("all_reduce", "", { { 3, 5 } }, function(x) return pg.all_reduce(x) end, { still = true })

-- On an axis of one rank; between ranks: tests/ranks/comm_ops.lua, tensor_parallel.lua.
local split, one = require "pg.ops.split_linear", require("pg.mesh").ready().tp
for _, op in ipairs { "copy_to_ranks", "reduce_from_ranks", "gather_rows", "join_rows", "reduce_scatter_rows",
                      "gather_columns" } do
  add(op, "", { { 4, 6 } }, function(x) return pg[op](pg.square(x), one) end)
end
add("linear_gathered", "", { { 4, 6 }, { 3, 6 } }, function(x, w) return split.linear_gathered(x, w, nil, nil, one) end)
add("linear_gathered", "gelu", { { 2, 2, 6 }, { 3, 6 }, { 3 } },
  function(x, w, b) return split.linear_gathered(x, w, b, "gelu", one) end)
add("linear_gathered", "twice", { { 4, 6 }, { 3, 6 } }, function(x, w)
  local h = pg.tanh(x)
  return pg.add(split.linear_gathered(h, w, nil, nil, one), pg.linear(h, w))
end)
add("linear_scattered", "", { { 4, 6 }, { 3, 6 } }, function(x, w) return split.linear_scattered(x, w, nil, one) end)
add("linear_scattered", "bias", { { 2, 2, 6 }, { 3, 6 }, { 3 } },
  function(x, w, b) return split.linear_scattered(pg.tanh(x), w, b, one) end)

-- A tensor with several uses: the shape of a residual block.
add("add", "residual", { { 3, 7 }, { 7, 7 }, { 7 } }, function(x, w, g)
  local h = pg.add(x, pg.linear(pg.rmsnorm(x, g), w))
  return pg.add(h, pg.linear(pg.rmsnorm(h, g), w))
end)
-- a and b share the gradient of their sum; c adds to a's before b's is used.
add("add", "shared_gradient", { { 3, 5 }, { 3, 5 } }, function(x, y)
  local a = pg.exp(x)
  local b = pg.tanh(y)
  local d = pg.square(a)
  return pg.add(d, pg.scale(pg.add(a, b), 2))
end)
add("add", "shared_gradient_of_views", { { 3, 5 }, { 3, 5 } }, function(x, y)
  local a = pg.exp(x)
  local b = pg.reshape(pg.tanh(y), { 15 })
  local d = pg.square(a)
  return pg.add(pg.reshape(d, { 15 }), pg.scale(pg.add(pg.reshape(a, { 15 }), b), 2))
end)
add("add", "chain_of_views", { { 4, 6 } }, function(x)
  local y = pg.tanh(x)
  local flat = pg.reshape(y, { 24 })
  return pg.add(pg.add(flat, pg.reshape(pg.reshape(flat, { 2, 12 }), { 24 })), pg.mul(flat, flat))
end)

case.list = list

--- case.ops() -> { [name] = file } of every function in lua/pg/ops.
function case.ops()
  local names = {}
  for _, file in ipairs(pg.fs.list "lua/pg/ops") do
    local module = file:match "^(.*)%.lua$"
    for name, f in pairs(module and require("pg.ops." .. module) or {}) do
      if type(f) == "function" then names[name] = file end
    end
  end
  return names
end

--- case.inputs(entry, dtype) -> its tensors, the same in every call.
function case.inputs(entry, dtype)
  local tensors = {}
  for i, shape in ipairs(entry.inputs) do
    local dims = { unpack(shape) }
    local key = entry.name .. i
    tensors[i] = shape.low and pg.rand(dims, { key = key, low = shape.low, high = shape.high, dtype = "f32" })
      or pg.randn(dims, { key = key, dtype = "f32" })
    if dtype ~= "f32" then tensors[i] = tensors[i]:to(dtype) end
  end
  return tensors
end

return case
