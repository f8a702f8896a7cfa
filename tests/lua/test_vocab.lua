-- test_vocab.lua: losses of large vocabularies: a gradient over the logits themselves, the head by chunks of rows,
-- and who may still read the logits.  Values and gradients by differences: cases.lua; several ranks: tests/ranks.
local check = require "tests.check"
local c = require "pg.c"
local equal, is_true = check.equal, check.is_true
local tests = {}
local MB = 2^20

local function leaf(shape, key, dtype)
  local t = pg.randn(shape, { key = key, dtype = "f32" })
  if dtype then t = t:to(dtype) end
  t.requires_grad = true
  return t
end

local function some_targets(rows, vocab)
  local ids = {}
  for i = 1, rows do ids[i] = i % 5 == 0 and -100 or (i * 7919) % vocab end
  return pg.tensor(ids, "i32")
end

local llama = require "models.llama"
local function model_of(more)
  local s = { blocks = 1, width = 16, heads = 2, vocab = 29, context = 8 }
  for k, v in pairs(more or {}) do s[k] = v end
  return pg.build(llama(s))
end
local batch = { tokens = pg.tensor({ { 1, 2, 3, 4, 5 }, { 6, 7, 8, 9, 10 }, { 0, 28, 3, 7, 1 } }, "i32"),
                targets = pg.tensor({ { 2, 3, 4, 5, -100 }, { 7, -100, 9, 10, 0 }, { 28, 3, 7, 1, 2 } }, "i32") }

