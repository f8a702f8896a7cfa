-- ranks: 1
-- limit: 300
-- Layouts and features combined: each combination trains as one process does, or is refused at start with a reason
-- (tests/matrix/draw.lua has what is combined, run.lua how it is compared).
--   pgrun tests/layouts/matrix.lua                a part that is always the same: every pair of values that fits, ranks
--                                                 up to 16; long runs, bf16, 32 ranks, and each rule of refusal
--   pgrun tests/layouts/matrix.lua N SEED         N that are drawn, a tenth of them unfit
--   pgrun tests/layouts/matrix.lua "kind=six tp=3"   that one
local draw = require "tests.matrix.draw"
local run = require "tests.matrix.run"

local MOST = 16 -- ranks of what is drawn
local SEED = 1

-- Each 100 steps.
local long = {
  "kind=grouped dp=2 tp=2 zero=3 micro=6 recompute=block",
  "kind=six pp=3 schedule=interleaved/2 micro=8",
  "kind=five pp=2 tp=3 schedule=zb-h1 micro=12 cut=odd",
  "kind=gpt2 dp=2 pp=2 tp=2 zero=1 micro=6 recompute=norms",
  "kind=gpt2_own dp=3 zero=2 micro=4 head_chunk=7",
  "kind=gpt2_sgd pp=3 schedule=own micro=8 loss=own",
}

local others = {
  "kind=grouped precision=bf16 dp=2 tp=2 zero=3 micro=3",
  "kind=gpt2 precision=bf16 pp=2 tp=2 schedule=zb-h1 micro=4",
  "kind=six precision=bf16 dp=2 pp=2 zero=2 schedule=interleaved/2 micro=2 recompute=block",
  "kind=five precision=bf16 tp=3 micro=3 tp_chunks=3 recompute=norms",
  "kind=plain dp=4 pp=4 tp=2 zero=3 micro=1 steps=3", -- the shape of the 32-GPU recipe
  "kind=six dp=2 pp=2 zero=3 schedule=zb-h1 micro=6 recompute=norms", -- norms made again when their weights are gone
  "kind=gpt2 tp=4 micro=2", -- a rank's rows begin within a sequence
  "kind=six pp=2 schedule=interleaved/3 micro=6",
  "kind=thirty pp=4", -- C18: 30 blocks on 4 stages
  -- C19: 8 micro-batches on 3 stages
  "kind=six pp=3 micro=3 schedule=gpipe", "kind=six pp=3 micro=3", "kind=six pp=3 micro=3 schedule=interleaved/2",
  "kind=six pp=3 micro=3 schedule=zb-h1", "kind=six pp=3 micro=3 schedule=gpipe/2",
  -- C20: 8 heads and 2 key and value heads on 4 ranks
  "kind=grouped tp=4", "kind=grouped tp=4 sequence=false",
}

-- At least one for each rule: C18 (2 blocks on 4 stages) and C20 (6 heads on 4 ranks) among them.
local refused = {
  "kind=grouped tp=3", "kind=six tp=4", "kind=five tp=2 pp=3 schedule=interleaved/2", "kind=one_key pp=4",
  "kind=plain dp=5", "kind=plain dp=2 micro=5", "kind=five tp=3 micro=1", "kind=plain pp=2 schedule=zb-h1/2",
  "kind=plain pp=2 schedule=1f1b/2", "kind=plain dp=2 schedule=gpipe/2",
}

local function parsed(list, steps)
  local out = {}
  for i, text in ipairs(list) do
    out[i] = draw.parse(text)
    out[i].steps = out[i].steps or steps
  end
  return out
end

local function join(...)
  local all = {}
  for _, list in ipairs { ... } do
    for _, o in ipairs(list) do all[#all + 1] = o end
  end
  return all
end

if os.getenv "PG_DEVICE" == "cuda" then
  print "skipped: up to 32 processes at a time, for the CPU"
  os.exit(0)
end
local list
if arg[1] and arg[1]:find "=" then list = parsed { arg[1] }
elseif arg[1] then
  local count, seed = tonumber(arg[1]), tonumber(arg[2] or SEED)
  list = join(draw.cover(seed, count - math.floor(count / 10), MOST), draw.unfit(seed, math.floor(count / 10), MOST))
else
  local covered, left = draw.cover(SEED, nil, MOST)
  assert(left == 0 and #covered >= 60, "pairs of features are left out")
  for _, rule in ipairs(draw.rules) do
    local broken = false
    for _, text in ipairs(refused) do
      local o = draw.parse(text)
      broken = broken or rule[2](o, draw.kinds[o.kind])
    end
    assert(broken, "no combination is refused because it " .. rule[1])
  end
  list = join(covered, parsed(long, 100), parsed(others), parsed(refused))
end
if run.all(list) > 0 then os.exit(1) end
