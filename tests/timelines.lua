-- timelines.lua: what the tests of measured timelines share: traced steps under every schedule, and what must hold of
-- them on any machine, however busy: order, not durations.
local engine = require "pg.parallel.engine"
local layout = require "pg.parallel.layout"
local measured = require "pg.parallel.measured"
local schedule = require "pg.parallel.schedule"
local step = require "pg.step"
local tape = require "pg.tape"
local c = require "pg.c"
local llama = require "models.llama"

local timelines = {}
local B, T, VOCAB = 2, 16, 32
local HOST = 1e-9 -- seconds: times are written with so many digits

--- timelines.batches(n, rows, length, vocab) -> function(i): the i-th of `n` micro-batches, the same in every layout.
function timelines.batches(n, rows, length, vocab)
  step.set { INV_TOKENS = 1 / (n * rows * length) }
  return function(i)
    local ids, targets = {}, {}
    for b = 1, rows do
      ids[b], targets[b] = {}, {}
      for t = 1, length do ids[b][t], targets[b][t] = (7 * i + 3 * b + t * t) % vocab, (5 * i + b + t) % vocab end
    end
    tape.context = { training = true, sample0 = (i - 1) * rows, step = step.block() }
    return { tokens = pg.tensor(ids, "i32"), targets = pg.tensor(targets, "i32"), ignore = c.IGNORE,
             step = step.block(), share = true }
  end
end

local function new_engine(stages, o)
  local l = layout.resolve({ pp = stages, schedule = o.schedule, chunks = o.chunks }, stages)
  layout.check_schedule(l, o.micro)
  local model, plan = layout.build(llama { blocks = 2 * stages, width = 16, heads = 2, vocab = VOCAB, context = T }, l,
                                   { seed = 3 })
  return engine.new(model, model.segments, { plan = plan, schedule = o.schedule })
end