-- Loss and all gradients of f(model), a loss.
local function walked(model, f)
  for _, s in ipairs(model.segments) do s:fresh() end
  local loss = f(model)
  local value = loss:item()
  loss:backward()
  local all = { value }
  for _, s in ipairs(model.segments) do
    s:zero_unused()
    for _, x in ipairs(s.grad:totable()) do all[#all + 1] = x end
  end
  return all
end

local function by_forward(model) return (pg.cross_entropy(model(batch.tokens), batch.targets)) end
local function by_loss(model) return (model:loss(batch)) end

function tests.test_the_loss_of_a_model_is_that_of_its_logits()
  for _, tied in ipairs { false, true } do
    local want = walked(model_of { tied = tied }, by_forward)
    equal(walked(model_of { tied = tied }, by_loss), want) -- the same bits: the same kernels
    equal(walked(model_of { tied = tied, head_chunk = 0 }, by_loss), want)
    for _, chunk in ipairs { 1, 7, 14, 15, 1000 } do
      check.close(walked(model_of { tied = tied, head_chunk = chunk }, by_loss), want, check.f32)
    end
  end
end

function tests.test_unrecorded_losses_agree()
  local want = pg.no_grad(by_forward, model_of()):item()
  for _, chunk in ipairs { 0, 4 } do
    local model = model_of { head_chunk = chunk }
    local loss, valid = pg.no_grad(function() return model:loss(batch) end)
    check.close(loss, want, check.f32)
    equal(loss.record, nil)
    equal(valid:item(), 13)
  end
end

-- A forward of one's own has the last word.
function tests.test_a_forward_of_ones_own_is_respected()
  local function capped(model) return (pg.cross_entropy(pg.tanh(model(batch.tokens)), batch.targets)) end
  local want = walked(model_of(), capped)
  local model = model_of()
  function model:forward(ids) return pg.tanh(self.layers(ids)) end
  equal(walked(model, by_loss), want)
  local other = model_of()
  local head = other.layers.items[#other.layers.items]
  local plain = head.forward
  function head:forward(x) return pg.tanh(plain(self, x)) end
  equal(walked(other, by_loss), want)
  local sorted = model_of() -- its output is saved by the op that made it
  function sorted:forward(ids) return pg.log_softmax(self.layers(ids)) end
  local logs = walked(model_of(), function(m)
    return (pg.cross_entropy(pg.log_softmax(m(batch.tokens)), batch.targets))
  end)
  equal(walked(sorted, by_loss), logs)
end

function tests.test_logits_in_a_users_hand_stay()
  local model = model_of()
  local logits = model(batch.tokens)
  local before = logits:totable()
  pg.cross_entropy(logits, batch.targets):backward()
  equal(logits:totable(), before)
  local x = leaf({ 6, 7 }, "stay") -- a leaf stays even where the gradient may go over it
  before = x:totable()
  pg.cross_entropy(x, some_targets(6, 7), { in_place = true }):backward()
  equal(x:totable(), before)
end

function tests.test_in_place_writes_over_the_logits_alone()
  local x = leaf({ 6, 7 }, "over")
  local logits = pg.scale(x, 1)
  pg.cross_entropy(logits, some_targets(6, 7), { in_place = true }):backward()
  equal(logits:totable(), x.grad:totable())
end

-- Bytes above what is held before, at the peak of forward and backward.
local function peak_of(f)
  local peak
  pg.scope(function()
    local before = pg.memory().in_use
    c.C.pg_mem_reset_peak()
    f():backward()
    peak = pg.memory().peak - before
  end)
  return peak
end

function tests.test_no_second_buffer_of_logits()
  local rows, vocab, width = 512, 4096, 16 -- 8 MiB of logits
  local x, w, ids = leaf({ rows, width }, "x"), leaf({ vocab, width }, "w"), some_targets(rows, vocab)
  local function loss(chunk) return function() return (pg.head_loss(x, w, ids, { chunk = chunk })) end end
  loss(0)():backward() -- x.grad and w.grad are there from now on
  local plain = peak_of(function() return (pg.cross_entropy(pg.linear(x, w), ids)) end)
  local held, chunked = peak_of(loss(0)), peak_of(loss(64))
  is_true(plain > 16 * MB, tostring(plain))
  is_true(held < 8.5 * MB, tostring(held))
  is_true(chunked < 1.5 * MB, tostring(chunked))
end

-- Past the head's gradient the logits are gone, though the step's scope is open.
function tests.test_logits_go_with_the_head()
  local x, w = leaf({ 512, 16 }, "x"), leaf({ 4096, 16 }, "w")
  local at
  local probe = pg.op { name = "probe", forward = function(_, a) return pg.scale(a, 1) end,
                        grad = function(_, dy) at = pg.memory().in_use return dy end }
  pg.scope(function()
    local before = pg.memory().in_use
    pg.head_loss(probe(x), w, some_targets(512, 4096), { chunk = 0 }):backward()
    at = at - before
  end)
  is_true(at < 2 * MB, tostring(at))
end

function tests.test_large_logits_are_chunked_by_default()
  local rows, vocab = 2^13, 2^16 -- 2 GiB of logits in f32
  c.C.pg_shape_only(1)
  local ok, message = pcall(function()
    local w = leaf({ vocab, 4 }, "w")
    local function record(n, chunk)
      return pg.head_loss(leaf({ n, 4 }, "x"), w, pg.zeros({ n }, "i32"), { chunk = chunk }).record
    end
    equal(record(rows).a.chunk, 1024) -- 256 MiB
    equal(record(rows, 100).a.chunk, 100)
    equal(record(rows, 0).op.name, "cross_entropy")
    equal(record(rows / 2).op.name, "cross_entropy") -- 1 GiB
    equal(record(rows / 2, 5).a.chunk, 5)
  end)
  c.C.pg_shape_only(0)
  if not ok then error(message, 0) end
end

-- Half precision: the same rounded numbers, in f32 and in bf16 and f16; gradients of weights in f32.
function tests.test_half_precision()
  for _, dtype in ipairs { "bf16", "f16" } do
    local function both(chunk, as)
      local x, w = leaf({ 6, 8 }, "x", dtype), leaf({ 11, 8 }, "w", dtype)
      if as then
        x, w = x:to "f32", w:to "f32"
        x.requires_grad, w.requires_grad = true, true
      end
      w.grad_dtype = "f32"
      local loss = pg.head_loss(x, w, some_targets(6, 11), { chunk = chunk })
      equal(loss.dtype, "f32")
      local value = loss:item()
      loss:backward()
      equal(w.grad.dtype, "f32")
      return value, x.grad:totable(), w.grad:totable()
    end
    local value, dx, dw = both(0, "f32")
    for _, chunk in ipairs { 0, 1, 4 } do
      local value2, dx2, dw2 = both(chunk)
      check.close(value2, value, check.bf16)
      check.close(dx2, dx, check.bf16_grad)
      check.close(dw2, dw, check.bf16_grad)
    end
    local logits = leaf({ 6, 11 }, "logits", dtype)
    local loss = pg.vocab_cross_entropy(logits, some_targets(6, 9), { valid = 9 })
    local wide = logits:to "f32"
    wide.requires_grad = true
    local want = pg.vocab_cross_entropy(wide, some_targets(6, 9), { valid = 9 })
    equal(loss:item(), want:item()) -- the same f32 arithmetic
    loss:backward()
    want:backward()
    check.close(logits.grad, wide.grad, check.bf16_grad)
  end
end

function tests.test_nothing_counts()
  local x, w = leaf({ 4, 3 }, "x"), leaf({ 5, 3 }, "w")
  for _, chunk in ipairs { 0, 1, 3 } do
    local loss, valid = pg.head_loss(x, w, pg.tensor({ -1, -1, -1, -1 }, "i32"), { chunk = chunk, ignore = -1 })
    equal(loss:item(), 0)
    equal(valid:item(), 0)
    loss:backward()
    check.close(x.grad, pg.zeros { 4, 3 }, 0)
    check.close(w.grad, pg.zeros { 5, 3 }, 0)
  end
end

check.run(tests)
