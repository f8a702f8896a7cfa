-- ranks: 4
-- Tensor parallel models train like one process: the loss, every gradient, the norm and five AdamW steps, with rows
-- of one's own (sequence) and without, in chunks, recomputed, beside data parallelism; whole logits on every rank.
local c = require "pg.c"
local check = require "tests.check"
local mesh = pg.mesh
local tape = require "pg.tape"
local nn = pg.nn

local STEPS, B, T = 5, 4, 12
local FIRST_LOSS, LOSS, NORM = 1e-6, 1e-5, 1e-5 -- relative, of one process
local BUCKET = 0.02 -- MiB: about a block of these models, over the ranks

local function near(got, want, tolerance, what)
  if math.abs(got - want) <= tolerance * math.abs(want) then return end -- not where one is not a number
  error(("%s is %.9g, not %.9g"):format(what, got, want), 2)
end
local function close(got, want, tolerance, what)
  local e, why = check.error(got, want)
  if e > tolerance then error(("%s: error %.3g %s"):format(what, e, why or ""), 2) end
end

-- ---- models ----

local llama, gpt2 = require "models.llama", require "models.gpt2"
local function sizes(o)
  o.blocks, o.width, o.context = 2, 32, 16
  return o
end

-- A model whose first and last item and one more know nothing of ranks: rows in, rows out.
local Embed, Scale, Logits = nn.class "Embed", nn.class "Scale", nn.class "Logits"
function Embed:init(o) self.table = self:param("table", { o.vocab, o.width }) end
function Embed:forward(ids) return pg.embedding(self.table, ids) end
function Scale:init(o)
  self.w, self.by = self:param("w", { o.width, o.width }), self:param("by", { o.width }, { init = { "ones" } })
end
function Scale:forward(x) return pg.add(x, pg.mul(pg.silu(pg.linear(x, self.w)), self.by)) end
function Logits:init(o) self.w = self:param("w", { o.vocab, o.width }) end
function Logits:forward(x) return pg.linear(x, self.w) end
local Own = nn.class("Own", nn.LM)
function Own:init(o)
  self.vocab, self.context = o.vocab, 16
  local block = nn.Block { norm1 = { "n1", nn.LayerNorm { width = o.width } },
                           attention = { "a", nn.Attention { width = o.width, heads = 4 } },
                           norm2 = { "n2", nn.RMSNorm { width = o.width } },
                           mlp = { "m", nn.GatedMLP { width = o.width, ffn = 48 } } }
  self.layers = self:add("", nn.Sequential { { "e", Embed(o) }, { "s", Scale(o) }, { "b", block }, { "l", Logits(o) } })
end

local models = {
  grouped = function() return llama(sizes { heads = 8, kv_heads = 2, vocab = 259, ffn = 64 }) end, -- C20
  tied = function() return llama(sizes { heads = 4, vocab = 257, tied = true }) end,
  gpt2 = function() return gpt2(sizes { heads = 4, vocab = 259, dropout = 0.1 }) end,
  own = function() return Own { width = 32, vocab = 19 } end,
}

-- ---- training ----

local function ids(first, rows, shift, vocab)
  local list = {}
  for b = 1, rows do
    list[b] = {}
    for t = 1, T do
      local n = (first + b) * 31 + (t + shift) * (t + shift) * 7
      list[b][t] = n % vocab
    end
  end
  return pg.tensor(list, "i32")
end

-- This rank's sequences of the batch; every second target of the first does not count.
local function batch(vocab, shared)
  local rows = shared and B or B / mesh.dp.size
  local first = shared and 0 or mesh.dp.rank * rows
  tape.context = { training = true, step = pg.step.block(), sample0 = first }
  return { tokens = ids(first, rows, 0, vocab), targets = ids(first, rows, 1, vocab), share = true }
end

