-- parallel/schedule_check.lua: can the lists of a schedule (schedule_steps.lua) be run, and how much do they hold?
-- What is assumed of the wire: a send never blocks; a receive waits for its message; messages from one stage to
-- another in one direction (activations, or gradients) are received in the order in which they were sent.
local c = require "pg.c"
local steps = require "pg.parallel.schedule_steps"

-- Every forward and backward once, backward behind forward, weight at most once and behind backward.
-- where[key] is a step's position in the list of its stage.
local BEFORE = { backward = "forward", weight = "backward" }

local function check_stage(list, stage, sizes, name, where)
  local function fault(i, text, ...)
    local step = list[i]
    c.fail("%s: stage %d, step %d: %s %s", name, stage, i, steps.say(step[1], step[2], step[3], sizes),
           text:format(...))
  end
  for i, step in ipairs(list) do
    local key = steps.key(step[1], step[2], step[3], sizes)
    if where[key] then fault(i, "again; step %d did it", where[key]) end
    where[key] = i
  end
  for i, step in ipairs(list) do
    local first = BEFORE[step[1]]
    local at = first and where[steps.key(first, step[2], step[3], sizes)]
    if first and (not at or at > i) then
      fault(i, "comes before its %s, %s", first, at and "step " .. at or "which the list does not have")
    end
  end
  for chunk = stage, sizes.stages * sizes.chunks - 1, sizes.stages do
    for micro = 1, sizes.micro do
      for _, kind in ipairs { "forward", "backward" } do
        if not where[steps.key(kind, micro, chunk, sizes)] then
          c.fail("%s: stage %d has no %s", name, stage, steps.say(kind, micro, chunk, sizes))
        end
      end
    end
  end
end

-- The steps of one stage that send to (sign 1) or receive from (sign -1) another, in order: { position, micro,
-- chunk of the receiver }.
local function messages(list, kind, sign, other, sizes)
  local forth = kind == "forward" and 1 or -1
  local last, out = sizes.stages * sizes.chunks - 1, {}
  for i, step in ipairs(list) do
    local peer = step[3] + sign * forth
    if step[1] == kind and peer >= 0 and peer <= last and peer % sizes.stages == other then
      out[#out + 1] = { i, step[2], sign == 1 and peer or step[3] }
    end
  end
  return out
end

local CARRIES = { forward = "activations", backward = "gradients" }

local function check_order(lists, kind, from, to, sizes, name)
  local sent = messages(lists[from + 1], kind, 1, to, sizes)
  local wanted = messages(lists[to + 1], kind, -1, from, sizes)
  for i, a in ipairs(sent) do
    local b = wanted[i]
    if a[2] ~= b[2] or a[3] ~= b[3] then
      local function of(x)
        return ("micro-batch %d%s"):format(x[2], sizes.chunks > 1 and " for chunk " .. x[3] or "")
      end
      c.fail("%s: stage %d sends the %s of %s (its step %d) where stage %d receives those of %s (its step %d); "
             .. "messages arrive as they were sent: give both stages one order", name, from, CARRIES[kind], of(a),
             a[1], to, of(b), b[1])
    end
  end
end

-- Neighbours on the ring of stages are all who ever exchange something.
local function check_orders(lists, sizes, name)
  local n = sizes.stages
  if n == 1 then return end
  for s = 0, n - 1 do
    check_order(lists, "forward", s, (s + 1) % n, sizes, name)
    check_order(lists, "backward", s, (s - 1) % n, sizes, name)
  end
end

-- Stages that wait for one another: from any that is stuck to the one it waits for, until one comes again.
local function circle(lists, at, sizes, where)
  local stage = 0
  while not lists[stage + 1][at[stage + 1]] do stage = stage + 1 end
  local seen, parts = {}, {}
  while not seen[stage] do
    local step = lists[stage + 1][at[stage + 1]]
    local chunk = steps.need(step, sizes)
    local other = chunk % sizes.stages
    parts[#parts + 1] = ("stage %d waits at its step %d (%s) for step %d of stage %d"):format(stage, at[stage + 1],
      steps.say(step[1], step[2], step[3], sizes), where[steps.key(step[1], step[2], chunk, sizes)], other)
    seen[stage] = #parts
    stage = other
  end
  return table.concat(parts, "; ", seen[stage])
end

-- The most (micro, chunk) on one stage: alive from forward to the end of backward, put off from there to the end
-- of weight.
local function count(list, sizes, where)
  local alive, put_off = 0, 0
  local most = { alive = 0, put_off = 0, total = 0, at = 0 }
  for i, step in ipairs(list) do
    local kind = step[1]
    if kind == "forward" then alive = alive + 1
    elseif kind == "weight" then put_off = put_off - 1
    else
      alive = alive - 1
      if where[steps.key("weight", step[2], step[3], sizes)] then put_off = put_off + 1 end
    end
    if alive > most.alive then most.alive, most.at = alive, i end
    most.put_off, most.total = math.max(most.put_off, put_off), math.max(most.total, alive + put_off)
  end
  return most
end

local function limit_of(limit, s)
  if type(limit) == "table" then return limit[s] end
  return limit
end

local function check_limit(list, stage, most, limit, sizes, name)
  if not limit or most.alive <= c.within(limit, "limit", 1) then return end
  local step = list[most.at]
  c.fail("%s: stage %d keeps the activations of %d %s at its step %d (%s); the limit is %d", name, stage, most.alive,
         sizes.chunks > 1 and "micro-batches and chunks" or "micro-batches", most.at,
         steps.say(step[1], step[2], step[3], sizes), limit)
end

--- check(lists, o) -> { alive =, put_off =, total = }, lists by stage of the most (micro-batch, chunk) whose
-- activations are kept at a time: alive between forward and the end of backward; put_off between a backward that
-- makes the input gradient alone and its weight step; total: both together.
-- o: stages, micro, chunks (1); limit (a number or a list by stage): the most that may be alive; name: for messages.
-- Raises where the lists are incomplete, out of order or would wait for ever, naming stage, position and step.
return function(lists, o)
  c.keys(o, { "stages", "micro", "chunks", "limit", "name" }, "schedule check")
  local sizes, name, where = steps.sizes(o), o.name or "schedule", {}
  lists = steps.fill(lists, sizes, name)
  for s, list in ipairs(lists) do check_stage(list, s - 1, sizes, name, where) end
  check_orders(lists, sizes, name)
  local at = steps.walk(lists, sizes)
  if at then c.fail("%s never ends: %s", name, circle(lists, at, sizes, where)) end
  local peaks, limit = { alive = {}, put_off = {}, total = {} }, o.limit
  for s, list in ipairs(lists) do
    local most = count(list, sizes, where)
    peaks.alive[s], peaks.put_off[s], peaks.total[s] = most.alive, most.put_off, most.total
    check_limit(list, s - 1, most, limit_of(limit, s), sizes, name)
  end
  return peaks
end
