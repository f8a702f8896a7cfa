-- matrix/draw.lua: combinations of layouts and features, as plain tables: what there is to combine, which combinations
-- do not fit (and what the refusal says), and lists that hold every pair of two features' values that fits.
--   { kind = "grouped", dp = 2, tp = 2, zero = 3, micro = 2, steps = 5 }
-- A field that is not there has its default, as in a recipe; one that would mean nothing (the schedule of one stage)
-- is left out.  No ranks here; run.lua trains them.
local draw = { BATCH = 24, CONTEXT = 16 } -- sequences of a step, tokens of each

-- ---- models ----

-- What each kind of model is made of: names of a description's fields, and beside them
-- gpt2: it is one; sgd: trained by SGD; aside: not drawn.
draw.kinds = {
  plain    = { blocks = 4, width = 32, heads = 4, vocab = 259, ffn = 96 },
  grouped  = { blocks = 4, width = 32, heads = 8, kv_heads = 2, vocab = 257, ffn = 96, tied = true },
  one_key  = { blocks = 2, width = 16, heads = 4, kv_heads = 1, vocab = 257, ffn = 48 },
  five     = { blocks = 5, width = 24, heads = 6, kv_heads = 1, vocab = 259, ffn = 48, tied = true },
  six      = { blocks = 6, width = 24, heads = 6, kv_heads = 3, vocab = 259, ffn = 48 },
  gpt2     = { gpt2 = true, blocks = 4, width = 32, heads = 4, vocab = 259, dropout = 0.1 },
  gpt2_own = { gpt2 = true, blocks = 5, width = 24, heads = 6, vocab = 257, dropout = 0.1, tied = false },
  gpt2_sgd = { gpt2 = true, blocks = 3, width = 24, heads = 3, vocab = 257, sgd = true },
  thirty   = { blocks = 30, width = 8, heads = 2, vocab = 257, ffn = 24, aside = true },
}

-- ---- features ----

-- Name and values of each, the default first (of a kind: none).  A schedule of several chunks: name/chunks; "own": a
-- function.  micro 0: all of a rank's sequences at once.  cut "odd": all blocks that need not be elsewhere on the last
-- chunk.  bucket: 0.1 packs blocks of these models, 0.02 cuts them.  loss "own": a function of the recipe.
draw.features = {
  { "kind", { "plain", "grouped", "one_key", "five", "six", "gpt2", "gpt2_own", "gpt2_sgd" } },
  { "dp", { 1, 2, 3, 4, 8 } },
  { "pp", { 1, 2, 3, 4 } },
  { "tp", { 1, 2, 3, 4 } },
  { "zero", { 0, 1, 2, 3 } },
  { "bucket", { 256, 0.1, 0.02 } },
  { "schedule", { "1f1b", "gpipe", "gpipe/2", "interleaved/2", "zb-h1", "own" } },
  { "cut", { "even", "odd" } },
  { "micro", { 0, 1, 2, 3, 4, 6 } },
  { "recompute", { "none", "norms", "block" } },
  { "sequence", { true, false } },
  { "tp_chunks", { 1, 2, 3 } },
  { "head_chunk", { 0, 7 } },
  { "loss", { "model", "own" } },
}
local others = { { "precision", { "fp32", "bf16" } }, { "steps", { 5 } } } -- in a combination's text, not drawn

local function each_feature(f)
  for _, list in ipairs { draw.features, others } do
    for _, feature in ipairs(list) do f(feature[1], feature[2]) end
  end
end

--- draw.of(combination, name) -> the value of a field, or its default.
function draw.of(o, name)
  if o[name] ~= nil then return o[name] end
  local default
  each_feature(function(key, values) if key == name then default = values[1] end end)
  return default
end

