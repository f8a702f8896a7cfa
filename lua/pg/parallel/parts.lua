-- parallel/parts.lua: which part of a model a stage of a pipeline holds.
-- The layers of a language model are an nn.Sequential: first the embedding, then blocks, then the head.  Blocks are
-- cut into chunks (stages.lua), the embedding goes with the first and the head with the last.  What a stage does
-- not hold is marked absent before pg.build gives anything numbers.
-- A parameter that several stages use (a tied head, or one outside the layers) has a segment of its own on each
-- of them, under one name and of one size, and their gradients are summed over those stages.
local c = require "pg.c"
local lm = require "pg.nn.lm"
local mesh = require "pg.mesh"
local Sequential = require("pg.nn.layers").Sequential
local stages = require "pg.parallel.stages"

local parts = {}

--- parts.count(module) -> its parameters, each once, whatever rank holds them.
function parts.count(module)
  local count, seen = 0, {}
  module:each_parameter(function(p)
    if not seen[p] then
      seen[p] = true
      count = count + p.count
    end
  end)
  return count
end

-- Stages run the layers themselves, so nothing around them may have a say.
local function layers_of(model, pp)
  local layers = model.layers
  if not (layers and layers.items and model.part == lm.LM.part) then
    c.fail("layout.pp = %d: a pipeline needs an nn.LM, whose layers are an nn.Sequential; use layout.pp = 1", pp)
  end
  if model.forward ~= lm.LM.forward or model.loss ~= lm.LM.loss or layers.forward ~= Sequential.forward then
    c.fail("layout.pp = %d: the model has a forward or loss of its own around its layers, which stages would pass by; "
           .. "make it an item of the layers or the recipe's loss, or use layout.pp = 1", pp)
  end
  return layers
end

-- How many blocks there must be.
local function check_blocks(blocks, pp, chunks)
  local n = pp * chunks
  if blocks >= n then return end
  local what = chunks > 1 and ("layout.pp %d x layout.chunks %d = %d chunks"):format(pp, chunks, n)
    or ("layout.pp = %d: %d stages"):format(pp, pp)
  local fits = blocks >= pp and ("layout.chunks = %d"):format(math.floor(blocks / pp))
    or blocks > 0 and ("layout.pp = %d"):format(blocks) or "layout.pp = 1"
  c.fail("%s, each takes at least one block, and the model has %d; nearest that fit: %s, or a model of %d blocks",
         what, blocks, fits, n)
end

-- What each block costs, in parameters; the first also pays for the embedding, the last for the head (a tied head
-- multiplies as much as one of its own).
local function costs_of(items)
  local costs, n = {}, #items - 2
  for i = 1, n do costs[i] = parts.count(items[i + 1]) end
  costs[1] = costs[1] + parts.count(items[1])
  costs[n] = costs[n] + parts.count(items[n + 2])
  return costs
end

-- Stages that use each parameter, in order of the model; every stage has what lies outside the layers.
local function users_of(model, stage_of, pp)
  local users, order = {}, {}
  local function use(p, stage)
    if not users[p] then
      users[p] = {}
      order[#order + 1] = p
    end
    users[p][stage] = true
  end
  local inside = {}
  for i, item in ipairs(model.layers.items) do
    item:each_parameter(function(p)
      inside[p] = true
      use(p, stage_of[i])
    end)
  end
  model:each_parameter(function(p)
    for stage = 0, pp - 1 do
      if not inside[p] then use(p, stage) end
    end
  end)
  return users, order
end

-- Mark what several stages hold -> { { parameter, { stage, ... } }, ... }.
local function mark_shared(model, stage_of, pp)
  local shared = {}
  local users, order = users_of(model, stage_of, pp)
  for _, p in ipairs(order) do
    local list = {}
    for stage = 0, pp - 1 do
      if users[p][stage] then list[#list + 1] = stage end
    end
    if #list > 1 then
      p.alone, p.stages = true, #list
      shared[#shared + 1] = { p, list }
    end
  end
  return shared
end

--- parts.cut(model, { pp =, chunks =, blocks = }) -> { [chunk] = { first, last item }, chunks =, pp =, shared = }, from
-- chunk 0 on; chunks: of each stage; blocks: how many each chunk takes, or nil: as even as their parameters allow.
-- No rank is asked: it may come before the mesh is built.
function parts.cut(model, o)
  local pp, chunks = o.pp, o.chunks or 1
  local items = layers_of(model, pp).items
  check_blocks(#items - 2, pp, chunks)
  local plan, stage_of = { chunks = chunks, pp = pp }, {}
  local ok, runs = pcall(stages.cut, costs_of(items), pp * chunks, o.blocks)
  if not ok then c.fail("layout.blocks: %s", (c.plain(runs):gsub("^stages: ", ""))) end
  for i, run in ipairs(runs) do
    plan[i - 1] = { run[1] + 1, run[2] + 1 } -- item 1 is the embedding
  end
  plan[0][1], plan[pp * chunks - 1][2] = 1, #items
  for chunk = 0, pp * chunks - 1 do
    for i = plan[chunk][1], plan[chunk][2] do stage_of[i] = chunk % pp end
  end
  plan.stage_of, plan.shared = stage_of, mark_shared(model, stage_of, pp)
  return plan
end

--- parts.mark(model, plan, stage): what other stages hold is absent.
function parts.mark(model, plan, stage)
  for i, child in ipairs(model.layers.children) do child.absent = plan.stage_of[i] ~= stage end
end

--- parts.join(model, plan): after pg.build: groups of the stages that share a parameter, and the segments of each of
-- this stage's chunks (plan.segments).  All ranks of mesh.pp call it.
function parts.join(model, plan)
  local stage, homes = mesh.pp.rank, {}
  for _, entry in ipairs(plan.shared) do
    local p, list = entry[1], entry[2]
    for _, s in ipairs(list) do
      if s == stage then p.segment.tied = mesh.pp:group(list, "stages that share " .. p.name) end
    end
  end
  plan.segments, plan.rest = {}, {}
  for chunk = stage, plan.pp * plan.chunks - 1, plan.pp do
    local list = {}
    for i = plan[chunk][1], plan[chunk][2] do
      for _, p in ipairs(model.layers.items[i]:parameters()) do
        if not homes[p.segment] then
          homes[p.segment] = true
          list[#list + 1] = p.segment
        end
      end
    end
    plan.segments[chunk] = list
  end
  for _, s in ipairs(model.segments) do -- outside the layers: whole when all chunks are
    if not homes[s] then plan.rest[#plan.rest + 1] = s end
  end
end

return parts
