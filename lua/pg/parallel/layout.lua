-- parallel/layout.lua: from the fields of a layout to a mesh, a model of which this rank holds its part, and the plan
-- that is printed.  What cannot be is refused before anything is built or sent, with the nearest that fits.
--   fields: pp, dp (or "rest"), tp, zero, bucket, sequence, tp_chunks, schedule, chunks, blocks
local c = require "pg.c"
local describe = require "pg.describe"
local log = require "pg.log"
local mesh = require "pg.mesh"
local params = require "pg.params"
local parts = require "pg.parallel.parts"
local schedule = require "pg.parallel.schedule"
local Tensor = require "pg.tensor"
local zero = require "pg.parallel.zero"

local layout = {}

-- ---- what fits ----

-- The pp and tp nearest to those given whose product divides the ranks.
local function nearest(pp, tp, ranks)
  local best, least = { 1, 1 }, math.huge
  for p = 1, ranks do
    for t = 1, ranks / p do
      local far = math.abs(math.log(p / pp)) + math.abs(math.log(t / tp))
      if ranks % (p * t) == 0 and far < least then best, least = { p, t }, far end
    end
  end
  return best[1], best[2]
end

local function ranks_text(n) return ("%d %s started"):format(n, n == 1 and "was" or "were") end

-- dp as a number; raises where the product is not the ranks.
local function dp_of(l, ranks)
  local pp, tp, dp = l.pp, l.tp, l.dp
  local fits = ranks % (pp * tp) == 0
  if dp == "rest" and fits then return ranks / (pp * tp) end
  local p, t = nearest(pp, tp, ranks)
  local instead = fits and 'layout.dp = "rest"'
    or ("a layout of %d rank%s, such as pp %d x dp %d x tp %d"):format(ranks, ranks == 1 and "" or "s", p,
                                                                     ranks / (p * t), t)
  if dp == "rest" then
    c.fail("layout: pp %d x tp %d = %d, which does not divide the ranks: %s; use -n %d, or %s", pp, tp, pp * tp,
           ranks_text(ranks), math.ceil(ranks / (pp * tp)) * pp * tp, instead)
  end
  if pp * dp * tp ~= ranks then
    c.fail("layout: pp %d x dp %d x tp %d = %d ranks, but %s; use -n %d, or %s", pp, dp, tp, pp * dp * tp,
           ranks_text(ranks), pp * dp * tp, instead)
  end
  return dp
end

--- layout.check_schedule(l, micro): chunks of a stage, and whether the schedule takes them and so many micro-batches.
function layout.check_schedule(l, micro)
  l.chunks = l.chunks or (l.schedule == "interleaved" and l.pp > 1 and 2 or 1)
  if l.pp == 1 then
    if l.chunks > 1 then
      c.fail("layout.chunks is %d; with layout.pp = 1 there is one stage, which takes its layers at once: use "
             .. "layout.chunks = 1", l.chunks)
    end
    return
  end
  local ok, why = pcall(schedule.make, l.schedule, { stages = l.pp, micro = micro or 1, chunks = l.chunks })
  if not ok then c.fail("layout.schedule: %s", c.plain(why)) end
end

--- layout.resolve(fields, ranks) -> the same as numbers: dp is one, and the product is `ranks`.
function layout.resolve(l, ranks)
  local out = { pp = l.pp or 1, tp = l.tp or 1, dp = l.dp or "rest", zero = l.zero or 0, bucket = l.bucket,
                sequence = l.sequence, tp_chunks = l.tp_chunks,
                schedule = l.schedule or "1f1b", chunks = l.chunks, blocks = l.blocks }
  out.dp = dp_of(out, ranks)
  return out
end