-- { name = whole tensor } of every parameter's numbers in a flat buffer ("value" or "grad") of its segment.
local function whole(model, buffer)
  local out = {}
  for _, s in ipairs(model.segments) do
    for _, p in ipairs(s.params) do
      for _, piece in ipairs(p.pieces) do
        local all = out[piece.name] or pg.zeros(piece.whole)
        out[piece.name] = all
        local v = s[buffer]:view(piece.shape, p.offset + piece.first)
        local part = pg.scale(v:detach(), 1 / (piece.dim and piece.copies or mesh.tp.size))
        if v.count > 0 then c.check(c.C.pg_place(all.raw, part.raw, (piece.dim or 1) - 1, piece.start, 1)) end
      end
    end
  end
  for _, p in ipairs(model:named()) do
    if out[p.name] and not out[p.name].summed then
      mesh.tp:all_reduce(out[p.name])
      out[p.name].summed = true
    end
  end
  return out
end

-- Five steps -> losses, norms, gradients of the first, weights after the last, logits before the first.
local function train(name, recompute, shared)
  local model = pg.build(models[name](), { seed = 7, bucket = BUCKET })
  model.layers.recompute = recompute
  require("pg.parallel.zero").attach(model)
  -- eps: above the rounding of gradients that are zero by nature (of the bias of keys)
  local optim = pg.optim.adamw(model:parameters(), { rate = 1e-3, clip = 1, decay = 0.1, eps = 1e-4 })
  local r = { losses = {}, norms = {} }
  tape.context = { training = false }
  r.logits = tape.no_grad(model, ids(0, 3, 0, model.vocab)):keep()
  r.odd = tape.no_grad(model, ids(0, 1, 0, model.vocab):view { 4, 3 }:view({ 1, 3 }, 0)):keep()
  for step = 1, STEPS do
    pg.scope(function()
      local loss = model:loss(batch(model.vocab, shared))
      loss:backward()
      r.norms[step] = optim:step()
      r.losses[step] = mesh.dp:sum_numbers { loss:item() }[1] / mesh.dp.size
      if step == 1 and mesh.layout.zero == 0 then
        r.gradients = whole(model, "grad")
        for _, g in pairs(r.gradients) do g:keep() end
      end
    end)
  end
  r.weights = mesh.layout.zero == 0 and whole(model, "value") or nil
  return r
end

local function compare(got, want, what)
  near(got.losses[1], want.losses[1], FIRST_LOSS, what .. ": loss 1")
  for i = 1, STEPS do
    near(got.losses[i], want.losses[i], LOSS, ("%s: loss %d"):format(what, i))
    near(got.norms[i], want.norms[i], NORM, ("%s: norm %d"):format(what, i))
  end
  for _, kind in ipairs(got.weights and { "gradients", "weights" } or {}) do -- elsewhere they are windows
    for name, g in pairs(want[kind]) do
      close(got[kind][name], g, check.f32, ("%s: %s of %s"):format(what, kind, name))
    end
    for name in pairs(got[kind]) do assert(want[kind][name], name) end
  end
  close(got.logits, want.logits, check.f32, what .. ": logits")
  close(got.odd, want.odd, check.f32, what .. ": logits of three tokens")
end