--- draw.text(combination) -> "kind=grouped dp=2 tp=2 zero=3", without defaults.
function draw.text(o)
  local words = {}
  each_feature(function(name, values)
    if o[name] ~= nil and (name == "kind" or o[name] ~= values[1]) then
      words[#words + 1] = name .. "=" .. tostring(o[name])
    end
  end)
  return table.concat(words, " ")
end

local function value_of(text)
  if text == "true" or text == "false" then return text == "true" end
  return tonumber(text) or text
end

--- draw.parse(text) -> the combination that draw.text wrote, or that somebody types.
function draw.parse(text)
  local o, known = {}, {}
  each_feature(function(name) known[name] = true end)
  for name, value in text:gmatch "([%w_]+)=(%S+)" do
    if not known[name] then error(("matrix: a combination has no field %s"):format(name), 0) end
    o[name] = value_of(value)
  end
  if not draw.kinds[o.kind] then error(("matrix: %q names no kind of model"):format(text), 0) end
  return o
end

--- draw.ranks(combination) -> how many it takes.
function draw.ranks(o) return draw.of(o, "dp") * draw.of(o, "pp") * draw.of(o, "tp") end

--- draw.schedule(combination) -> the schedule's name, its chunks or nil.
function draw.schedule(o)
  local name, chunks = draw.of(o, "schedule"):match "^([^/]+)/?(%d*)$"
  return name, tonumber(chunks)
end

--- draw.blocks(combination) -> how many blocks each chunk takes, or nil: as even as they go.
function draw.blocks(o)
  if draw.of(o, "cut") == "even" then return nil end
  local _, chunks = draw.schedule(o)
  local n, list = draw.of(o, "pp") * (chunks or 1), {}
  for i = 1, n do list[i] = 1 end
  list[n] = math.max(1, draw.kinds[o.kind].blocks - n + 1)
  return list
end

-- ---- what does not fit ----

-- Each rule: what a refusal says, and whether a combination breaks it.
draw.rules = {
  { "tp must divide heads, and divide kv_heads or be a multiple of them", function(o, kind)
    local tp, keys = draw.of(o, "tp"), kind.kv_heads or kind.heads
    return kind.heads % tp ~= 0 or keys % tp ~= 0 and tp % keys ~= 0
  end },
  { "each takes at least one block, and the model has", function(o, kind)
    local _, chunks = draw.schedule(o)
    return draw.of(o, "pp") * (chunks or 1) > kind.blocks
  end },
  { "does not divide over dp", function(o) return draw.BATCH % draw.of(o, "dp") ~= 0 end },
  { "does not divide a rank's", function(o)
    local micro = draw.of(o, "micro")
    return micro > 0 and draw.BATCH / draw.of(o, "dp") % micro ~= 0
  end },
  { "tokens does not divide by", function(o)
    local micro = draw.of(o, "micro")
    local rows = micro > 0 and micro or draw.BATCH / draw.of(o, "dp")
    return draw.of(o, "sequence") and rows * draw.CONTEXT % draw.of(o, "tp") ~= 0
  end },
  { "has one chunk a stage", function(o)
    local name, chunks = draw.schedule(o)
    return draw.of(o, "pp") > 1 and (chunks or 1) > 1 and (name == "1f1b" or name == "zb-h1")
  end },
  { "with layout.pp = 1 there is one stage", function(o)
    local _, chunks = draw.schedule(o)
    return draw.of(o, "pp") == 1 and (chunks or 1) > 1
  end },
}

--- draw.refused(combination) -> list of texts of which a refusal holds one; nil where it fits.
function draw.refused(o)
  local kind, list = draw.kinds[o.kind], {}
  for _, rule in ipairs(draw.rules) do
    if rule[2](o, kind) then list[#list + 1] = rule[1] end
  end
  return #list > 0 and list or nil
end

-- ---- drawing ----

-- What means nothing is left out.
local function sensible(o)
  if o.dp == 1 then o.zero = nil end
  if o.pp == 1 then o.schedule, o.cut = nil, nil end
  if o.tp == 1 then o.sequence = nil end
  if o.tp == 1 or not o.sequence then o.tp_chunks = nil end
  return o
end

--- draw.one(most) -> a combination of 2 to `most` ranks, fit or not, from math.random.
function draw.one(most)
  while true do
    local o = {}
    for _, feature in ipairs(draw.features) do o[feature[1]] = feature[2][math.random(#feature[2])] end
    local ranks = draw.ranks(o)
    if ranks > 1 and ranks <= most then return sensible(o) end
  end
end

-- Numbers of the pairs of values in a combination; ids: text of a pair -> its number.
local function pairs_in(o, ids)
  local words, list = {}, {}
  for _, feature in ipairs(draw.features) do
    local name = feature[1]
    if o[name] ~= nil then words[#words + 1] = name .. "=" .. tostring(o[name]) end
  end
  for i = 1, #words do
    for k = i + 1, #words do
      local text = words[i] .. " " .. words[k]
      if not ids[text] then
        ids.count = ids.count + 1
        ids[text] = ids.count
      end
      list[#list + 1] = ids[text]
    end
  end
  return list
end

local BASE = 16 -- a smaller one makes longer lists of cheaper combinations; no unit
local POOL = 6000 -- combinations to choose from; it holds every pair that fits, many times

--- draw.cost(combination) -> about how much work it is, in ranks: each is set up, and runs micro-batches.
function draw.cost(o)
  local micro = draw.of(o, "micro")
  local turns = micro > 0 and draw.BATCH / draw.of(o, "dp") / micro or 1
  return draw.ranks(o) * (1 + turns / 2)
end

-- The combination of the pool with most pairs that are not met yet, for what it costs, and how many.
local function richest(pool, met)
  local best, most, new = nil, 0, 0
  for _, one in ipairs(pool) do
    local n = 0
    for _, id in ipairs(one.pairs) do if not met[id] then n = n + 1 end end
    local worth = n / (one.cost + BASE)
    if worth > most then best, most, new = one, worth, n end
  end
  return best, new
end

--- draw.cover(seed, count, most) -> list, left: `count` combinations that fit, of up to `most` ranks: first those that
-- hold every pair of values that fits, each as many new ones as can be, then any.  count nil: until no pair is
-- left.  left: how many pairs are.
function draw.cover(seed, count, most)
  math.randomseed(seed)
  local pool, ids, met, list = {}, { count = 0 }, {}, {}
  while #pool < math.max(POOL, count or 0) do
    local o = draw.one(most)
    if not draw.refused(o) then pool[#pool + 1] = { o = o, pairs = pairs_in(o, ids), cost = draw.cost(o) } end
  end
  local left = ids.count
  for i = 1, count or #pool do
    local one, new = richest(pool, met)
    if not one then
      if not count then break end
      one, new = pool[i], 0
    end
    for _, id in ipairs(one.pairs) do met[id] = true end
    left = left - new
    list[i] = one.o
  end
  return list, left
end

--- draw.unfit(seed, count, most) -> so many combinations that must be refused.
function draw.unfit(seed, count, most)
  math.randomseed(seed)
  local list = {}
  while #list < count do
    local o = draw.one(most)
    if draw.refused(o) then list[#list + 1] = o end
  end
  return list
end

return draw
