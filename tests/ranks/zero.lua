-- ranks: 4
-- ZeRO 0 to 3 give the training of one process, which every rank computes here for itself from all rows: losses,
-- norms, weights; with accumulation, several micro-batches in flight, recomputation, tied weights, odd sizes, a frozen
-- parameter, one without gradient and one outside the layers.
local adamw = require "pg.optim.adamw"
local mesh = require "pg.mesh"
local pieces = require "tests.pieces"
local reducer = require "pg.parallel.reducer"
local step = require "pg.step"
local nn = pg.nn
local size = pg.ranks()
local ROWS, CONTEXT, VOCAB, STEPS = 12, 6, 13, 6
local BUCKET = 0.003 -- MiB: some items share a segment, and some have one of their own
local NEAR = 1e-5 -- relative: losses, norms, weights
local SETTINGS = { rate = 1e-2, betas = { 0.9, 0.95 }, decay = 0.1, clip = 0.5 }

-- ---- a model of odd sizes ----

local Extra = nn.class "Extra" -- keeps a parameter that it never uses
function Extra:init(o)
  self.up, self.unused = self:add("up", nn.Linear { inputs = o.width, outputs = o.width, bias = true }),
                         self:param("unused", { 5, 3 })
end
function Extra:forward(x) return pg.add(x, pg.tanh(self.up(x))) end

local Odd = nn.class("Odd", nn.LM)
function Odd:init(o)
  local width = 10
  self.vocab, self.context = VOCAB, CONTEXT
  local embedding = nn.Embedding { entries = VOCAB, width = width, std = 0.5 }
  local items = { { "embed", embedding }, { "extra", Extra { width = width } } }
  for i = 1, 3 do
    items[#items + 1] = { "block" .. i, nn.Block {
      norm1 = { "norm1", nn.RMSNorm { width = width } }, norm2 = { "norm2", nn.RMSNorm { width = width } },
      attention = { "attention", nn.Attention { width = width, heads = 5, std = 0.3 } },
      mlp = { "mlp", nn.GatedMLP { width = width, ffn = 7, std = 0.3 } } } }
  end
  items[#items + 1] = { "", nn.Head { norm = { "norm", nn.RMSNorm { width = width } }, width = width, vocab = VOCAB,
                                      std = 0.5, tied = o.tied and embedding or nil }, "head" }
  self.layers = self:add("", nn.Sequential(items))
  self.gain = self:param("gain", { VOCAB }, { init = { "ones" } }) -- in no item
end
function Odd:forward(ids) return pg.mul(self.layers(ids), self.gain) end
function Odd:loss(batch)
  local loss = pg.cross_entropy(self:forward(batch.tokens), batch.targets, { step = batch.step })
  return loss
end

local function build(o)
  local model = pg.build(Odd(o), { bucket = BUCKET })
  model.layers.recompute = o.recompute
  model.layers.items[3].norm1.weight.requires_grad = false
  return model
end

-- Rows first to first + n - 1 of a step's batch; some targets do not count.
local function batch(number, first, n)
  local tokens, targets = {}, {}
  for i = 1, n do
    tokens[i], targets[i] = {}, {}
    for t = 1, CONTEXT do
      local at = (number * ROWS + first + i) * CONTEXT + t
      tokens[i][t] = at * at % VOCAB
      targets[i][t] = at % 4 == 0 and -100 or (at * at + 2 * at + 1) % VOCAB
    end
  end
  return { tokens = pg.tensor(tokens, "i32"), targets = pg.tensor(targets, "i32"), step = step.block() }
end
local VALID = ROWS * CONTEXT * 3 / 4

-- ---- training ----

-- The rows of this rank's micro-batch i of `micro`, when dp ranks share them.
local function part(number, i, micro, dp)
  local n = ROWS / dp / micro
  return batch(number, (mesh.dp.rank % dp) * ROWS / dp + (i - 1) * n, n)
end

-- Gradients of a step, as a trainer makes them -> this rank's share of the loss.
local function gradients(model, sending, number, o, dp)
  local sum, losses = 0, {}
  local function forward(i)
    losses[i] = model:loss(part(number, i, o.micro, dp))
    sum = sum + losses[i]:item()
  end
  local function backward(i)
    losses[i]:backward(nil, { done = sending and sending:hook(i == o.micro) })
    if sending then sending:after(i == o.micro) end
  end
  pg.scope(function()
    for i = 1, o.micro do
      forward(i)
      if not o.in_flight then backward(i) end
    end
    for i = 1, o.in_flight and o.micro or 0 do backward(i) end
  end)
  if sending then sending:finish() end
  return sum
end

-- STEPS steps -> losses, norms, weights, the loss without recording.  dp 1: a process for itself.
local function train(o, dp)
  local model = build(o)
  local optim = adamw.new(model:parameters(), SETTINGS)
  if dp > 1 then reducer.attach(optim) end
  local losses, norms = {}, {}
  for number = 1, STEPS do
    step.set { INV_TOKENS = 1 / VALID }
    local sending = dp > 1 and reducer.new(optim.segments) or nil
    local share = gradients(model, sending, number, o, dp)
    losses[number] = dp > 1 and mesh.dp:sum_numbers { share }[1] or share
    norms[number] = optim:step { reduced = true }
  end
  local seen = pg.no_grad(function() return model:loss(batch(99, 0, ROWS)):item() end)
  return { losses = losses, norms = norms, seen = { seen }, weights = pieces.weights(model) }
end

local function near(got, want, what)
  assert(#got == #want and #want > 0, what)
  local off, norm = 0, 0
  for i = 1, #want do off, norm = off + (got[i] - want[i]) ^ 2, norm + want[i] ^ 2 end
  local fine = math.sqrt(off) <= NEAR * math.sqrt(norm)
  if not fine then -- or not a number
    error(("%s: off by %.3g of %.3g; %.9g, not %.9g"):format(what, math.sqrt(off), math.sqrt(norm), got[1], want[1]))
  end
end
local function near_all(got, want, what)
  for _, key in ipairs { "losses", "norms", "seen" } do near(got[key], want[key], what .. ": " .. key) end
  for name, w in pairs(want.weights) do near(got.weights[name], w, what .. ": " .. name) end
end

mesh.build { dp = size }
for _, tied in ipairs { false, true } do
  local alone = train({ micro = 1, tied = tied }, 1)
  assert(alone.losses[STEPS] < alone.losses[1] and alone.norms[1] > SETTINGS.clip)
  for level = 0, 3 do
    mesh.build { dp = size, zero = level }
    for _, o in ipairs { { micro = 1 }, { micro = 3 }, { micro = 3, in_flight = true },
                         { micro = 3, recompute = true } } do
      o.tied = tied
      local what = ("zero %d, micro %d%s%s%s"):format(level, o.micro, o.in_flight and ", in flight" or "",
                                                      o.recompute and ", recompute" or "", tied and ", tied" or "")
      near_all(train(o, size), alone, what)
    end
  end
  mesh.build { dp = size }
end
