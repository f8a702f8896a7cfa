-- ranks: 4
-- C17: an inf in the gradient of one rank's share of a layer, in layouts of tp and pp: all ranks refuse that step with
-- the same words, nothing is updated, and the training goes on as if it had not been.
local attention = require "pg.ops.attention"
local mesh = pg.mesh
local rank = pg.rank()
local ROWS, T, VOCAB = 8, 8, 19

local SPOILER = 3 -- holds a part of the last layers in every layout here
local spoiling = false
local spoil = pg.op { name = "spoil", forward = function(_, x) return x:clone() end, grad = function(_, dy)
  local g = dy:clone()
  if spoiling and rank == SPOILER then g:view({ 1 }, 5):fill(1 / 0) end
  return g
end }

local function spoilt(model)
  local mlp = model.layers.items[3].mlp -- the second block's
  function mlp:forward(x) return self.down(spoil(attention.swiglu(self.gate_up(x)))) end
end

-- Every dp rank's rows of the same ids.
local function batch(step)
  local rows = ROWS / mesh.dp.size
  local tokens, targets = {}, {}
  for i = 1, rows do
    tokens[i], targets[i] = {}, {}
    for t = 1, T do
      local place = (mesh.dp.rank * rows + i) * 31 + step * 7
      tokens[i][t], targets[i][t] = (place + t * t) % VOCAB, (place + (t + 1) ^ 2) % VOCAB
    end
  end
  return { tokens = pg.tensor(tokens, "i32"), targets = pg.tensor(targets, "i32") }
end

local function start(layout)
  mesh.dp = nil -- laid out anew
  local run = pg.parallel(require "models.llama" { blocks = 2, width = 16, heads = 4, kv_heads = 2, ffn = 48,
                                                   vocab = VOCAB, context = T, tied = true }, layout, { micro = 2 })
  spoilt(run.model)
  local optim = pg.optim.adamw(run:parameters(), { rate = 1e-2, clip = 1 })
  return run, function(step)
    return pg.scope(function()
      run:gradients(batch(step))
      return optim:step()
    end)
  end
end

-- What this rank updates, as numbers.
local function weights(run)
  local out = {}
  for i, s in ipairs(run.model.segments) do out[i] = s:read_numbers():totable() end
  return out
end
local function same(got, want, what)
  for i, list in ipairs(want) do
    for k, x in ipairs(list) do
      if got[i][k] ~= x then error(("%s: %.9g is %.9g"):format(what, x, got[i][k])) end
    end
  end
end

for _, layout in ipairs {
  { tp = 4 }, { tp = 2, dp = 2, sequence = false }, { tp = 2, dp = 2, zero = 1 },
  { tp = 2, dp = 2, zero = 2, bucket = 0 }, { tp = 2, dp = 2, zero = 3, bucket = 0 },
  { pp = 2, tp = 2 }, { pp = 2, dp = 2, zero = 2, schedule = "zb-h1" },
  { pp = 2, dp = 2, zero = 3 },
} do
  local what = ("pp %d dp %d tp %d zero %d"):format(layout.pp or 1, layout.dp or 1, layout.tp or 1, layout.zero or 0)
  local run, take = start(layout)
  take(1)
  take(2)
  local want = weights(run)
  run, take = start(layout)
  take(1)
  local before = weights(run)
  spoiling = true
  local ok, message = pcall(take, 2)
  spoiling = false
  local named = require("pg.parallel.engine").looks() or mesh.dp.size == 1
  local bad = named and "%S+%.weight" or "not looked for %(PG_NAN=1 stops where it is made%)"
  local where = named and "step 2, rank %d: " or "step 2: "
  local says = where .. "the gradient norm is %a+; first bad gradient: " .. bad .. "; nothing was updated"
  assert(not ok and message:find(says), what .. ": " .. tostring(message)) -- it has spread to the layers before
  for _, other in ipairs(require("pg.agree").texts(message)) do assert(other == message, other) end
  same(weights(run), before, what .. ", after the refused step")
  take(2)
  same(weights(run), want, what .. ", a step later")
end
pg.barrier()
