-- test_shapes.lua: what ops refuse and how they say it, and the shape backend.  Each message must begin
-- with the file and line of the call in this file, and hold the values and the rule.
local check = require "tests.check"
local cases = require "tests.lua.cases"
local c = require "pg.c"
local equal = check.equal
local tests = {}

local function t(...) return pg.randn({ ... }) end
local function ids(values, dtype) return pg.tensor(values, dtype or "i32") end

-- op, what is wrong, the call (no tail call, which would leave no line), the text that the message holds.
local bad = {}
local function refuses(op, name, f, text) bad[#bad + 1] = { op = op, name = name, f = f, text = text } end

for _, op in ipairs { "relu", "silu", "gelu", "gelu_tanh", "tanh", "sigmoid", "exp", "log", "sqrt", "square", "neg",
  "abs" } do
  refuses(op, "integers", function() local _ = pg[op](ids { 1, 2 }) end,
    op .. ": x is [2] i32; it must be f32, f64, bf16 or f16")
end
local names = { maximum = "max", minimum = "min" }
for _, op in ipairs { "add", "sub", "mul", "div", "maximum", "minimum" } do
  refuses(op, "shapes", function() local _ = pg[op](t(4, 3), t(4)) end, (names[op] or op) ..
    ": a is [4,3] f32, b is [4] f32; b must have the shape of a, its last dims, or one number")
  refuses(op, "dtypes", function() local _ = pg[op](t(3), t(3):to "f64") end,
    (names[op] or op) .. ": a is [3] f32, b is [3] f64; their dtypes must be equal (cast one of them)")
  refuses(op, "text", function() local _ = pg[op](t(3), "x") end, op .. ": a tensor and a string; give two tensors")
  refuses(op, "numbers", function() local _ = pg[op](1, 2) end, op .. ": a number and a number; give two tensors")
end
refuses("scale", "integers", function() local _ = pg.scale(ids { 1 }, 2) end,
  "scale: axpby: x is [1] i32; it must be f32, f64, bf16 or f16")
refuses("cast", "dtype", function() local _ = pg.cast(t(3), "f31") end, "dtype f31 is unknown")
refuses("dropout", "p", function() local _ = pg.dropout(t(3), 1) end, "dropout: p is 1, outside [0,1)")
refuses("dropout", "integers", function() local _ = pg.dropout(ids { 1 }, 0.5) end, "dropout: x is [1] i32")

refuses("matmul", "inner", function() local _ = pg.matmul(t(2, 5, 7), t(6, 3)) end,
  "matmul: a is [2,5,7] f32, b is [6,3] f32; inner sizes 7 and 6 differ")
refuses("matmul", "vector", function() local _ = pg.matmul(t(7), t(7, 3)) end,
  "matmul: a is [7] f32, b is [7,3] f32; both need at least 2 dims")
refuses("matmul", "leading", function() local _ = pg.matmul(t(2, 5, 7), t(3, 7, 3)) end, "leading dims must be equal")
refuses("matmul", "ta", function() local _ = pg.matmul(t(2, 7, 5), t(7, 3), { ta = true }) end,
  "with ta both need the same leading dims")
refuses("linear", "inner", function() local _ = pg.linear(t(32, 128), t(96, 256)) end,
  "linear: matmul: a is [32,128] f32, b is [96,256] f32 transposed; inner sizes 128 and 256 differ")
refuses("linear", "bias", function() local _ = pg.linear(t(3, 7), t(5, 7), t(4)) end, "linear: matmul: bias is [4] f32")
refuses("linear", "activation", function() local _ = pg.linear(t(3, 7), t(5, 7), nil, "relu6") end,
  "linear: activation relu6 is unknown (gelu, gelu_tanh)")

refuses("rmsnorm", "width", function() local _ = pg.rmsnorm(t(3, 13), t(12)) end, "rmsnorm: w is [12] f32")
refuses("rmsnorm", "scalar", function() local _ = pg.rmsnorm(t()) end, "norm: a scalar has no last dim")
refuses("layernorm", "width", function() local _ = pg.layernorm(t(3, 13), t(13), t(14)) end, "layernorm: b is [14] f32")
refuses("rmsnorm", "integers", function() local _ = pg.rmsnorm(ids { 1, 2 }) end,
  "rmsnorm: x is [2] i32; it must be f32, f64, bf16 or f16")
refuses("rmsnorm", "dtypes", function() local _ = pg.rmsnorm(t(3, 13):to "bf16", t(13)) end,
  "rmsnorm: w is [13] f32, x is [3,13] bf16; their dtypes must be equal")
refuses("add_rmsnorm", "shapes", function() local _ = pg.add_rmsnorm(t(3, 13), t(13), t(13)) end,
  "add_rmsnorm: r is [13] f32, x is [3,13] f32; their shapes must be equal")
refuses("add_rmsnorm", "width", function() local _ = pg.add_rmsnorm(t(3, 13), t(3, 13), t(12)) end,
  "add_rmsnorm: w is [12] f32")
refuses("add_layernorm", "dtypes", function() local _ = pg.add_layernorm(t(3, 13), t(3, 13):to "f64") end,
  "add_layernorm: r is [3,13] f64, x is [3,13] f32; their dtypes must be equal")
refuses("rope_table", "odd", function() local _ = pg.rope_table(8, 7) end, "rope: head width 7 is odd; it must be even")
refuses("rope", "rows", function()
  local cos, sin = pg.rope_table(4, 6)
  local _ = pg.rope(t(1, 5, 12), cos, sin, 2)
end, "rope: ")
refuses("rope", "columns", function()
  local cos, sin = pg.rope_table(5, 6)
  local _ = pg.rope(t(1, 5, 12), cos, sin, 3)
end, "rope: ")
refuses("rope", "option", function()
  local cos, sin = pg.rope_table(5, 6)
  local _ = pg.rope(t(1, 5, 12), cos, sin, 2, 0, { inplace = true })
end, "rope: unknown key inplace, did you mean in_place?")
refuses("rope", "leaf", function()
  local x, cos, sin = t(1, 5, 12), pg.rope_table(5, 6)
  x.requires_grad = true
  local _ = pg.rope(x, cos, sin, 2, 0, { in_place = true })
end, "rope: x [1,5,12] f32 is a leaf that wants a gradient; in_place would change it")
refuses("rope", "tables", function()
  local cos, sin = pg.rope_table(5, 6, nil, "bf16")
  local _ = pg.rope(t(1, 5, 12):to "bf16", cos, sin, 2)
end, "rope: cos is [5,3] bf16; its dtype must be f32")
refuses("attention", "heads", function() local _ = pg.attention(t(2, 5, 12), nil, nil, { heads = 4, kv_heads = 3 }) end,
  "attention: 4 heads and 3 kv_heads; kv_heads must divide heads")
refuses("attention", "columns", function() local _ = pg.attention(t(2, 5, 13), nil, nil, { heads = 2 }) end,
  "attention: q is [2,5,13] f32; it must be [batch,tokens,columns], columns a multiple of 6 heads")
refuses("attention", "flat", function() local _ = pg.attention(t(5, 12), nil, nil, { heads = 2 }) end,
  "attention: q is [5,12] f32")
refuses("attention", "keys",
  function() local _ = pg.attention(t(2, 5, 12), t(2, 7, 12), t(2, 6, 12), { heads = 2 }) end,
  "attention: ")
refuses("attention", "no_values", function() local _ = pg.attention(t(2, 5, 12), t(2, 5, 12), nil, { heads = 2 }) end,
  "attention: ")
refuses("attention", "option",
  function() local _ = pg.attention(t(2, 5, 12), nil, nil, { heads = 2, casual = true }) end,
  "attention: unknown key casual, did you mean causal?")
refuses("attention", "lengths", function()
  local _ = pg.attention(t(2, 5, 12), nil, nil, { heads = 2, lengths = ids { 1, 2, 3 } })
end, "attention: lengths")
refuses("swiglu", "odd", function() local _ = pg.swiglu(t(3, 7)) end,
  "swiglu: x is [3,7] f32; its last dim must be even")
refuses("swiglu", "scalar", function() local _ = pg.swiglu(t()) end, "swiglu: x is [] f32")

refuses("softmax", "empty", function() local _ = pg.softmax(t(3, 0)) end,
  "softmax: x is [3,0] f32; its last dim must hold something")
refuses("log_softmax", "scalar", function() local _ = pg.log_softmax(t()) end, "softmax: x is [] f32")
refuses("embedding", "id", function() local _ = pg.embedding(t(7, 5), ids { { 1, 2 }, { 3, 7 } }) end,
  "embedding: id 7 at row 1, column 1 is outside the vocabulary [0,7)")
refuses("embedding", "below", function() local _ = pg.embedding(t(7, 5), ids({ 0, -1 }, "i64")) end,
  "embedding: id -1 at row 0, column 1 is outside the vocabulary [0,7)")
refuses("embedding", "padding", function() local _ = pg.embedding(t(8, 5), ids { 1, 7 }, { vocab = 7 }) end,
  "embedding: id 7 at row 0, column 1 is outside the vocabulary [0,7)")
refuses("embedding", "part",
  function() local _ = pg.embedding(t(4, 3), ids { 1, 9 }, { first = 4, vocab = 9 }) end,
  "embedding: id 9 at row 0, column 1 is outside the vocabulary [0,9)")
refuses("embedding", "first", function() local _ = pg.embedding(t(4, 3), ids { 1 }, { first = 5 }) end,
  "embedding: first is 5, vocab is 4; the table's first id must lie in [0,vocab]")
refuses("embedding", "key", function() local _ = pg.embedding(t(4, 3), ids { 1 }, { vocabulary = 4 }) end,
  "embedding: unknown key vocabulary")
refuses("embedding", "table", function() local _ = pg.embedding(t(35), ids { 1 }) end, "embedding: ")
refuses("embedding", "floats", function() local _ = pg.embedding(t(7, 5), t(3)) end,
  "ids are [3] f32; they must be i32 or i64")
refuses("cross_entropy", "target", function() local _ = pg.cross_entropy(t(2, 11), ids { 3, 11 }) end,
  "cross_entropy: target 11 at row 0, column 1 is outside the vocabulary [0,11) (-100 is ignored)")
refuses("cross_entropy", "rows", function() local _ = pg.cross_entropy(t(2, 3, 11), ids { 3, 4 }) end,
  "cross_entropy: logits are [2,3,11] f32, targets are [2] i32; each row needs one target")
refuses("cross_entropy", "reduction",
  function() local _ = pg.cross_entropy(t(2, 11), ids { 3, 4 }, { reduction = "sum" }) end,
  'cross_entropy: reduction is "sum"; "mean" or "none"')
refuses("vocab_cross_entropy", "cut", function()
  local _ = pg.vocab_cross_entropy(t(2, 11), ids { 3, 4 }, { axis = { size = 2 }, vocab = 22 })
end, "vocab_cross_entropy: the vocabulary is cut over 2 ranks; first and vocab must say which ids are here, of how")
refuses("vocab_cross_entropy", "target",
  function() local _ = pg.vocab_cross_entropy(t(2, 11), ids { 3, 9 }, { valid = 9 }) end,
  "vocab_cross_entropy: vocab_stats: target 9 at row 0, column 1 is outside the vocabulary [0,9) (-100 is ignored)")
refuses("vocab_cross_entropy", "valid",
  function() local _ = pg.vocab_cross_entropy(t(2, 11), ids { 3, 9 }, { valid = 12 }) end,
  "vocab_cross_entropy: vocab_stats: valid is 12, logits are [2,11] f32; it must lie in [0,11]")
refuses("vocab_cross_entropy", "key",
  function() local _ = pg.vocab_cross_entropy(t(2, 11), ids { 3, 9 }, { inplace = true }) end,
  "vocab_cross_entropy: unknown key inplace, did you mean in_place?")
refuses("head_loss", "rows", function() local _ = pg.head_loss(t(2, 3, 5), t(11, 5), ids { 1, 2 }) end,
  "head_loss: x is [2,3,5] f32, targets are [2] i32; each row needs one target")
refuses("head_loss", "width", function() local _ = pg.head_loss(t(2, 5), t(11, 4), ids { 1, 2 }) end,
  "head_loss: x is [2,5] f32, w is [11,4] f32; x must be [..,D], w [V,D]")
refuses("head_loss", "chunk", function() local _ = pg.head_loss(t(2, 5), t(11, 5), ids { 1, 2 }, { chunk = -1 }) end,
  "head_loss: chunk is -1; it must be at least 0")
refuses("head_loss", "target", function() local _ = pg.head_loss(t(2, 5), t(11, 5), ids { 1, 11 }, { chunk = 1 }) end,
  "head_loss: vocab_stats: target 11 at row 0, column 0 is outside the vocabulary [0,11)")
refuses("argmax", "empty", function() local _ = pg.argmax(t(3, 0)) end, "argmax: ids are [3] i32, x is [3,0] f32")
refuses("sample", "temperature", function() local _ = pg.sample(t(3, 7), { temperature = -1 }) end,
  "sample: temperature -1")
refuses("sample", "top_p", function() local _ = pg.sample(t(3, 7), { top_p = 0 }) end,
  "sample: top_p 0 lies outside (0,1]")
refuses("sample", "seed", function() local _ = pg.sample(t(3, 7), { seed = 2^53 }) end,
  "sample: seed is 9007199254740992")

for _, op in ipairs { "sum", "mean", "max", "min" } do
  refuses(op, "dim", function() local _ = pg[op](t(2, 3), 3) end, op .. ": dim 3 of [2,3] f32; it has dims 1 to 2")
  refuses(op, "half", function() local _ = pg[op](t(2, 3), 1.5) end, op .. ": dim is 1.5, not an integer")
  refuses(op, "integers", function() local _ = pg[op](ids { 1 }) end, op .. ": ")
end
for _, op in ipairs { "mean", "max", "min" } do
  refuses(op, "empty", function() local _ = pg[op](t(2, 0), 2) end, op .. ": dim 1 of [2,0] f32 is empty")
end
refuses("reshape", "count", function() local _ = pg.reshape(t(2, 3), { 7 }) end,
  "reshape: [2,3] f32 into {7}: 6 numbers do not become 7")
refuses("reshape", "rest", function() local _ = pg.reshape(t(2, 3), { 4, -1 }) end,
  "reshape: [2,3] f32 into {4,-1}: 6 numbers do not become 4 times a whole number")
refuses("slice", "past", function() local _ = pg.slice(t(4, 3), 1, 3, 3) end,
  "slice: 3 entries from 3 of dim 1 of [4,3] f32")
refuses("slice", "dim", function() local _ = pg.slice(t(4, 3), 3, 1, 1) end, "slice: dim 3 of [4,3] f32")
refuses("slice", "no_dim", function() local _ = pg.slice(t(4, 3), nil, 1, 1) end, "slice: dim is missing")
refuses("concat", "dims", function() local _ = pg.concat({ t(2, 3), t(2, 4) }, 1) end,
  "concat: tensor 1 is [2,3] f32, tensor 2 is [2,4] f32; all dims but dim 1 must be equal")
refuses("concat", "dtypes", function() local _ = pg.concat({ t(2, 3), t(2, 3):to "f64" }, 1) end,
  "concat: tensor 1 is [2,3] f32, tensor 2 is [2,3] f64; their dtypes must be equal")
refuses("concat", "nothing", function() local _ = pg.concat({}, 1) end, "concat: an empty list")
refuses("permute", "order", function() local _ = pg.permute(t(2, 3), { 1, 1 }) end,
  "permute: {1,1} is no order of the dims of [2,3] f32")
refuses("permute", "dims", function() local _ = pg.permute(t(2, 3), { 1 }) end, "permute: 1 dims named for [2,3] f32")
refuses("transpose", "vector", function() local _ = pg.transpose(t(3)) end, "transpose: dims 0 and 1 of [3] f32")
refuses("op", "rule", function() local _ = pg.op { name = "mine", forward = function() end } end,
  "op: mine needs the functions forward and grad")
refuses("op", "key", function() local _ = pg.op { foward = function() end } end,
  "op: unknown key foward, did you mean forward?")
refuses("op", "result",
  function() local _ = pg.op { name = "mine", forward = function() return 3 end, grad = print }(t(2)) end,
  "op: forward of mine must return one tensor")
refuses("recompute", "result", function() local _ = pg.recompute(function() return 3 end, t(2)) end,
  "recompute: the function must return one tensor")
refuses("all_reduce", "axis", function() local _ = pg.all_reduce(t(2), require("pg.mesh").ready().world, "product") end,
  "all_reduce: op product is unknown")
refuses("sum_values", "dead", function()
  local x = t(2)
  x:free()
  local _ = pg.exp(pg.sum_values(x))
end, "this tensor [2] f32 is dead")

local thirds = { size = 3, rank = 0 } -- an axis; refusals come before anything is sent
for _, op in ipairs { "copy_to_ranks", "reduce_from_ranks" } do
  refuses(op, "dead", function()
    local x = t(2)
    x:free()
    local _ = pg[op](x, thirds)
  end, "this tensor [2] f32 is dead")
end
for _, op in ipairs { "gather_rows", "join_rows", "reduce_scatter_rows" } do
  refuses(op, "scalar", function() local _ = pg[op](t(), thirds) end, "rows over ranks: a scalar has none")
end
refuses("reduce_scatter_rows", "rows", function() local _ = pg.reduce_scatter_rows(t(4, 2), thirds) end,
  "reduce_scatter_rows: [4,2] f32 has 4 rows, which 3 ranks do not divide")
refuses("gather_columns", "scalar", function() local _ = pg.gather_columns(t(), thirds) end,
  "gather_columns: a scalar has no columns")
local split, one = require "pg.ops.split_linear", require("pg.mesh").ready().tp
refuses("linear_gathered", "inner", function() local _ = split.linear_gathered(t(2, 3), t(4, 5), nil, nil, one) end,
  "linear_gathered: matmul: a is [2,3] f32, b is [4,5] f32")
refuses("linear_gathered", "activation",
  function() local _ = split.linear_gathered(t(2, 3), t(4, 3), nil, "swish", one) end,
  "linear: activation swish is unknown (gelu, gelu_tanh)")
refuses("linear_scattered", "inner", function() local _ = split.linear_scattered(t(2, 3), t(4, 5), nil, one) end,
  "linear_scattered: matmul: a is [2,3] f32, b is [4,5] f32")
refuses("linear_scattered", "rows", function() local _ = split.linear_scattered(t(4, 3), t(4, 3), nil, thirds) end,
  "linear_scattered: x is [4,3] f32: 4 rows, which 3 ranks do not divide")

local HERE = "^tests/lua/test_shapes%.lua:%d+: "
for _, b in ipairs(bad) do
  tests["test_" .. b.op .. "_refuses_" .. b.name] = function()
    local message = check.throws(b.f, b.text)
    check.is_true(message:find(HERE) ~= nil, "no place in this file: " .. message)
  end
end

function tests.test_every_op_has_a_refusal()
  local missing = cases.ops()
  for _, b in ipairs(bad) do missing[b.op] = nil end
  for name, file in pairs(missing) do error(("%s of lua/pg/ops/%s has no refusal here"):format(name, file)) end
end

-- What tensors refuse --------------------------------------------------------------------------

local function throws_here(f, text)
  local message = check.throws(f, text)
  check.is_true(message:find(HERE) ~= nil, "no place in this file: " .. message)
end

function tests.test_a_dead_tensor_names_the_way_out()
  local inner
  pg.scope(function() inner = t(2, 3) end)
  throws_here(function() local _ = pg.relu(inner) end,
    "this tensor [2,3] f32 is dead: its scope has ended; return it from the scope, or t:keep()")
  throws_here(function() local _ = inner:item() end, "item: [2,3] f32 has 6 elements, not one")
  throws_here(function() local _ = inner:totable() end, "is dead")
  throws_here(function() local _ = inner:view { 6 } end, "is dead")
  equal(tostring(inner), "tensor [2,3] f32 (dead)")
end

function tests.test_a_dead_second_argument()
  local x, dead = t(2, 3), t(3)
  dead:free()
  for _, f in ipairs {
    function() local _ = pg.add(x, dead) end, function() local _ = pg.rmsnorm(x, dead) end,
    function() local _ = pg.linear(x, dead) end, function() local _ = pg.linear(x, t(2, 3), dead) end,
    function() local _ = pg.layernorm(x, t(3), dead) end, function() local _ = pg.concat({ x, dead }, 1) end,
    function() local _ = pg.cross_entropy(x, dead) end, function() local _ = pg.embedding(x, dead) end,
  } do check.throws(f, "^tests/lua/test_shapes%.lua:%d+: ") end
end

function tests.test_tensors_from_tables()
  equal(pg.tensor(3).shape, {})
  equal(pg.tensor({}).shape, { 0 })
  equal(pg.tensor({ {}, {} }).shape, { 2, 0 })
  equal(pg.tensor({ { 1, 2 }, { 3, 4 }, { 5, 6 } }).shape, { 3, 2 })
  throws_here(function() local _ = pg.tensor { { 1, 2 }, { 3 } } end, "tensor: rows of 2 and 1 elements")
  throws_here(function() local _ = pg.tensor { { 1, 2 }, 3 } end, "tensor: rows of different depth")
  throws_here(function() local _ = pg.tensor { 1, { 2, 3 } } end, "tensor: rows of different depth")
  throws_here(function() local _ = pg.tensor { 1, "x" } end, "tensor: element 2 is string, not a number")
  throws_here(function() local _ = pg.tensor({ 256 }, "u8") end, "tensor: element 1 is 256, outside u8")
  throws_here(function() local _ = pg.tensor({ -32769 }, "i16") end, "tensor: element 1 is -32769, outside i16")
  throws_here(function() local _ = pg.tensor({ 1.5 }, "i32") end, "tensor: element 1 is 1.5, not an integer")
  throws_here(function() local _ = pg.zeros({ 2 }, "f31") end, "dtype f31 is unknown")
  throws_here(function() local _ = pg.zeros { 2, -1 } end, "dim 2 is -1, below 0")
  throws_here(function() local _ = pg.zeros { 1, 1, 1, 1, 1, 1, 1, 1, 1 } end, "at most 8 dims, got 9")
  throws_here(function() local _ = pg.zeros { 2^40, 2^40 } end, "more than 2^56 elements")
end

function tests.test_reading_one_number()
  local x = pg.tensor { { 1, 2, 3 }, { 4, 5, 6 } }
  equal(x:at(1, 2), 6)
  for _, dtype in ipairs { "f64", "bf16", "f16", "i32", "i64", "u8", "i16" } do
    equal(x:to(dtype):totable(), { 1, 2, 3, 4, 5, 6 })
    equal(pg.tensor({ { 7 } }, dtype):item(), 7)
  end
  equal(pg.tensor({ 1.5, -0.25 }, "bf16"):totable(), { 1.5, -0.25 })
  throws_here(function() local _ = x:at(1) end, "at: 1 indices for [2,3] f32")
  throws_here(function() local _ = x:at(1, 3) end, "at: index 2 is 3, outside [0,3)")
  throws_here(function() local _ = x:item() end, "item: [2,3] f32 has 6 elements, not one")
  throws_here(function() local _ = x:backward() end, "backward: [2,3] f32 has 6 elements; sum or mean it first")
end

function tests.test_empty_tensors_pass_through()
  local x, w = t(0, 4), t(3, 4)
  x.requires_grad, w.requires_grad = true, true
  local loss = pg.sum(pg.linear(pg.gelu(x) * 2 + x, w))
  equal(loss:item(), 0)
  loss:backward()
  equal(x.grad.shape, { 0, 4 })
  check.close(w.grad, pg.zeros { 3, 4 }, 0)
  equal(pg.softmax(t(0, 4)).shape, { 0, 4 })
  equal(pg.rmsnorm(t(0, 4), t(4)).shape, { 0, 4 })
  equal(pg.permute(t(0, 4), { 2, 1 }).shape, { 4, 0 })
  equal(pg.concat({ t(0, 4), t(2, 4) }, 1).shape, { 2, 4 })
  equal(pg.slice(t(3, 4), 1, 2, 0).shape, { 0, 4 })
  equal(pg.embedding(t(3, 4), ids {}).shape, { 0, 4 })
  equal(pg.argmax(t(0, 4)).shape, { 0 })
  equal(pg.attention(t(0, 5, 12), nil, nil, { heads = 2 }).shape, { 0, 5, 4 })
  local empty = pg.cross_entropy(t(0, 4), ids {})
  equal(empty:item(), 0)
end

function tests.test_scalars()
  local x = pg.tensor(3)
  x.requires_grad = true
  local y = pg.exp(x) * 2 + x / x
  equal(y.shape, {})
  y:backward()
  check.close(x.grad, { 2 * math.exp(3) }, check.f32)
  equal(pg.sum(pg.tensor(3)):item(), 3)
  equal(pg.reshape(pg.tensor(3), { 1, 1 }).shape, { 1, 1 })
  equal(pg.permute(pg.tensor(3), {}).shape, {})
end

-- The shape backend ----------------------------------------------------------------------------

-- Run f where ops work on shapes alone.
local function on_shapes(f)
  c.C.pg_shape_only(1)
  local ok, message = pcall(f)
  c.C.pg_shape_only(0)
  if not ok then error(message, 0) end
end

for _, case in ipairs(cases.list) do
  tests["test_on_shapes_" .. case.name] = function()
    local real = case.f(unpack(cases.inputs(case, "f32")))
    on_shapes(function()
      local inputs = cases.inputs(case, "f32")
      for _, x in ipairs(inputs) do x.requires_grad = true end
      local y = case.f(unpack(inputs))
      equal(y.shape, real.shape)
      equal(y.dtype, real.dtype)
      if y.count == 1 then check.throws(function() y:item() end, "only shapes are being computed here") end
      check.throws(function() y:totable() end, "only shapes are being computed here")
      if y.record then
        local loss = pg.sum(y)
        loss:backward()
        for _, x in ipairs(inputs) do if x.grad then equal(x.grad.shape, x.shape) end end
      end
    end)
  end
end

function tests.test_shapes_are_checked_without_numbers()
  local before = pg.memory().in_use
  on_shapes(function()
    throws_here(function() local _ = pg.matmul(t(4096, 4096), t(4095, 4096)) end, "inner sizes 4096 and 4095 differ")
    local large = t(2^20, 2^20)
    equal(pg.relu(large).shape, { 2^20, 2^20 })
    equal(tostring(large), "tensor [1048576,1048576] f32 (shape only)")
  end)
  equal(pg.memory().in_use, before)
end

function tests.test_a_tensor_of_shapes_is_no_tensor_of_numbers()
  local hollow
  on_shapes(function() hollow = t(2, 3) end)
  throws_here(function() local _ = pg.relu(hollow) end, "has a shape and no numbers")
end

pg.step.block() -- lives as long as the process
check.run(tests)
