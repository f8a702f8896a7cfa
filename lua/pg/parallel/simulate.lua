-- parallel/simulate.lua: when would each step of a schedule run?  From lists (schedule.lua) and seconds a step to a
-- timeline: timeline[s + 1] is the list of stage s, of { kind =, micro =, chunk =, start =, stop = } in seconds.
-- A pipeline's measured steps have the same form, so that both can be drawn one above the other.
local c = require "pg.c"
local check = require "pg.parallel.schedule_check"
local describe = require "pg.describe"
local steps = require "pg.parallel.schedule_steps"

local simulate = {}

-- What sizes the lists are of.
local function sizes_of(lists)
  if type(lists) ~= "table" or type(lists[1]) ~= "table" then
    c.fail("simulate wants the lists of a schedule, got %s", describe.show(lists))
  end
  local micro, chunk = 1, 0
  for _, list in ipairs(lists) do
    for _, step in ipairs(list) do
      if type(step) == "table" then
        micro, chunk = math.max(micro, tonumber(step[2]) or 1), math.max(chunk, tonumber(step[3]) or 0)
      end
    end
  end
  return { stages = #lists, micro = micro, chunks = math.floor(chunk / #lists) + 1 }
end

local function seconds(x, what)
  local wants = describe.fault(x, { "number", low = 0 })
  if wants then c.fail("%s is %s; seconds are wanted, %s", what, describe.show(x), wants) end
  return x
end

-- A number, a list by stage (their chunks share the time evenly) or by chunk -> seconds by chunk, from [0] on.
local function by_chunk(given, what, sizes)
  local all, out = sizes.stages * sizes.chunks, {}
  local list = type(given) == "table" and given
  if list and #list ~= sizes.stages and #list ~= all then
    c.fail("%s has %d numbers; one is wanted, or %d (a stage each)%s", what, #list, sizes.stages,
           sizes.chunks > 1 and (", or %d (a chunk each)"):format(all) or "")
  end
  for chunk = 0, all - 1 do
    if list and #list == all then out[chunk] = seconds(list[chunk + 1], what)
    else out[chunk] = seconds(list and list[chunk % sizes.stages + 1] or given, what) / sizes.chunks end
  end
  return out
end

local function read_times(times, sizes)
  c.keys(times, { "forward", "backward", "weight", "send" }, "times")
  local out = { send = seconds(times.send or 0, "times.send") }
  for _, kind in ipairs { "forward", "backward", "weight" } do
    out[kind] = by_chunk(times[kind] or 1, "times." .. kind, sizes)
  end
  return out
end

--- simulate.summary(timeline) -> timeline, with makespan (seconds from the first start to the last stop), idle (by
-- stage, 1 - busy / makespan) and bubble (idle's mean) filled in.
function simulate.summary(timeline)
  local first, last = math.huge, -math.huge
  for _, list in ipairs(timeline) do
    for _, step in ipairs(list) do first, last = math.min(first, step.start), math.max(last, step.stop) end
  end
  local sum = 0
  timeline.makespan, timeline.idle = math.max(last - first, 0), {}
  for s, list in ipairs(timeline) do
    local busy = 0
    for _, step in ipairs(list) do busy = busy + step.stop - step.start end
    timeline.idle[s] = timeline.makespan > 0 and 1 - busy / timeline.makespan or 0
    sum = sum + timeline.idle[s]
  end
  timeline.bubble = sum / #timeline
  return timeline
end

--- simulate.timeline(lists, times) -> timeline, with its summary.
-- times, in seconds: forward, backward (input gradient), weight (weight gradient), each a number or a list by stage,
-- which a stage's chunks share, or a list by chunk (defaults 1); send (0): how long a message is under way.
-- A backward whose stage has no weight step for it takes backward + weight.
function simulate.timeline(lists, times)
  local sizes = sizes_of(lists)
  check(lists, sizes)
  lists = steps.fill(lists, sizes, "schedule")
  local cost = read_times(times or {}, sizes)
  local put_off = {} -- the weight steps there are
  for _, list in ipairs(lists) do
    for _, step in ipairs(list) do
      if step[1] == "weight" then put_off[steps.key("weight", step[2], step[3], sizes)] = true end
    end
  end
  local out, free, stop = {}, {}, {}
  for s = 1, sizes.stages do out[s], free[s] = {}, 0 end
  local on_way = sizes.stages > 1 and cost.send or 0
  steps.walk(lists, sizes, function(stage, step, need)
    local kind, micro, chunk = step[1], step[2], step[3]
    local time = cost[kind][chunk]
    if kind == "backward" and not put_off[steps.key("weight", micro, chunk, sizes)] then
      time = time + cost.weight[chunk]
    end
    local start = math.max(free[stage + 1], need and stop[need] + on_way or 0)
    free[stage + 1] = start + time
    stop[steps.key(kind, micro, chunk, sizes)] = start + time
    local list = out[stage + 1]
    list[#list + 1] = { kind = kind, micro = micro, chunk = chunk, start = start, stop = start + time }
  end)
  return simulate.summary(out)
end

return simulate
