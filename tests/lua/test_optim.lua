-- test_optim.lua: optimisers, clipping, the loss over unequal micro-batches, rates.  Values against PyTorch
-- are in test_ops_golden.lua and test_curves.lua; C01 and its like name cases of real trouble.
local check = require "tests.check"
local pieces = require "tests.pieces"
local step = require "pg.step"
local nn = pg.nn
local equal, is_true = check.equal, check.is_true
local tests = {}

-- A module of parameters { name = values }, each with its values.
local function model_of(values, o)
  local module = nn.class "Loose"()
  local names = {}
  for name in pairs(values) do names[#names + 1] = name end
  table.sort(names)
  for _, name in ipairs(names) do
    local t = pg.tensor(values[name], o and o.dtype)
    module[name] = module:param(name, t.shape, { decay = o and o.decay })
  end
  pg.build(module, { dtype = o and o.dtype, bucket = o and o.bucket })
  for name in pairs(values) do module[name]:copy_from(pg.tensor(values[name], o and o.dtype)) end
  return module
end

local function set_gradient(p, values)
  p.grad:copy_from(type(values) == "number" and pg.full(p.shape, values, p.dtype) or pg.tensor(values, p.dtype))
  p.grad_fresh = false
end

-- Logits 0 and x of a row whose loss for target 0 is `loss`.
local function logits_for(loss) return { 0, math.log(math.exp(loss) - 1) } end

-- C01: two micro-batches with losses {4} and {1,1,1}.
function tests.test_loss_is_the_mean_over_all_tokens_of_the_step()
  local rows = { logits_for(4), logits_for(1) }
  local function run(batches, share)
    local model = model_of({ table = rows }, { dtype = "f64" })
    local sum = 0
    step.set { INV_TOKENS = share }
    for _, ids in ipairs(batches) do
      local n = #ids
      local targets = {}
      for i = 1, n do targets[i] = 0 end
      local loss = pg.cross_entropy(pg.embedding(model.table, pg.tensor(ids, "i32")), pg.tensor(targets, "i32"),
                                    { step = #batches > 1 and step.block() or nil })
      loss:backward()
      sum = sum + loss:item()
    end
    return sum, model.table.grad:totable()
  end
  local loss, gradient = run({ { 0 }, { 1, 1, 1 } }, 1 / 4)
  local whole, want = run({ { 0, 1, 1, 1 } })
  check.close(loss, 1.75, check.double)
  check.close(whole, 1.75, check.double)
  check.close(gradient, want, check.double)
end

-- C02: nothing counts in a batch, in one micro-batch of two.
function tests.test_targets_that_are_all_ignored()
  local model = model_of { table = { { 1, 2, 3 }, { 3, 1, 2 } } }
  local function loss_of(targets, block)
    local logits = pg.embedding(model.table, pg.tensor({ 0, 1 }, "i32"))
    local loss, valid = pg.cross_entropy(logits, pg.tensor(targets, "i32"), { step = block })
    loss:backward()
    return loss:item(), valid:item()
  end
  equal({ loss_of { -100, -100 } }, { 0, 0 })
  equal(model.table.grad:totable(), { 0, 0, 0, 0, 0, 0 })
  model.segments[1]:fresh()
  step.set { INV_TOKENS = 1 }
  local first, none = loss_of({ -100, -100 }, step.block())
  local second, one = loss_of({ -100, 2 }, step.block())
  equal({ first, none, one }, { 0, 0, 1 })
  local gradient = model.table.grad:totable()
  model.segments[1]:fresh()
  local alone = loss_of { -100, 2 }
  equal(second, alone)
  check.close(gradient, model.table.grad, 0)
  is_true(alone == alone and alone > 0)
end

-- C05: gradients scaled by the loss scale are clipped by their true size, once.
function tests.test_clipping_takes_the_loss_scale_off_once()
  local model = model_of { w = { 0, 0 } }
  local optim = pg.optim.sgd(model:parameters(), { rate = 1, clip = 1 })
  step.set { SCALE = 65536 }
  set_gradient(model.w, { 3 * 65536, 4 * 65536 })
  local norm = optim:step()
  step.set { SCALE = 1 }
  check.close(norm, 5, check.f32)
  check.close(model.w, { -0.6, -0.8 }, check.f32)
end

function tests.test_huge_gradients_are_clipped_not_overflowed()
  local zeros = {}
  for i = 1, 100 do zeros[i] = 0 end
  local model = model_of { w = zeros }
  local optim = pg.optim.sgd(model:parameters(), { rate = 1, clip = 1 })
  set_gradient(model.w, 1e20)
  check.close(optim:step(), 1e21, check.f32)
  for i = 1, 100 do zeros[i] = -0.1 end
  check.close(model.w, zeros, check.f32)
end

-- C08: decay is decoupled.
function tests.test_decay_is_decoupled()
  local model = model_of({ w = { 1 } }, { decay = true })
  local optim = pg.optim.adamw(model:parameters(), { rate = 0.01, decay = 0.1, eps = 0 })
  set_gradient(model.w, 1)
  optim:step()
  check.close(model.w, { 0.989 }, 1e-7) -- one rounding of f32; Adam with L2 decay gives 0.990
end

function tests.test_a_gradient_that_is_not_finite_changes_nothing()
  local model = model_of { a = { 1, 2 }, b = { 3, 4 } }
  local optim = pg.optim.adamw(model:parameters(), { rate = 0.01 })
  set_gradient(model.a, 1)
  set_gradient(model.b, { 1, 1 / 0 })
  check.throws(function() optim:step() end,
    "^tests/lua/test_optim.lua:%d+: step 1, rank 0: the gradient norm is inf; first bad gradient: b; nothing was")
  equal(model.a:totable(), { 1, 2 })
  equal(model.b:totable(), { 3, 4 })
  equal(optim.steps, 0)
  for _, piece in ipairs(pieces.states(optim)) do check.close(piece.view, { 0, 0 }, 0) end
  set_gradient(model.a, 1)
  set_gradient(model.b, 1)
  optim:step()
  check.close(model.a, { 0.99, 1.99 }, check.f32) -- a first step: bias corrections as of step 1
end

function tests.test_parameters_without_a_gradient_in_this_step()
  local model = model_of { used = { 1, 2 }, unused = { 3, 4 } }
  local optim = pg.optim.sgd(model:parameters(), { rate = 0.5 })
  set_gradient(model.used, 1)
  set_gradient(model.unused, 1)
  optim:step()
  equal(model.unused:totable(), { 2.5, 3.5 })
  pg.sum(model.used):backward() -- unused gets nothing now: its old gradient must not count
  check.close(optim:step(), math.sqrt(2), check.f32)
  equal(model.used:totable(), { 0, 1 })
  equal(model.unused:totable(), { 2.5, 3.5 })
end

function tests.test_frozen_parameters_stand_still()
  local model = model_of({ free = { { 1, 2 } }, frozen = { { 3, 4 } } })
  model.frozen.requires_grad = false
  local optim = pg.optim.adamw(model:parameters(), { rate = 0.1, decay = 0.5 })
  local function train()
    pg.sum(pg.mul(model.free, model.frozen)):backward()
    return optim:step()
  end
  check.close(train(), 5, check.f32)
  equal(model.frozen:totable(), { 3, 4 })
  is_true(model.free:totable()[1] < 1)
  model.frozen.requires_grad, model.free.requires_grad = true, false -- the other way round, under way
  local before = model.free:totable()
  train()
  equal(model.free:totable(), before)
  is_true(model.frozen:totable()[1] ~= 3)
end

function tests.test_norms_and_biases_do_not_decay()
  local model = pg.build(require("models.gpt2") { blocks = 1, width = 8, heads = 2, vocab = 11, context = 4 })
  for _, p in ipairs(model:parameters()) do p:fill(1) end
  local optim = pg.optim.adamw(model:parameters(), { rate = 0.1, decay = 0.5 })
  optim:step() -- all gradients 0
  for _, entry in ipairs(model:named()) do
    local matrix = #entry.piece.shape > 1
    local x = entry.parameter:at(unpack(matrix and { 0, 0 } or { 0 }))
    check.close(x, matrix and 0.95 or 1, check.f32)
  end
end

function tests.test_part_of_a_segment_is_refused()
  local model = model_of { a = { 1 }, b = { 2 } }
  check.throws(function() pg.optim.sgd({ model.a }, {}) end, "optim: b is not in the list but shares segment rest with")
  local apart = model_of({ a = { 1 }, b = { 2 } }, { bucket = 0 })
  for _, p in pairs { apart.a, apart.b } do set_gradient(p, { 1 }) end
  pg.optim.sgd({ apart.a }, { rate = 0.5 }):step()
  equal({ apart.a:at(0), apart.b:at(0) }, { 0.5, 2 })
  check.throws(function() pg.optim.sgd({}, {}) end, "optim: the model has no parameters")
  check.throws(function() pg.optim.sgd({ nn.Linear { inputs = 2, outputs = 2 }.weight }, {}) end,
    "build the model with pg.build first")
end

function tests.test_settings_are_checked()
  local model = model_of { a = { 1 } }
  local function with(o) return function() pg.optim.adamw(model:parameters(), o) end end
  check.throws(with { rat = 1 }, "adamw: unknown key rat, did you mean rate?")
  check.throws(with { eps = "x" }, 'adamw.eps is "x"; it must be a number')
  check.throws(with { rate = {} }, "rate is table")
end

function tests.test_swapped_settings_keep_moments_and_count()
  local model = model_of { a = { 1, 1 } }
  local optim = pg.optim.adamw(model:parameters(), { rate = 0.1, betas = { 0.9, 0.95 } })
  set_gradient(model.a, 1)
  optim:step()
  local moment = optim.states[model.segments[1]].exp_avg:totable()
  optim:swap { rate = 0, betas = { 0.9, 0.95 }, eps = 1e-8, decay = 0, clip = 0 }
  equal(optim.states[model.segments[1]].exp_avg:totable(), moment)
  equal(optim.steps, 1)
  local before = model.a:totable()
  set_gradient(model.a, 1)
  local _, rate = optim:step()
  equal({ rate, optim.steps }, { 0, 2 })
  equal(model.a:totable(), before)
end

-- C10: rates of the first and the last step.
function tests.test_rates_start_above_zero_and_end_at_the_floor()
  for _, warmup in ipairs { 0, 1, 10 } do
    for _, kind in ipairs { "cosine", "linear", "wsd" } do
      local rate = require("pg.optim.rate").build(pg.rate[kind] { peak = 1, warmup = warmup, floor = 0.1 },
        { steps = 30 })
      is_true(rate { step = 1 } > 0)
      equal(rate { step = math.max(warmup, 1) } <= 1, true)
      if warmup > 0 then check.close(rate { step = warmup }, 1, check.double) end
      check.close(rate { step = 30 }, 0.1, check.double)
      for s = math.max(warmup, 1) + 1, 30 do is_true(rate { step = s } <= rate { step = s - 1 }) end
    end
  end
  check.throws(function() require("pg.optim.rate").build(pg.rate.cosine { peak = 1 }, {}) end,
    "rate.cosine: steps is missing")
  check.throws(function() require("pg.optim.rate").build(pg.rate.linear { steps = 3 }, {}) end,
    "rate.linear: peak is missing")
end

-- C38: 64-bit ids and seeds.
local ODD, TEXT = 10151188881778163LL, "10151188881778163"
function tests.test_integers_beyond_a_double_are_exact_or_refused()
  for _, x in ipairs { ODD, TEXT } do
    local t = pg.tensor({ x, 1 }, "i64")
    equal(tostring(t:at(0)), "10151188881778163LL")
    equal(tostring(t:totable()[1]), "10151188881778163LL")
    equal(t:totable()[2], 1)
    equal(tostring(pg.tensor(x, "i64"):item()), "10151188881778163LL")
  end
  local above = pg.tensor({ 9007199254740993LL, "9007199254740993", -9007199254740993LL }, "i64")
  for i = 0, 2 do equal(tostring(above:at(i)):gsub("-", ""), "9007199254740993LL") end
  equal(pg.tensor({ 2^53 - 1 }, "i64"):item(), 2^53 - 1)
  for _, x in ipairs { 10151188881778163, 2^53 + 2, 2^53 } do
    check.throws(function() pg.tensor({ x }, "i64") end,
      "a Lua number is exact only below 2^53; write it as a string or as 123LL")
    check.throws(function() pg.full({ 2 }, x, "i64") end, "exact only below 2^53")
  end
  check.throws(function() pg.full({ 2 }, ODD, "i64") end, "exact only below 2^53; write it with pg.tensor")
  check.throws(function() pg.tensor({ "9223372036854775808" }, "i64") end, "not a 64-bit integer")
end

function tests.test_seeds_are_exact_or_refused()
  local function draw(seed) return pg.randn({ 4 }, { seed = seed, key = "draw" }):totable() end
  equal(draw(ODD), draw(TEXT))
  equal(draw(7), draw "7")
  is_true(draw(ODD)[1] ~= draw(10151188881778164LL)[1])
  check.throws(function() draw(10151188881778163) end,
    "randn: seed is 10151188881778164: a Lua number is exact only below 2^53")
  check.throws(function() draw(1.5) end, "randn: seed is 1.5, not an integer")
  local linear = nn.Linear { inputs = 2, outputs = 2 }
  check.throws(function() pg.build(linear, { seed = 2^53 }) end, "seed is 9007199254740992")
  equal(step.random_base(ODD, 3), step.random_base(TEXT, 3))
  equal(step.random_base(7, 3), step.random_base(7LL, 3))
  is_true(step.random_base(7, 3) ~= step.random_base(7, 4))
end

step.block() -- lives as long as the process
check.run(tests)