local layouts = {
  { tp = 4 }, { tp = 4, sequence = false }, { tp = 2, dp = 2 }, { tp = 2, dp = 2, sequence = false },
  { tp = 4, tp_chunks = 2 }, { tp = 4, tp_chunks = 3 }, { tp = 2, dp = 2, tp_chunks = 2 },
  { tp = 2, dp = 2, tp_chunks = 5, recompute = true },
  { tp = 4, sequence = false, recompute = true }, { tp = 2, dp = 2, zero = 3 },
}
local function text(layout)
  local list = {}
  for _, key in ipairs { "tp", "dp", "zero", "sequence", "tp_chunks", "recompute" } do
    if layout[key] ~= nil then list[#list + 1] = key .. " " .. tostring(layout[key]) end
  end
  return table.concat(list, ", ")
end

local only = os.getenv "ONLY"
for name in pairs(models) do assert(not only or models[only], name) end
for _, name in ipairs { "grouped", "tied", "gpt2", "own" } do
  if not only or only == name then
    mesh.build {} -- four ranks that all do the whole: one process
    local want = train(name, false, true)
    for _, layout in ipairs(layouts) do
      mesh.build(layout)
      compare(train(name, layout.recompute), want, name .. ", " .. text(layout))
    end
  end
end

-- ---- weight gradients put off, weights that stand still, half precision ----

-- Gradients of one batch, bit for bit the same however the walk is cut.
local function walked(model, put_off)
  return pg.scope(function()
    local loss = model:loss(batch(model.vocab))
    if put_off then
      local later = {}
      loss:backward(nil, { later = later })
      tape.finish(later)
    else
      loss:backward()
    end
    local out = {}
    for i, s in ipairs(model.segments) do
      s:zero_unused()
      s:fresh()
      out[i] = s.grad:totable()
    end
    return out
  end)
end
mesh.build { tp = 2, dp = 2 }
for _, name in ipairs { "grouped", "gpt2" } do
  local model = pg.build(models[name]())
  check.equal(walked(model, true), walked(model, false), name)
  local frozen = model:named()[4].parameter
  frozen.requires_grad = false
  check.equal(walked(model, true), walked(model, false), name)
  frozen.requires_grad = true
end

mesh.build {}
local full = pg.build(models.grouped(), { seed = 7 })
local want = full:loss(batch(259, true)):item()
for _, layout in ipairs { { tp = 4 }, { tp = 4, sequence = false } } do
  mesh.build(layout)
  local half = pg.build(models.grouped(), { seed = 7, dtype = "bf16" })
  local loss = half:loss(batch(259, true))
  near(loss:item(), want, check.bf16, "loss in bf16")
  loss:backward()
  for _, s in ipairs(half.segments) do
    assert(s.grad.dtype == "f32" and pg.nonfinite(s.grad) == 0)
    s:zero_unused()
  end
end

-- ---- refused ----

mesh.build { tp = 4 }
local function build(description) return function() pg.build(description) end end
check.throws(build(llama { width = 24, heads = 6, vocab = 11, context = 8 }),
             "layout.tp = 4: model.layers.0.self_attn has 6 heads and 6 kv_heads; tp must divide heads, and divide "
             .. "kv_heads or be a multiple of them; tp = 3 or tp = 6 would fit")
check.throws(build(llama { width = 16, heads = 4, ffn = 10, vocab = 11, context = 8 }),
             "layout.tp = 4 does not divide the hidden width (ffn) of model.layers.0.mlp, 10; tp = 2 or tp = 5 would "
             .. "fit")
local model = pg.build(models.own(), { seed = 7 })
check.throws(function()
  model:loss { tokens = pg.zeros({ 1, 3 }, "i32"), targets = pg.zeros({ 1, 3 }, "i32") }
end, "layout.tp = 4: a micro-batch of 1 x 3 = 3 tokens does not divide by 4; set layout.sequence = false, or micro = "
     .. "4, or use tp = 3")
local stacked, c_attn = pg.build(models.gpt2()), "h.0.attn.c_attn.weight"
local rows = 0 -- q, k and v are cut each for itself
for _, entry in ipairs(stacked:named()) do rows = rows + (entry.name == c_attn and entry.piece.shape[1] or 0) end
assert(stacked:gradient(c_attn).shape[1] == rows and 4 * rows == 3 * stacked.settings.width)
local tied = pg.build(models.tied())
check.throws(function() tied(pg.tensor({ { 0, 257, 1, 1 } }, "i32")) end,
             "embedding: id 257 at row 0, column 1 is outside the vocabulary [0,257)")
check.throws(function()
  tape.context = { training = true }
  pg.build(nn.MLP { width = 4, ffn = 8 })(pg.ones { 4, 4 })
end, "Linear: under layout.sequence it must know its batch")
pg.barrier()
