-- parallel/schedule.lua: in which order a stage of a pipeline takes its micro-batches, as plain data.
-- A schedule is a function f{ stages =, micro =, chunks = } -> a list of steps for each stage (schedule_steps.lua
-- tells what a step is; schedule_check.lua whether lists can run).  No ranks here: every rank calls the same
-- function and takes its own list.
-- In every schedule here a chunk adds up its gradients in the order of the micro-batches, so that all of them give
-- the same sums.
local c = require "pg.c"
local check = require "pg.parallel.schedule_check"
local steps = require "pg.parallel.schedule_steps"

local schedule = { check = check }
local built_in = {}

-- f(stage) for each stage, collected.
local function each_stage(o, f)
  local lists = {}
  for stage = 0, o.stages - 1 do lists[stage + 1] = f(stage) end
  return lists
end

local function one_chunk(o, name)
  if o.chunks > 1 then
    c.fail("schedule %s has one chunk a stage, %d are asked for; use interleaved or gpipe, or chunks = 1", name,
           o.chunks)
  end
end

-- `warm` units forward, then one backward behind each forward, then the rest backward.
-- forward, backward: lists of { micro, chunk } in their order.
local function one_by_one(forward, backward, warm)
  local list, n = {}, #forward
  for k = 1, n + warm do
    local f, b = forward[k], backward[k - warm]
    if f then list[#list + 1] = { "forward", f[1], f[2] } end
    if b then list[#list + 1] = { "backward", b[1], b[2] } end
  end
  return list
end

-- All micro-batches forward, then all backward; with several chunks, chunk by chunk.
-- Huang et al. 2019 (one chunk); Lamy-Poirier 2023, "Breadth-First Pipeline Parallelism" (several).
built_in["gpipe"] = function(o)
  return each_stage(o, function(stage)
    local list = {}
    for j = 0, o.chunks - 1 do
      for micro = 1, o.micro do list[#list + 1] = { "forward", micro, j * o.stages + stage } end
    end
    for j = o.chunks - 1, 0, -1 do
      for micro = 1, o.micro do list[#list + 1] = { "backward", micro, j * o.stages + stage } end
    end
    return list
  end)
end

-- PipeDream-Flush: Narayanan et al. 2021a, "Memory-Efficient Pipeline-Parallel DNN Training"; Narayanan et al.
-- 2021b, "Efficient Large-Scale Language Model Training on GPU Clusters", section 2.2.1.
built_in["1f1b"] = function(o)
  one_chunk(o, "1f1b")
  return each_stage(o, function(stage)
    local order = {}
    for micro = 1, o.micro do order[micro] = { micro, stage } end
    return one_by_one(order, order, math.min(o.micro, o.stages - 1 - stage))
  end)
end

-- Micro-batches in groups: at least `stages` in each (all in one where there are fewer), as even as can be, the
-- larger ones first.  Narayanan et al. 2021b want groups of exactly `stages`; no smaller group works, because a
-- stage would turn to its next chunk before the group has been through all stages; larger ones only hold more.
local function groups(o)
  local n = math.max(1, math.floor(o.micro / o.stages))
  local small, out = math.floor(o.micro / n), {}
  for g = 1, n do out[g] = small + (g <= o.micro - small * n and 1 or 0) end
  return out
end

-- Interleaved 1F1B: Narayanan et al. 2021b, section 2.2.2.  A group goes through chunk after chunk of a stage.
-- Before its first backward the last stage must have brought one group through all its chunks but the last; each
-- stage before it is two steps further on, one for the way there and one for the way back.
built_in["interleaved"] = function(o)
  if o.chunks == 1 then return built_in["1f1b"](o) end
  local sizes = groups(o)
  return each_stage(o, function(stage)
    local forward, backward, first = {}, {}, 0
    for _, size in ipairs(sizes) do
      for j = 0, o.chunks - 1 do
        for micro = first + 1, first + size do
          forward[#forward + 1] = { micro, j * o.stages + stage }
          backward[#backward + 1] = { micro, (o.chunks - 1 - j) * o.stages + stage }
        end
      end
      first = first + size
    end
    local warm = 2 * (o.stages - 1 - stage) + (o.chunks - 1) * sizes[1]
    return one_by_one(forward, backward, math.min(warm, #forward))
  end)
end

-- ZB-H1: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.  1F1B whose weight gradients wait: stage s
-- keeps s of them put off, and so no stage ever holds more than `stages` micro-batches, as many as 1F1B's first.
built_in["zb-h1"] = function(o)
  one_chunk(o, "zb-h1")
  return each_stage(o, function(stage)
    local order, list, waiting = {}, {}, 1 -- waiting: the micro-batch whose weight step is next
    for micro = 1, o.micro do order[micro] = { micro, stage } end
    local function weight()
      list[#list + 1] = { "weight", waiting, stage }
      waiting = waiting + 1
    end
    for _, step in ipairs(one_by_one(order, order, math.min(o.micro, o.stages - 1 - stage))) do
      list[#list + 1] = step
      if step[1] == "backward" and step[2] - waiting >= stage then weight() end
    end
    while waiting <= o.micro do weight() end
    return list
  end)
end

--- schedule.names: the schedules that have a name.
schedule.names = { "gpipe", "1f1b", "interleaved", "zb-h1" }

--- schedule.find(name or function) -> the function.  Raises at an unknown name, with the nearest known one.
function schedule.find(what)
  if type(what) == "function" then return what end
  if type(what) ~= "string" then
    c.fail("a schedule is a name (%s) or a function, not %s", table.concat(schedule.names, ", "),
           what == nil and "nil" or "a " .. type(what))
  end
  if built_in[what] then return built_in[what] end
  local near = c.nearest(what, schedule.names)
  return c.fail("schedule %q is unknown%s (known: %s; your own is a function)", what,
                near and (", did you mean %q?"):format(near) or "", table.concat(schedule.names, ", "))
end

-- How messages name it.
local function name_of(what)
  if type(what) == "string" then return "schedule " .. what end
  local at = debug.getinfo(what, "S")
  return ("schedule at %s:%d"):format(at.short_src, at.linedefined)
end

--- schedule.make(name or function, o) -> lists, peaks.  The lists of all stages, checked, each step with its chunk;
-- peaks as check gives them.  o: stages, micro, chunks (1), limit (as in check).
function schedule.make(what, o)
  c.keys(o, { "stages", "micro", "chunks", "limit" }, "schedule")
  local f, sizes = schedule.find(what), steps.sizes(o)
  local lists = f { stages = sizes.stages, micro = sizes.micro, chunks = sizes.chunks }
  local name = name_of(what)
  local filled = steps.fill(lists, sizes, name)
  return filled, check(filled, { stages = sizes.stages, micro = sizes.micro, chunks = sizes.chunks, limit = o.limit,
                                 name = name })
end

return schedule
