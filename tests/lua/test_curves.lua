-- test_curves.lua: the shipped models against PyTorch: logits, gradients and 50 steps of AdamW from the
-- weights of tests/golden, whole, in uneven micro-batches, recomputed, and in f64.
local check = require "tests.check"
local golden = require "tests.golden"
local equal, is_true = check.equal, check.is_true
local tests = {}

local llama, gpt2 = require "models.llama", require "models.gpt2"
local files = { "llama_mha", "llama_gqa", "llama_tied", "llama_gqa_tied", "gpt2_tiny" }

-- GPT-2's files keep these [in,out] (Conv1D); our weights are [out,in].
local function turned(name) return name:find "%.c_%a+%.weight$" ~= nil end

local function build(file, dtype)
  local config = file:meta "config"
  local gpt = file.name == "gpt2_tiny"
  local description = gpt and gpt2 {} or llama { kv_heads = config.kv_heads, theta = config.theta }
  for _, key in ipairs { "blocks", "width", "heads", "vocab", "context", "tied",
    "eps" } do description[key] = config[key] end
  if not gpt then description.ffn = config.ffn end
  local model = pg.build(description, { dtype = dtype })
  pg.scope(function()
    local numbers = {}
    for _, entry in ipairs(file:names()) do
      local name = entry:match "^weight%.(.*)$"
      if name then
        local t = file:read(entry, dtype == "f64" and "f64" or "f32")
        numbers[name] = gpt and turned(name) and pg.transpose(t) or t
      end
    end
    model:load_numbers(numbers)
  end)
  return model
end

-- Rows [first, first + count) of the batch of a step, 1-based.
local function batch_of(tokens, step, first, count)
  local rows = pg.reshape(pg.slice(tokens, 1, step, 1), { tokens.shape[2], tokens.shape[3] })
  rows = pg.slice(rows, 1, first, count)
  local width = tokens.shape[3] - 1
  return { tokens = pg.slice(rows, 2, 1, width), targets = pg.slice(rows, 2, 2, width) }
end

-- Losses and gradient norms of all steps.  micro: sizes of the micro-batches of a step, nil for one.
local function curve(file, dtype, micro, recompute)
  local train = file:meta "train"
  local model = build(file, dtype)
  local tokens, rates = file:read "tokens", file:read("rates"):totable()
  local optim = pg.optim.adamw(model:parameters(), { betas = train.betas, eps = train.adam_eps, decay = train.decay,
    clip = train.clip, rate = function(state) return rates[state.step] end })
  model.layers.recompute = recompute
  local losses, norms = {}, {}
  for step = 1, train.steps do
    pg.scope(function()
      local sum, first = 0, 1
      for _, count in ipairs(micro or { train.batch }) do
        local batch = batch_of(tokens, step, first, count)
        if micro then
          pg.step.set { INV_TOKENS = 1 / (train.batch * batch.targets.shape[2]) }
          batch.step = pg.step.block()
        end
        local loss = model:loss(batch)
        loss:backward()
        sum, first = sum + loss:item(), first + count
      end
      losses[step], norms[step] = sum, optim:step()
    end)
  end
  return losses, norms
end

-- The worst point of a curve, relative to its true value.
local function along(got, want, tolerance)
  want = want:totable()
  equal(#got, #want)
  for i = 1, #want do
    local e = math.abs(got[i] / want[i] - 1)
    is_true(e <= tolerance,
      ("step %d: %.9g, not %.9g: error %.2g, tolerance %.2g"):format(i, got[i], want[i], e, tolerance))
  end
end

local function follows(file, tolerance, ...)
  local losses, norms = curve(file, ...)
  along(losses, file:read "losses.f64", tolerance)
  along(norms, file:read "norms.f64", tolerance)
end

local function gradients(file, dtype, tolerance)
  local model = build(file, dtype)
  local batch = batch_of(file:read "tokens", 1, 1, 8)
  check.close(model:forward(batch.tokens), file:read("logits", "f64"), check.f32)
  model:loss(batch):backward()
  local norms = file:read("grad_norms.f64"):totable()
  local place = {}
  for i, name in ipairs(file:meta "grad_norms") do place[name] = i end
  local seen = 0
  for _, s in ipairs(model.segments) do
    for _, piece in ipairs(s:pieces(s.grad)) do
      seen = seen + 1
      local g = turned(piece.name) and file.name == "gpt2_tiny" and pg.transpose(piece.view) or piece.view
      check.close(math.sqrt(pg.sum(pg.square(g:to "f64")):item()), norms[place[piece.name]], tolerance)
      local whole = file:read("grad." .. piece.name, "f64")
      if whole then check.close(g, whole, check.f32) end -- they are kept in f32
    end
  end
  equal(seen, #norms)
end

for _, name in ipairs(files) do
  local file = golden.open(name)
  tests["test_" .. name .. "_logits_and_gradients"] = function() gradients(file, "f32", check.f32) end
  tests["test_" .. name .. "_curve"] = function() follows(file, check.curve, "f32") end
end
local gqa, tied, small = golden.open "llama_gqa", golden.open "llama_gqa_tied", golden.open "gpt2_tiny"
function tests.test_curve_in_f64()
  gradients(gqa, "f64", check.f64)
  follows(gqa, check.f64, "f64")
  follows(small, check.f64, "f64")
end
function tests.test_curve_in_uneven_micro_batches()
  follows(gqa, check.curve, "f32", { 3, 5 })
  follows(small, check.curve, "f32", { 3, 5 })
end
function tests.test_curve_of_recomputed_blocks()
  follows(tied, check.curve, "f32", nil, true)
  follows(small, check.curve, "f32", { 4, 4 }, true)
end

function tests.test_curve_in_bf16()
  for _, name in ipairs(files) do
    local losses = curve(golden.open(name), "bf16")
    along(losses, golden.open(name):read "losses.f64", check.curve_bf16)
  end
end

-- Recomputing changes when numbers are made, not what they are.
function tests.test_recomputed_blocks_have_the_same_bits()
  local function numbers(recompute)
    local model = build(tied, "f32")
    model.layers.recompute = recompute
    local loss = model:loss(batch_of(tied:read "tokens", 1, 1, 8))
    loss:backward()
    local list = { loss:item() }
    for _, s in ipairs(model.segments) do list[#list + 1] = s.grad:totable() end
    return list
  end
  equal(numbers(true), numbers(false))
end

-- The models are so small that on a busy machine waiting for a second thread costs more than all else.
local c = require "pg.c"
c.ffi.cdef "void omp_set_num_threads(int n);"
c.C.omp_set_num_threads(1)
pg.step.block() -- lives as long as the process
check.run(tests)
