-- parallel/schedule_steps.lua: what the steps of a schedule are and what each waits for, without ranks.
-- A step is { kind, micro, chunk }: kind "forward", "backward" or "weight", micro 1..m, chunk 0..C-1 where
-- C = stages * chunks; chunk c of the model sits on stage c % stages.  Stages count from 0, as ranks do;
-- lists[s + 1] holds the steps of stage s in their order.
-- forward of chunk c needs the activations of c - 1; backward of c needs the gradients of c + 1.
local c = require "pg.c"
local describe = require "pg.describe"

local steps = {}
local KINDS = { "forward", "backward", "weight" }
local NUMBER = { forward = 0, backward = 1, weight = 2 }

--- steps.sizes(o) -> { stages =, micro =, chunks = }, each an integer of at least 1; chunks defaults to 1.
function steps.sizes(o)
  return { stages = c.within(o.stages, "stages", 1, 2^16), micro = c.within(o.micro, "micro", 1, 2^20),
           chunks = c.within(o.chunks == nil and 1 or o.chunks, "chunks", 1, 2^10) }
end

--- steps.say(kind, micro, chunk, sizes) -> "forward of micro-batch 3", with its chunk where stages hold several.
function steps.say(kind, micro, chunk, sizes)
  return ("%s of micro-batch %d%s"):format(kind, micro, sizes.chunks > 1 and ", chunk " .. chunk or "")
end

--- steps.key(kind, micro, chunk, sizes) -> a number of its own for every step of a schedule.
function steps.key(kind, micro, chunk, sizes)
  return ((micro - 1) * sizes.stages * sizes.chunks + chunk) * 3 + NUMBER[kind]
end

local function bad_number(x, low, high)
  return type(x) ~= "number" or x ~= math.floor(x) or x < low or x > high
end

-- One step as the user wrote it -> with its chunk; place: "stage 0, step 3".
local function read(step, stage, place, sizes)
  if type(step) ~= "table" then
    c.fail("%s is %s; a step is written { \"forward\", 1 }", place, describe.show(step))
  end
  local kind, micro, chunk = step[1], step[2], step[3]
  if not NUMBER[kind] then
    local near = type(kind) == "string" and c.nearest(kind, KINDS)
    c.fail("%s: %s is no kind of step%s (known: %s)", place, describe.show(kind),
           near and (", did you mean %q?"):format(near) or "", table.concat(KINDS, ", "))
  end
  if bad_number(micro, 1, sizes.micro) then
    c.fail("%s: %s of micro-batch %s; they are numbered 1 to %d", place, kind, describe.show(micro), sizes.micro)
  end
  if chunk == nil and sizes.chunks == 1 then chunk = stage end
  if bad_number(chunk, 0, sizes.stages * sizes.chunks - 1) or chunk % sizes.stages ~= stage then
    local own = {}
    for j = 0, math.min(sizes.chunks, 6) - 1 do own[#own + 1] = j * sizes.stages + stage end
    c.fail("%s: %s of micro-batch %d names chunk %s; stage %d holds chunk %s%s", place, kind, micro,
           describe.show(chunk), stage, table.concat(own, ", "), sizes.chunks > 6 and ", ..." or "")
  end
  return { kind, micro, chunk }
end

--- steps.fill(lists, sizes, name) -> a copy in which every step names its chunk.  Raises at a step that is none.
function steps.fill(lists, sizes, name)
  if type(lists) ~= "table" or #lists ~= sizes.stages then
    c.fail("%s gives %s; a list of steps for each of the %d stages is wanted", name,
           type(lists) == "table" and #lists .. " lists" or describe.show(lists), sizes.stages)
  end
  local out = {}
  for s = 1, sizes.stages do
    if type(lists[s]) ~= "table" then
      c.fail("%s: stage %d has %s, no list of steps", name, s - 1, describe.show(lists[s]))
    end
    out[s] = {}
    for i, step in ipairs(lists[s]) do
      out[s][i] = read(step, s - 1, ("%s: stage %d, step %d"):format(name, s - 1, i), sizes)
    end
  end
  return out
end

--- steps.need(step, sizes) -> the chunk whose step of the same kind and micro-batch comes first, or nil.
function steps.need(step, sizes)
  local kind, chunk = step[1], step[3]
  if kind == "forward" and chunk > 0 then return chunk - 1 end
  if kind == "backward" and chunk < sizes.stages * sizes.chunks - 1 then return chunk + 1 end
end

--- steps.received(list, sizes) -> { [key] = { forward = n, backward = n } }: how many activations and gradients a stage
-- has received from its neighbours when it has done that step.
function steps.received(list, sizes)
  local n, out = { forward = 0, backward = 0, weight = 0 }, {}
  for _, step in ipairs(list) do
    local kind = step[1]
    if steps.need(step, sizes) then n[kind] = n[kind] + 1 end
    out[steps.key(kind, step[2], step[3], sizes)] = { forward = n.forward, backward = n.backward }
  end
  return out
end

--- steps.walk(lists, sizes, visit) -> nil, or where no stage can go on: the next position of each stage.
-- visit(stage, step, need): called once for each step after the step it needs; need: that one's key or nil.
function steps.walk(lists, sizes, visit)
  local at, done, left, moved = {}, {}, 0, true
  for s, list in ipairs(lists) do at[s], left = 1, left + #list end
  while moved and left > 0 do
    moved = false
    for s, list in ipairs(lists) do
      while list[at[s]] do
        local step = list[at[s]]
        local chunk = steps.need(step, sizes)
        local need = chunk and steps.key(step[1], step[2], chunk, sizes)
        if need and not done[need] then break end
        done[steps.key(step[1], step[2], step[3], sizes)] = true
        if visit then visit(s - 1, step, need) end
        at[s], left, moved = at[s] + 1, left - 1, true
      end
    end
  end
  return left > 0 and at or nil
end

return steps