--- layout.share(l, batch, micro) -> micro: sequences of a micro-batch (given, or all of a rank's share), after checks
-- of the batch over dp, and of the schedule.
function layout.share(l, batch, micro)
  local rows, sequences = mesh.share(batch, l.dp, micro)
  layout.check_schedule(l, rows / sequences)
  return sequences
end

-- ---- memory ----

-- Parameters of the fullest stage, as far as can be known before they are cut over tp.
local function fullest(model, plan, tp)
  local most = 0
  for stage = 0, (plan and plan.pp or 1) - 1 do
    local count, seen = 0, {}
    local function add(p)
      if not seen[p] then
        seen[p] = true
        count = count + p.count / (p.split and tp or 1)
      end
    end
    if plan then
      for i, item in ipairs(model.layers.items) do
        if plan.stage_of[i] == stage then item:each_parameter(add) end
      end
    else model:each_parameter(add) end
    most = math.max(most, count)
  end
  return most
end

-- Weights, gradients and moments (with masters) alone must fit into the smallest rank's memory.
local function check_memory(model, plan, l, o)
  local limit = mesh.world:sum_numbers({ pg.memory().limit }, "min")[1]
  local n, dtype, share = fullest(model, plan, l.tp), Tensor.sizes[o.dtype or "f32"], l.dp
  local held = dtype == 2 and 2 or 0 -- bytes of a master beside the weight
  local weights = n * dtype / (l.zero >= 3 and share or 1)
  local gradients = n * math.max(dtype, 4) / (l.zero >= 2 and share or 1)
  local moments = n * ((o.moments or 8) + held) / (l.zero >= 1 and share or 1)
  local sum = weights + gradients + moments
  if sum <= limit then return end
  c.fail("layout: out of memory before the first step: the fullest rank would hold %s (weights %s, gradients %s, "
         .. "moments %s), the smallest has %s; take more ranks along pp or tp, a higher layout.zero with dp > 1, or a "
         .. "smaller model", log.bytes(sum), log.bytes(weights), log.bytes(gradients), log.bytes(moments),
         log.bytes(limit))
end

-- ---- building ----

local function module_of(what)
  local module = describe.is(what) and describe.build(what) or what
  if type(module) ~= "table" or not module.is_module then
    c.fail("build: %s is neither a description nor a module", tostring(what))
  end
  return module
end

--- layout.build(what, l, o) -> model, plan.  what: a description or a module; l: of layout.resolve.  The mesh stands
-- afterwards, and the model has what this rank holds of it.  o: seed, dtype; moments, the bytes an optimiser keeps
-- beside each parameter (8).  plan.parameters: of the whole model; plan is parts.cut's where there are several stages.
function layout.build(what, l, o)
  local model = module_of(what)
  local plan = (l.pp > 1 or l.blocks) and parts.cut(model, l) or {}
  plan.parameters = parts.count(model)
  mesh.build { pp = l.pp, dp = l.dp, tp = l.tp, zero = l.zero, sequence = l.sequence, tp_chunks = l.tp_chunks }
  check_memory(model, l.pp > 1 and plan or nil, l, o)
  if l.pp > 1 then parts.mark(model, plan, mesh.pp.rank) end
  params.build(model, { seed = o.seed, dtype = o.dtype, bucket = l.bucket })
  if l.pp > 1 then parts.join(model, plan) end
  zero.attach(model)
  return model, plan
end

--- layout.lay(what, l, o) -> model, as this rank holds it in the mesh that stands, without numbers (o.dtype: of them).
function layout.lay(what, l, o)
  local model = module_of(what)
  if l.pp > 1 or l.blocks then
    local plan = parts.cut(model, l)
    if l.pp > 1 then parts.mark(model, plan, mesh.pp.rank) end
  end
  params.lay(model, o)
  return model
end

-- ---- the plan, printed ----

-- "embedding, blocks 0-3"; what a stage holds, its chunks joined by "and".
local function held_text(plan, stage)
  local texts = {}
  for chunk = stage, plan.pp * plan.chunks - 1, plan.pp do
    local first, last = plan[chunk][1], plan[chunk][2]
    local a, b = math.max(first - 2, 0), math.min(last, #plan.stage_of - 1) - 2
    local words = { first == 1 and "embedding" or nil }
    words[#words + 1] = a == b and "block " .. a or ("blocks %d-%d"):format(a, b)
    if last == #plan.stage_of then words[#words + 1] = "head" end
    texts[#texts + 1] = table.concat(words, ", ")
  end
  return table.concat(texts, " and ")
end

local function schedule_text(l)
  local name = type(l.schedule) == "function" and "a schedule of its own" or "schedule " .. l.schedule
  return l.chunks > 1 and ("%s of %d chunks a stage"):format(name, l.chunks) or name
end

local zeros = { [0] = "nothing is shared out", "dp shares out moments", "dp shares out gradients and moments",
                "dp shares out weights, gradients and moments" }

-- Bytes in use under each tag, at most over the ranks; the least limit.
local function memory_line()
  local tags, held = { "weights", "masters", "gradients", "moments" }, { 0, 0, 0, 0, -pg.memory().limit }
  for _, holder in ipairs(pg.memory().holders) do
    for i, tag in ipairs(tags) do if holder.tag == tag then held[i] = holder.bytes end end
  end
  local told, words = mesh.world:sum_numbers(held, "max"), {}
  for i, tag in ipairs(tags) do
    if told[i] > 0 then words[#words + 1] = tag .. " " .. log.bytes(told[i]) end
  end
  return ("a rank holds at most: %s; it may use %s"):format(table.concat(words, ", "), log.bytes(-told[5]))
end

-- What dp costs a step, on the rank that sends most.
local function sent_line(segments, micro)
  local most = mesh.world:sum_numbers({ zero.sent(segments, micro) }, "max")
  return ("a step sends over dp, a rank at most: %s, in %d message%s"):format(log.bytes(most[1]), most[2],
                                                                           most[2] == 1 and "" or "s")
end

-- Parameters that stay whole at ZeRO 3, by name of their segments.
local function outside_line(segments)
  local names, last = {}, nil
  for _, s in ipairs(zero.outside(segments)) do
    local name = s.name:gsub(" %(%d+ of %d+%)$", "") -- one that is cut is told once
    if name ~= last then names[#names + 1] = name end
    last = name
  end
  return #names > 0 and "whole on every rank, being outside the layers: " .. table.concat(names, ", ") or nil
end

--- layout.lines(plan, l, segments, micro) -> lines that tell who holds what, once all is built; none for one rank.
-- All ranks call it.  micro: micro-batches of a step, or nil: not known.
function layout.lines(plan, l, segments, micro)
  if mesh.size() == 1 then return {} end
  local lines = { ("layout: pp %d x dp %d x tp %d%s%s"):format(l.pp, l.dp, l.tp,
    l.dp > 1 and (", zero %d (%s)"):format(l.zero, zeros[l.zero]) or "",
    mesh.layout.sequence and ", rows between blocks cut over tp" or "") }
  if l.pp > 1 then
    lines[1] = lines[1] .. ", " .. schedule_text(l)
    local each = l.dp * l.tp
    for stage = 0, l.pp - 1 do
      lines[#lines + 1] = ("stage %d, rank%s: %s"):format(stage,
        each == 1 and " " .. stage or ("s %d-%d"):format(stage * each, (stage + 1) * each - 1), held_text(plan, stage))
    end
  end
  lines[#lines + 1] = memory_line()
  if l.dp > 1 and micro then lines[#lines + 1] = sent_line(segments, micro) end
  lines[#lines + 1] = outside_line(segments)
  return lines
end

return layout
