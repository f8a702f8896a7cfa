-- test_ops_golden.lua: every case of tests/golden/ops.safetensors through the ops, value and gradient,
-- in f32 and in f64, against the numbers that PyTorch computed in double.
local check = require "tests.check"
local golden = require "tests.golden"
local pieces = require "tests.pieces"
local tape = require "pg.tape"
local nn = pg.nn
local tests = {}

local file = golden.open "ops"
local cases = file:meta "cases"

-- How a case runs: run[op](inputs by name, attributes, dtype) -> outputs by name.  The statistics that an
-- op keeps for its gradient are read from its record.
local run = {}
local function kept(y, i) return y.record.saved[i] end
local function one(t) return pg.reshape(t, { 1 }) end

function run.unary(x, a) return { y = pg[a.kind](x.x) } end
local binary = { max = "maximum", min = "minimum" }
function run.binary(x, a) return { y = pg[binary[a.kind] or a.kind](x.a, x.b) } end
function run.axpby(x, a) return { y = pg.scale(x.x, a.alpha) + pg.scale(x.before, a.beta) } end

function run.matmul(x, a)
  local ta, tb = a.transpose_a == 1, a.transpose_b == 1
  if a.epilogue then
    local y = pg.linear(x.a, x.b, x.bias, a.epilogue ~= "none" and a.epilogue or nil)
    return { y = y, aux = a.epilogue == "none" and y or kept(y, 3) }
  end
  if ta and #x.a.shape > 2 and a.sum then -- equal leading dims fold into the summed dim
    return { y = pg.matmul(pg.reshape(x.a, { -1, x.a.shape[#x.a.shape] }),
                           pg.reshape(x.b, { -1, x.b.shape[#x.b.shape] }), { ta = true }) }
  end
  local y = pg.matmul(x.a, x.b, { ta = ta, tb = tb })
  if a.alpha then y = pg.scale(y, a.alpha) + pg.scale(x.before, a.beta) end
  return { y = y }
end

function run.rmsnorm(x, a)
  local y = pg.rmsnorm(x.x, x.w, a.eps)
  return { y = y, rstd = kept(y, 3) }
end
function run.layernorm(x, a)
  local y = pg.layernorm(x.x, x.w, x.b, a.eps)
  return { y = y, mean = kept(y, 3), rstd = kept(y, 4) }
end

function run.rope_table(_, a, dtype)
  local cos, sin = pg.rope_table(7 + a.first, 10, a.theta, dtype)
  return { cos = pg.slice(cos, 1, a.first + 1, 7), sin = pg.slice(sin, 1, a.first + 1, 7) }
end
function run.rope(x, a)
  local cos, sin = pg.rope_table(x.x.shape[2] + a.start, a.head_width, a.theta, x.x.dtype)
  return { y = pg.rope(x.x, cos, sin, a.heads, a.start) }
end

function run.attention(x, a)
  local y = pg.attention(x.q, x.k, x.v, { heads = a.heads, kv_heads = a.kv_heads, causal = a.causal == 1,
                                          scale = a.scale, lengths = x.lengths })
  return { y = y, lse = kept(y, 5) }
end

function run.softmax(x, a) return { y = a.log == 1 and pg.log_softmax(x.x) or pg.softmax(x.x) } end
function run.swiglu(x) return { y = pg.swiglu(x.x) } end
function run.argmax(x) return { ids = pg.argmax(x.x) } end
function run.embedding(x) return { y = pg.embedding(x.table, x.ids) } end

function run.cross_entropy(x, a)
  pg.step.set { INV_TOKENS = 1 } -- with a step block the mean is the sum times this
  local rows = pg.cross_entropy(x.x, x.targets, { ignore = a.ignore, reduction = "none" })
  local y = rows
  if a.reduction ~= "rows" then
    y = pg.cross_entropy(x.x, x.targets, { ignore = a.ignore, step = a.reduction == "sum" and pg.step.block() or nil })
  end
  return { y = y, lse = kept(y, 3), rows = rows }
end

function run.reduce(x, a)
  if a.dim < 0 then return { y = one(pg[a.kind](x.x)) } end
  return { y = pg[a.kind](x.x, a.dim + 1) }
end
function run.slice(x, a) return { y = pg.slice(x.x, a.dim + 1, a.start + 1, a.count) } end
function run.concat(x, a) return { y = pg.concat({ x.a, x.b }, a.dim + 1) } end
function run.permute(x, a)
  local order = {}
  for i, d in ipairs(a.order) do order[i] = d + 1 end
  return { y = pg.permute(x.x, order) }
end

-- A module of the parameters a and b, whose gradients are set by hand.
local function model(values, dtype, decay)
  local module = nn.class "Pair"()
  for name, value in pairs(values) do module[name] = module:param(name, value.shape, { decay = decay }) end
  pg.build(module, { dtype = dtype })
  for name, value in pairs(values) do module[name]:copy_from(value) end
  return module
end
local function set_gradient(p, g)
  p.grad:copy_from(g)
  p.grad_fresh = false
end

function run.clip(x, a, dtype)
  local m = model({ a = pg.zeros(x.a.shape, dtype), b = pg.zeros(x.b.shape, dtype) }, dtype)
  local optim = pg.optim.sgd(m:parameters(), { rate = 1, clip = a.max_norm }) -- value = -clipped gradient
  set_gradient(m.a, x.a)
  set_gradient(m.b, x.b)
  local norm = optim:step()
  return { norm = norm, ya = pg.neg(m.a), yb = pg.neg(m.b) }
end

-- Each parameter a and b in turn: one optimiser for both where decay follows the shape, as users have
-- it, else one for each.
local function update(name, moments, settings_of)
  run[name] = function(x, a, dtype)
    local groups = a.decay[2] == 0 and { { "a", "b" } } or { { "a" }, { "b" } }
    local outputs = {}
    for _, group in ipairs(groups) do
      local values = {}
      for _, key in ipairs(group) do values[key] = x[key] end
      local m = model(values, dtype, #group == 1 or nil)
      local now = 0
      local settings = settings_of(a)
      settings.decay = a.decay[group[1] == "b" and 2 or 1]
      settings.rate = function(state) return a.rates[state.step] end
      local optim = pg.optim[name](m:parameters(), settings)
      local history = {}
      for step = 1, #a.rates do
        now = now + 1
        for _, key in ipairs(group) do
          set_gradient(m[key], pg.reshape(pg.slice(x["g" .. key], 1, now, 1), x[key].shape))
        end
        optim:step()
        for _, key in ipairs(group) do
          history[key] = history[key] or {}
          history[key][step] = m[key]:totable()
        end
      end
      for _, key in ipairs(group) do outputs["y" .. key] = history[key] end
      for letter, moment in pairs(moments) do
        for _, piece in ipairs(pieces.states(optim)) do
          if piece.name:match "^(.*)%." == moment then outputs[letter .. piece.name:match "([^.]*)$"] = piece.view end
        end
      end
    end
    return outputs
  end
end
update("adamw", { m = "exp_avg", v = "exp_avg_sq" }, function(a) return { betas = a.betas, eps = a.eps } end)
update("sgd", { m = "momentum_buffer" }, function(a)
  return { momentum = a.momentum, dampening = a.dampening, nesterov = a.nesterov == 1 }
end)

local used = {} -- entries of the file that a test has read

local function read(name, dtype)
  local t = file:read(name, dtype)
  if t then used[name] = true end
  return t
end

-- What f64 cannot be held to: PyTorch clips by max / (norm + 1e-6), and our decay factors are f32.
local function coarse(case) return case.name == "clip.above" or case.attributes.decay ~= nil end

-- The log-sum-exp of a row that does not count is not computed.
local function of_valid_rows(values, targets)
  local list, ids = values:totable(), targets:totable()
  for i, id in ipairs(ids) do if id == -100 then list[i] = 0 end end
  return list
end

local function judge(case, dtype)
  local tolerance = dtype == "f32" and check.f32 or coarse(case) and check.f64 or check.double
  local function truth(key)
    local double, single = read(case.name .. "." .. key .. ".f64", "f64"), read(case.name .. "." .. key, dtype)
    return double or single
  end
  local inputs = {}
  for _, key in ipairs(case.inputs) do inputs[key] = read(case.name .. "." .. key, dtype) end
  for _, key in ipairs(case.gradients) do inputs[key].requires_grad = true end
  if case.name == "matmul.sum.10" then case.attributes.sum = true end
  local outputs = run[case.op](inputs, case.attributes, dtype)
  for _, key in ipairs(case.outputs) do
    check.is_true(outputs[key] ~= nil, case.name .. ": nothing computed " .. key)
    local got, want = outputs[key], truth(key)
    if case.op == "cross_entropy" and key == "lse" then
      got, want = of_valid_rows(got, inputs.targets), of_valid_rows(want, inputs.targets)
    end
    check.close(got, want, tolerance)
  end
  if #case.gradients == 0 then return end
  local y = outputs[case.outputs[1]]
  tape.backward({ y }, { read(case.name .. ".d" .. case.outputs[1], dtype) })
  for _, key in ipairs(case.gradients) do check.close(inputs[key].grad, truth("d" .. key), tolerance) end
end

for _, case in ipairs(cases) do
  for _, dtype in ipairs { "f32", "f64" } do
    tests["test_" .. case.name:gsub("%W", "_") .. "_" .. dtype] = function() judge(case, dtype) end
  end
end

-- Runs last ("z"): each entry of the file was asked for by some case.
function tests.test_z_no_golden_entry_is_left_over()
  local left = {}
  for _, name in ipairs(file:names()) do
    if not used[name] then left[#left + 1] = name end
  end
  check.equal(table.concat(left, " "), "")
end

pg.step.block() -- lives as long as the process
check.run(tests)