-- The loss and all gradients of this rank.
local function gradients(e, micro, traced)
  local loss = pg.scope(e.gradients, e, micro, timelines.batches(micro, B, T, VOCAB), { trace = traced })
  local numbers = { loss }
  for _, s in ipairs(e.segments) do
    for _, piece in ipairs(s:pieces(s.grad)) do
      for _, x in ipairs(piece.view:totable()) do numbers[#numbers + 1] = x end
      piece.view:free()
    end
    s:fresh()
  end
  return numbers
end

local function same_bits(got, want, name)
  assert(#got == #want and #got > 100, name)
  for i, x in ipairs(want) do
    if got[i] ~= x then error(("%s: number %d is %.17g when traced, %.17g else"):format(name, i, got[i], x)) end
  end
end

-- Every step of the schedule once, in its order, none before the one ahead of it has ended.
local function check_stage(list, want, name)
  assert(#list == #want, ("%s: %d steps, the schedule has %d"):format(name, #list, #want))
  local last = -math.huge
  for i, x in ipairs(list) do
    local w = want[i]
    local fine = x.kind == w[1] and x.micro == w[2] and x.chunk == w[3] and last <= x.start and x.start <= x.stop
    if not fine then
      error(("%s, step %d: %s %s %s from %.9f to %.9f; the schedule has %s %d %d, free from %.9f"):format(name, i,
        x.kind, x.micro, x.chunk, x.start, x.stop, w[1], w[2], w[3], last))
    end
    last = x.stop
  end
end

-- No step before the one whose message it takes.  Where there is one clock: how well several agree is a matter of
-- durations.
local function check_messages(m, name)
  local stop = {}
  local function key(kind, x, chunk) return ("%s:%d:%d"):format(kind, x.micro, chunk) end
  for _, list in ipairs(m.timeline) do
    for _, x in ipairs(list) do stop[key(x.kind, x, x.chunk)] = x.stop end
  end
  local n = 0
  for s, list in ipairs(m.timeline) do
    for _, x in ipairs(list) do
      local from = x.kind == "forward" and x.chunk - 1 or x.kind == "backward" and x.chunk + 1
      local sent = from and stop[key(x.kind, x, from)]
      if sent then
        n = n + 1
        if x.start < sent - HOST then
          error(("%s, stage %d: %s of %d, chunk %d, begins %.9f s before its message is there"):format(name, s - 1,
            x.kind, x.micro, x.chunk, sent - x.start))
        end
      end
    end
  end
  assert(n == 2 * m.micro * (m.stages * m.chunks - 1), name .. ": messages")
end

-- Wherever the two stand, their lists are the same.
local function check_simulated(m, name)
  local simulated = measured.simulated(m)
  for s, list in ipairs(simulated) do
    check_stage(list, measured.lists(m)[s], name .. ", simulated, stage " .. s - 1)
    for _, t in ipairs { m.timeline, simulated } do
      assert(t.idle[s] > -1e-9 and t.idle[s] < 1, ("%s: stage %d is idle for %g"):format(name, s - 1, t.idle[s]))
    end
  end
  local times, message = measured.times(m)
  local split = false
  for _, step_of in ipairs(m.timeline[1]) do split = split or step_of.kind == "weight" end
  for chunk = 1, m.stages * m.chunks do
    assert(times.forward[chunk] > 0 and times.backward[chunk] > 0 and (times.weight[chunk] > 0) == split, name)
  end
  assert(#times.forward == m.stages * m.chunks, name)
  assert(m.device ~= "cpu" or not message or message > -HOST, name)
end

--- timelines.check(stages, o): o.schedule, o.micro, o.chunks.  Returns m.
function timelines.check(stages, o)
  local name = ("%s, %d stages"):format(tostring(o.schedule), stages)
  local e = new_engine(stages, o)
  gradients(e, o.micro) -- shapes are told once
  local want = gradients(e, o.micro)
  assert(e.trace == nil, "nobody asked for a trace")
  c.collect()
  local before = pg.memory().tensors
  same_bits(gradients(e, o.micro, true), want, name)
  local m = measured.take(e, 7)
  c.collect()
  local after = pg.memory().tensors -- fewer: the engine of the check before was still about
  assert(e.trace == nil and after <= before, ("%s: %d tensors before, %d afterwards"):format(name, before, after))
  same_bits(gradients(e, o.micro), want, name .. ", afterwards")
  local chunks = e.pipe.chunks
  local lists = schedule.make(o.schedule, { stages = stages, micro = o.micro, chunks = chunks })
  for s, list in ipairs(m.timeline) do check_stage(list, lists[s], name .. ", stage " .. s - 1) end
  assert(m.stages == stages and m.micro == o.micro and m.chunks == chunks and m.step == 7, name)
  if m.device == "cpu" then check_messages(m, name) end
  check_simulated(m, name)
  return m
end

-- Backwards two behind the forwards, on every stage.
local function own(o)
  local lists = {}
  for stage = 0, o.stages - 1 do
    local list = {}
    for k = 1, o.micro + 2 do
      if k <= o.micro then list[#list + 1] = { "forward", k } end
      if k > 2 then list[#list + 1] = { "backward", k - 2 } end
    end
    lists[stage + 1] = list
  end
  return lists
end

--- timelines.all(stages) -> m of each: every schedule, with as many micro-batches as stages, more, and fewer.
function timelines.all(stages)
  local out = {}
  for _, name in ipairs(schedule.names) do
    out[#out + 1] = timelines.check(stages, { schedule = name, micro = 2 * stages })
  end
  out[#out + 1] = timelines.check(stages, { schedule = "gpipe", micro = stages, chunks = 2 })
  out[#out + 1] = timelines.check(stages, { schedule = "1f1b", micro = 1 })
  out[#out + 1] = timelines.check(stages, { schedule = own, micro = stages + 3 })
  return out
end

return timelines
