-- test_split.lua: parameters cut for tensor parallelism, seen by each rank in turn in one process: windows, pieces,
-- padding, copies, first numbers, what is summed over ranks, what is refused.
local check = require "tests.check"
local mesh = pg.mesh.ready()
local params = require "pg.params"
local nn = pg.nn
local equal = check.equal
local tests = {}

local llama, gpt2 = require "models.llama", require "models.gpt2"

-- What f returns where this process is rank `rank` of `size` tensor parallel ones.
local function as_rank(size, rank, f, layout)
  local tp, before = mesh.tp, mesh.layout
  mesh.tp = { name = "tp", size = size, rank = rank, group = function(_, members) return { members = members } end }
  mesh.layout = layout or { zero = 0, sequence = true }
  local ok, result = pcall(f)
  mesh.tp, mesh.layout = tp, before
  if not ok then error(result, 0) end
  return result
end

local function build(size, rank, description)
  return as_rank(size, rank, function() return pg.build(description(), { seed = 5 }) end)
end

-- { name = { { window, numbers }, ... } } as text "first row or column + how many of dim".
local function windows(model)
  local out = {}
  for _, entry in ipairs(model:named()) do
    local p = entry.piece
    local list = out[entry.name] or {}
    out[entry.name] = list
    list[#list + 1] = not p.dim and "all" or ("%d: %d+%d"):format(p.dim, p.start, p.shape[p.dim])
  end
  return out
end

local function grouped() return llama { blocks = 1, width = 16, heads = 8, kv_heads = 2, ffn = 12, vocab = 259,
                                        context = 8 } end
local function small_gpt() return gpt2 { blocks = 1, width = 8, heads = 4, vocab = 257, context = 8 } end

function tests.test_windows_of_a_llama()
  local w = windows(build(4, 3, grouped))
  local layer = "model.layers.0."
  equal(w["model.embed_tokens.weight"], { "1: 195+64" }) -- 65 each, the last padded by one
  equal(w["lm_head.weight"], { "1: 195+64" })
  equal(w[layer .. "self_attn.q_proj.weight"], { "1: 12+4" })
  equal(w[layer .. "self_attn.k_proj.weight"], { "1: 2+2" }) -- the second of two heads, held by ranks 2 and 3
  equal(w[layer .. "self_attn.o_proj.weight"], { "2: 12+4" })
  equal(w[layer .. "mlp.gate_proj.weight"], { "1: 9+3" })
  equal(w[layer .. "mlp.up_proj.weight"], { "1: 9+3" })
  equal(w[layer .. "mlp.down_proj.weight"], { "2: 9+3" })
  equal(w["model.norm.weight"], { "all" })
  equal(build(4, 3, grouped).layers.items[1].weight.shape, { 65, 16 })
end

function tests.test_a_stacked_tensor_is_cut_run_by_run()
  local w = windows(build(2, 1, small_gpt))
  equal(w["h.0.attn.c_attn.weight"], { "1: 4+4", "1: 12+4", "1: 20+4" }) -- of q, k and v
  equal(w["h.0.attn.c_attn.bias"], { "1: 4+4", "1: 12+4", "1: 20+4" })
  equal(w["h.0.attn.c_proj.bias"], { "all" })
  equal(w["h.0.mlp.c_fc.bias"], { "1: 16+16" })
  equal(w["wpe.weight"], { "all" })
  equal(w["wte.weight"], { "1: 129+128" })
  equal(windows(build(1, 0, small_gpt))["h.0.attn.c_attn.weight"], { "all" })
end

-- The window of piece p in the numbers of the whole tensor.
local function window(p, whole)
  if not p.dim then return whole end
  local columns, out = p.whole[2] or 1, {}
  for row = 0, p.whole[1] - 1 do
    for column = 0, columns - 1 do
      local at = p.dim == 1 and row or column
      if at >= p.start and at < p.start + p.shape[p.dim] then out[#out + 1] = whole[row * columns + column + 1] end
    end
  end
  return out
end

local function numbers_of(p, piece)
  local v = p:view(piece.shape, piece.first)
  local list = v:totable()
  v:free()
  return list
end

function tests.test_first_numbers_are_those_of_the_whole()
  for _, description in ipairs { grouped, small_gpt } do
    local whole = {}
    for _, entry in ipairs(build(1, 0, description):named()) do
      whole[entry.name] = numbers_of(entry.parameter, entry.piece)
    end
    for rank = 0, 3 do
      for _, entry in ipairs(build(4, rank, description):named()) do
        equal(numbers_of(entry.parameter, entry.piece), window(entry.piece, whole[entry.name]), entry.name)
      end
    end
  end
end

function tests.test_loading_takes_windows_of_whole_tensors()
  local whole, model = {}, build(4, 2, small_gpt)
  local one = build(1, 0, small_gpt)
  for i, entry in ipairs(one:named()) do
    whole[entry.name] = pg.randn(entry.piece.shape, { key = "number " .. i })
  end
  model:load_numbers(whole)
  for _, entry in ipairs(model:named()) do
    equal(numbers_of(entry.parameter, entry.piece), window(entry.piece, whole[entry.name]:totable()), entry.name)
  end
  check.throws(function()
    whole["wte.weight"] = pg.zeros { 129, 8 }
    model:load_numbers(whole)
  end, "load: wte.weight is [129,8] f32, the parameter is [257,8] f32")
end

function tests.test_padding_is_zero_and_may_be_all()
  local model = build(4, 3, function() return nn.Embedding { entries = 5, width = 3 } end) -- 2, 2, 1 and none
  equal(model.weight.shape, { 2, 3 })
  equal(model:named()[1].piece.shape, { 0, 3 })
  equal(model.weight:totable(), { 0, 0, 0, 0, 0, 0 })
  equal(build(4, 2, function() return nn.Embedding { entries = 5, width = 3 } end):named()[1].piece.shape, { 1, 3 })
end

-- ---- what ranks sum ----

local ITEM = 0.005 -- MiB: the block of this model, and not what is beside it

local function sums(size, rank, description, layout, bucket)
  local list = {}
  local model = as_rank(size, rank, function() return pg.build(description(), { bucket = bucket or ITEM }) end, layout)
  for _, s in ipairs(model.segments) do
    for _, sum in ipairs(s.sums) do
      list[#list + 1] = ("%s %d+%d %s"):format(s.name, sum.first, sum.count,
        sum.axis.members and table.concat(sum.axis.members, ",") or "tp")
    end
  end
  return list
end

function tests.test_copies_and_whole_parameters_are_summed()
  equal(sums(4, 1, grouped), { "model.layers.0 64+64 0,1", "model.layers.0 384+128 tp", "head 1088+64 tp" })
  equal(sums(4, 1, grouped, nil, 1),
        { "model.embed_tokens to head 1152+64 0,1", "model.embed_tokens to head 2560+192 tp" })
  equal(sums(4, 2, grouped, { zero = 0, sequence = false }), { "model.layers.0 64+64 2,3" })
  equal(sums(2, 1, grouped, { zero = 0, sequence = false }), {})
  equal(sums(1, 0, grouped, { zero = 0, sequence = false }), {})
end

-- ---- refused ----

local function refuses(text, size, description) check.throws(function() build(size, 0, description) end, text) end

function tests.test_what_does_not_divide_is_refused()
  local function heads(n, kv) return function()
    return llama { blocks = 1, width = 24, heads = n, kv_heads = kv, vocab = 11, context = 8 } end end
  refuses("layout.tp = 4: model.layers.0.self_attn has 6 heads and 6 kv_heads; tp must divide heads, and divide "
          .. "kv_heads or be a multiple of them; tp = 3 or tp = 6 would fit", 4, heads(6))
  refuses("layout.tp = 4: model.layers.0.self_attn has 12 heads and 3 kv_heads", 4, heads(12, 3))
  refuses("layout.tp = 4 does not divide the hidden width (ffn) of model.layers.0.mlp, 10; tp = 2 or tp = 5 would fit",
          4, function() return llama { blocks = 1, width = 16, heads = 4, ffn = 10, vocab = 11, context = 8 } end)
  refuses("layout.tp = 3 does not divide the outputs of Linear a, 4; tp = 2 or tp = 4 would fit", 3,
          function() return nn.Sequential { { "a", nn.Linear { inputs = 6, outputs = 4, split = "out" } } } end)
  refuses("layout.tp = 4 does not divide the inputs of Linear a, 6; tp = 3 or tp = 6 would fit", 4,
          function() return nn.Sequential { { "a", nn.Linear { inputs = 6, outputs = 4, split = "in" } } } end)
end

function tests.test_wrong_splits_are_refused()
  check.throws(function() nn.Linear { inputs = 2, outputs = 2, split = "rows" } end,
    'Linear: split is rows; it may be "out", "in" or nil')
  check.throws(function() nn.Linear { inputs = 2, parts = { { "a", 2 } }, split = "in" } end,
    'Linear: split = "in" goes with neither parts nor an activation')
  local Twice = nn.class "Twice"
  function Twice:init() self:add("", nn.Linear { inputs = 2, parts = { { "a", 2 }, { "a", 2 } } }) end
  check.throws(function() pg.build(Twice()) end, "two parameters are named a.weight")
end

function tests.test_rows_of_a_batch()
  local rows, tape = require "pg.nn.rows", require "pg.tape"
  local before = tape.context
  as_rank(4, 3, function()
    rows.enter(2, 6)
    local own = rows.own "test"
    equal({ own[1], own[2], own.first, own.count }, { 2, 6, 9, 3 })
    check.throws(function() rows.enter(3, 3) end, "layout.tp = 4: a micro-batch of 3 x 3 = 9 tokens does not divide by "
      .. "4; set layout.sequence = false, or micro = 4, or use tp = 3 or tp = 9")
    tape.no_grad(rows.enter, 3, 3) -- every rank takes all of them
    equal(rows.own "test", nil)
    tape.context = { training = true }
    check.throws(function() rows.own "Dropout" end, "Dropout: under layout.sequence it must know its batch")
  end)
  tape.context = before
  equal(rows.own "test", nil)
end

function tests.test_sizes_that_fit()
  local function divides(n) return function(k) return n % k == 0 end end
  equal(params.fitting(4, 6, divides(6)), "tp = 3 or tp = 6")
  equal(params.fitting(8, 6, divides(6)), "tp = 6")
  equal(params.fitting(1, 1, divides(1)), "tp = 1")
end

check.run(tests)
