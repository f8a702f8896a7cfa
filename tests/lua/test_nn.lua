-- test_nn.lua: modules, their names and initial numbers; what the models refuse; masks that do not depend
-- on how a batch is cut.
local check = require "tests.check"
local golden = require "tests.golden"
local c = require "pg.c"
local tape = require "pg.tape"
local nn = pg.nn
local equal, is_true = check.equal, check.is_true
local tests = {}

local llama, gpt2 = require "models.llama", require "models.gpt2"
local small = { blocks = 1, width = 16, heads = 4, kv_heads = 2, vocab = 13, context = 8 }
local function llama_with(o)
  local settings = {}
  for k, v in pairs(small) do settings[k] = v end
  for k, v in pairs(o or {}) do settings[k] = v end
  return llama(settings)
end

-- { name = numbers } of every piece.
local function numbers(module)
  local out = {}
  for _, entry in ipairs(module:named()) do
    local v = entry.parameter:view(entry.piece.shape, entry.piece.first)
    out[entry.name] = v:totable()
    v:free()
  end
  return out
end

function tests.test_names_are_those_of_hugging_face()
  for _, name in ipairs { "llama_gqa", "llama_tied", "gpt2_tiny" } do
    local file = golden.open(name)
    local config = file:meta "config"
    local description = name == "gpt2_tiny" and gpt2 {} or llama { kv_heads = config.kv_heads }
    for _, key in ipairs { "blocks", "width", "heads", "vocab", "context",
      "tied" } do description[key] = config[key] end
    if name ~= "gpt2_tiny" then description.ffn = config.ffn end
    local want, got = {}, {}
    for _, entry in ipairs(file:names()) do want[#want + 1] = entry:match "^weight%.(.*)$" end
    for _, entry in ipairs(pg.build(description):named()) do got[#got + 1] = entry.name end
    table.sort(want)
    table.sort(got)
    equal(got, want)
  end
end

function tests.test_initial_numbers_depend_on_the_name_alone()
  local one, two = numbers(pg.build(llama_with())), numbers(pg.build(llama_with { blocks = 3, vocab = 13 }))
  local compared = 0
  for name, list in pairs(one) do
    if not name:find "o_proj" and not name:find "down_proj" then -- their spread follows the number of blocks
      equal(two[name], list, name)
      compared = compared + 1
    end
  end
  equal(compared, 10)
  check.close(two["model.layers.0.mlp.down_proj.weight"],
    pg.tensor(one["model.layers.0.mlp.down_proj.weight"]) * (1 / math.sqrt(3)), check.f32)
end

function tests.test_fused_pieces_start_like_separate_ones()
  local Both = nn.class "Both"
  function Both:init(o)
    if o.fused then self:add("", nn.Linear { inputs = 6, parts = { { "a", 4 }, { "b", 3 } } })
    else
      self:add("b", nn.Linear { inputs = 6, outputs = 3 }) -- in another order as well
      self:add("a", nn.Linear { inputs = 6, outputs = 4 })
    end
  end
  equal(numbers(pg.build(Both { fused = true })), numbers(pg.build(Both {})))
end

function tests.test_seeds_and_spread()
  local function first(seed) return numbers(pg.build(llama_with { vocab = 1000 },
    { seed = seed }))["lm_head.weight"] end
  local a = first(1)
  equal(first "1", a)
  is_true(first(2)[1] ~= a[1])
  local square = 0
  for _, x in ipairs(a) do square = square + x * x end
  check.close(math.sqrt(square / #a), 0.02, 0.02) -- 16,000 draws
  equal(numbers(pg.build(llama_with()))["model.norm.weight"][1], 1)
end

function tests.test_parameters_come_once_and_count()
  local tied = pg.build(gpt2 { blocks = 2, width = 8, heads = 2, vocab = 11, context = 4 }, { bucket = 0.002 })
  local seen = {}
  for _, p in ipairs(tied:parameters()) do
    is_true(not seen[p])
    seen[p] = true
  end
  local names = {}
  for _, s in ipairs(tied.segments) do names[#names + 1] = s.name end
  equal(names, { "embedding", "h.0 (1 of 2)", "h.0 (2 of 2)", "h.1 (1 of 2)", "h.1 (2 of 2)", "head" })
end

-- Shapes alone: the 7B model in a moment, and no memory.
function tests.test_a_7b_model_on_shapes()
  local before = pg.memory().in_use
  c.C.pg_shape_only(1)
  local ok, message = pcall(function()
    local model = pg.build(llama "7b")
    local count = 0
    for _, p in ipairs(model:parameters()) do count = count + p.count end
    equal(count, 6738415616)
    local logits = model(pg.zeros({ 2, 4096 }, "i32"))
    equal(logits.shape, { 2, 4096, 32000 })
    pg.sum(logits):backward()
  end)
  c.C.pg_shape_only(0)
  if not ok then error(message, 0) end
  equal(pg.memory().in_use, before)
end

function tests.test_loading_checks_names_and_shapes()
  local linear = pg.build(nn.Linear { inputs = 3, outputs = 2, bias = true })
  local w, b = pg.ones { 2, 3 }, pg.zeros { 2 }
  linear:load_numbers { weight = w, bias = b }
  equal(linear(pg.ones { 1, 3 }):totable(), { 3, 3 })
  check.throws(function() linear:load_numbers { weight = w } end, "load: there is no tensor for parameter bias")
  check.throws(function() linear:load_numbers { weight = w, bias = b, gain = b } end,
    "load: no parameter is named gain")
  check.throws(function() linear:load_numbers { weight = pg.ones { 3, 2 }, bias = b } end,
    "load: weight is [3,2] f32, the parameter is [2,3] f32")
end

function tests.test_settings_are_checked()
  check.throws(function() nn.Linear { inputs = 2, output = 3 } end, "Linear: unknown key output, did you mean outputs?")
  check.throws(function() llama { block = 3 } end, "llama: unknown key block, did you mean blocks?")
  check.throws(function() llama "8b" end, 'llama: "8b" is no known size (13b, 7b)')
  check.throws(function() pg.build(llama { blocks = 1.5 }) end, "llama.blocks is 1.5; it must be an integer")
  check.throws(function() pg.build(llama { width = 10, heads = 4 }) end,
    "rope: the heads are 2.5 wide; choose width and heads")
  check.throws(function() pg.build(llama { width = 12, heads = 4 }) end, "rope: the heads are 3 wide")
  check.throws(function() pg.build(gpt2 { width = 10, heads = 4 }) end,
    "Attention: width 10 does not divide into 4 heads")
  check.throws(function() pg.build(llama_with { kv_heads = 3 }) end,
    "4 heads and 3 kv_heads; kv_heads must divide heads")
  check.throws(function() pg.build { 1 } end, "is neither a description nor a module")
  check.throws(function() nn.Dropout { p = 0.1 } end, "Dropout: it needs a name of its own")
  local Twice = nn.class "Twice"
  function Twice:init() for _ = 1, 2 do self:add("a", nn.RMSNorm { width = 2 }) end end
  check.throws(function() pg.build(Twice {}) end, "two parameters are named a.weight")
end

-- C12: ids and positions outside the tables; the process goes on.
function tests.test_models_refuse_ids_and_positions_outside()
  for _, description in ipairs { llama_with(), gpt2 { blocks = 1, width = 16, heads = 4, vocab = 13, context = 8 } } do
    local model = pg.build(description)
    local function loss(tokens, targets)
      return function() return (model:loss { tokens = pg.tensor(tokens, "i32"),
        targets = pg.tensor(targets or tokens, "i32") }) end
    end
    check.throws(loss { { 1, 2 }, { 3, 13 } }, "embedding: id 13 at row 1, column 1 is outside the vocabulary [0,13)")
    check.throws(loss { { 1, -1 } }, "embedding: id -1 at row 0, column 1 is outside")
    check.throws(loss({ { 1, 2 } }, { { 1, 13 } }),
      "cross_entropy: target 13 at row 0, column 1 is outside the vocabulary [0,13)")
    check.throws(loss { { 1, 2, 3, 4, 5, 6, 7, 8, 9 } }, "model: a sequence of 9 tokens, the model's context is 8")
    check.throws(function() model(pg.tensor({ 1, 2 }, "i32")) end,
      "model: token ids are [2] i32; they must be [batch,tokens]")
    is_true(loss { { 1, 2, 12 } }():item() > 0)
  end
end

function tests.test_modules_print_themselves()
  local text = tostring(llama_with() and pg.build(llama_with()))
  is_true(text:find("Llama", 1, true) ~= nil and text:find("model.embed_tokens: Embedding", 1, true) ~= nil, text)
end

-- Dropout ----------------------------------------------------------------------------------------

local function in_context(context, f)
  local before = tape.context
  tape.context = context
  local result = pg.no_grad(f)
  tape.context = before
  return result
end

function tests.test_dropout_is_off_outside_training()
  local drop = nn.Dropout { p = 0.5, name = "x" }
  local x = pg.ones { 4, 8 }
  is_true(in_context({ training = false }, function() return drop(x) end) == x)
  local y = in_context({ training = true, step = pg.step.block() }, function() return drop(x) end)
  local zeros = 0
  for _, v in ipairs(y:totable()) do
    is_true(v == 0 or v == 2)
    if v == 0 then zeros = zeros + 1 end
  end
  is_true(zeros > 0 and zeros < 32)
end

-- The mask of a sample is the same wherever its micro-batch begins.
function tests.test_masks_follow_the_sample_not_the_micro_batch()
  local model = pg.build(gpt2 { blocks = 1, width = 16, heads = 4, vocab = 13, context = 8, dropout = 0.3 })
  local ids = {}
  for i = 1, 6 do ids[i] = { i, 2, 3, i + 1, 5 } end
  local function run(first, count)
    local rows = { unpack(ids, first + 1, first + count) }
    return in_context({ training = true, sample0 = first, step = pg.step.block() }, function()
      return model(pg.tensor(rows, "i32"))
    end)
  end
  local whole = run(0, 6)
  check.close(pg.concat({ run(0, 2), run(2, 3), run(5, 1) }, 1), whole, 1e-6)
  is_true(check.error(in_context({ training = false }, function() return model(pg.tensor(ids, "i32")) end),
    whole) > 0.01)
  pg.step.set { RANDOM = 99 }
  is_true(check.error(run(0, 6), whole) > 0.01)
end

function tests.test_recomputed_dropout_draws_the_same_masks()
  local model = pg.build(gpt2 { blocks = 2, width = 16, heads = 4, vocab = 13, context = 8, dropout = 0.3 })
  local batch = { tokens = pg.tensor({ { 1, 2, 3 }, { 4, 5, 6 } }, "i32"),
    targets = pg.tensor({ { 2, 3, 4 }, { 5, 6, 7 } }, "i32") }
  local function gradients(recompute)
    model.layers.recompute = recompute
    local before = tape.context
    tape.context = { training = true, sample0 = 4, step = pg.step.block() }
    local loss = model:loss(batch)
    tape.context = { training = true, sample0 = 99, step = pg.step.block() } -- the next micro-batch has begun
    loss:backward()
    tape.context = before
    local out = {}
    for _, s in ipairs(model.segments) do
      out[#out + 1] = s.grad:totable()
      s:fresh()
    end
    return out
  end
  equal(gradients(true), gradients(false))
end

pg.step.block() -- lives as long as the process
function tests.test_random_calls_differ_and_keys_agree()
  local function same(a, b) return table.concat(a:totable(), " ") == table.concat(b:totable(), " ") end
  check.is_true(not same(pg.randn { 3 }, pg.randn { 3 }))
  check.is_true(not same(pg.rand { 3 }, pg.rand { 3 }))
  check.is_true(same(pg.randn({ 3 }, { key = "a" }), pg.randn({ 3 }, { key = "a" })))
  check.is_true(not same(pg.randn({ 3 }, { key = "a" }), pg.randn({ 3 }, { key = "a", seed = 1 })))
end

-- The product that makes the gradient of an activation multiplies by its slope as well, unless others add to that.
function tests.test_gradient_through_an_activation()
  for _, name in ipairs { "gelu", "gelu_tanh" } do
    for readers = 1, 2 do
      local function gradients(activate)
        local x, w, v, bias = pg.randn({ 2, 3, 5 }, { key = "x" }), pg.randn({ 8, 5 }, { key = "w" }),
                              pg.randn({ 4, 8 }, { key = "v" }), pg.randn({ 8 }, { key = "b" })
        for _, t in ipairs { x, w, v, bias } do t.requires_grad = true end
        local h = activate(x, w, bias)
        local y = pg.linear(h, v)
        local loss = (y * y):sum()
        if readers == 2 then loss = loss + h:sum() end
        local record = h.record
        loss:backward()
        return { x.grad:totable(), w.grad:totable(), v.grad:totable(), bias.grad:totable() }, record.has_slope
      end
      local got, at_once = gradients(function(x, w, bias) return pg.linear(x, w, bias, name) end)
      local want = gradients(function(x, w, bias) return pg[name](pg.linear(x, w, bias)) end)
      equal(at_once == true, readers == 1)
      for i, list in ipairs(want) do check.close(got[i], list, check.f32) end
    end
  end
end

check.run(tests)
