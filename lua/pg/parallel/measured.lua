-- parallel/measured.lua: a traced step of a pipeline (trace.lua) beside the same schedule simulated with its times.
--   m = { schedule = "1f1b", stages =, micro =, chunks =, step =, device = "cuda", clock = seconds, timeline = }
-- The simulation is given the mean seconds of each chunk's forward, backward and weight steps, and messages that take
-- none: what the schedule itself leaves idle.  What is measured beyond it are messages, steps of unequal length, and a
-- host that was late.  Files: NAME.json, which `pgrun schedule --measured` reads, and NAME.svg.
local c = require "pg.c"
local check = require "pg.parallel.schedule_check"
local describe = require "pg.describe"
local draw = require "pg.parallel.schedule_draw"
local fs = require "pg.fs"
local host = require "pg.host"
local json = require "pg.json"
local log = require "pg.log"
local simulate = require "pg.parallel.simulate"
local steps = require "pg.parallel.schedule_steps"
local svg = require "pg.parallel.schedule_svg"
local trace = require "pg.parallel.trace"

local measured = {}
local KINDS = { "forward", "backward", "weight" }
local LONGEST = 1e9 -- seconds of a step, and more: 30 years
local WIDEST = 1600 -- pixels of a picture: one slow step among short ones shall not stretch it

--- measured.take(engine, step) -> m, of the engine's traced gradients.  All ranks call it; step: its number, or nil.
function measured.take(e, step)
  local pipe, traced = e.pipe, e.trace
  e.trace = nil
  local timeline, clock = traced:read()
  local name = type(pipe.schedule) == "string" and pipe.schedule or "a schedule of its own"
  return { schedule = name, stages = pipe.stages, micro = traced.micro, chunks = pipe.chunks, step = step,
           device = c.device(), clock = clock, timeline = simulate.summary(timeline) }
end

-- ---- beside the simulator ----

--- measured.lists(m) -> the schedule that was run: each stage's steps in their order.
function measured.lists(m)
  local lists = {}
  for s, list in ipairs(m.timeline) do
    lists[s] = {}
    for i, step in ipairs(list) do lists[s][i] = { step.kind, step.micro, step.chunk } end
  end
  return lists
end

-- How long a message is under way: from its sender's stop to its receiver's start, where that one had nothing else
-- to do by then; the middle one of all, nil where no stage ever waited.
local function send_time(m)
  local gaps, stop, at, free = {}, {}, {}, {}
  for s = 1, m.stages do at[s], free[s] = 0, -math.huge end
  steps.walk(measured.lists(m), m, function(stage, step, need)
    at[stage + 1] = at[stage + 1] + 1
    local ran = m.timeline[stage + 1][at[stage + 1]]
    local sent = m.stages > 1 and need and stop[need]
    if sent and free[stage + 1] <= sent then gaps[#gaps + 1] = ran.start - sent end
    free[stage + 1] = ran.stop
    stop[steps.key(step[1], step[2], step[3], m)] = ran.stop
  end)
  return trace.middle(gaps)
end

--- measured.times(m) -> times as simulate.timeline takes them, each kind a list by chunk of mean seconds; and the time
-- of a message (nil: none was waited for).  Of a chunk without weight steps its backward holds both.
function measured.times(m)
  local all, times = m.stages * m.chunks, {}
  for _, kind in ipairs(KINDS) do
    local sum, n = {}, {}
    for chunk = 1, all do sum[chunk], n[chunk] = 0, 0 end
    for _, list in ipairs(m.timeline) do
      for _, step in ipairs(list) do
        if step.kind == kind then
          local i = step.chunk + 1
          sum[i], n[i] = sum[i] + step.stop - step.start, n[i] + 1
        end
      end
    end
    for chunk = 1, all do sum[chunk] = n[chunk] > 0 and sum[chunk] / n[chunk] or 0 end
    times[kind] = sum
  end
  return times, send_time(m)
end

--- measured.simulated(m, send) -> the timeline of the same lists with the measured times.  send (0): seconds of a
-- message.
function measured.simulated(m, send)
  local times = measured.times(m)
  times.send = send
  return simulate.timeline(measured.lists(m), times)
end

-- ---- words and pictures ----

--- measured.title(m) -> "1f1b: 2 stages, 8 micro-batches, step 20 on cuda".
function measured.title(m)
  return ("%s%s on %s"):format(draw.title(m.schedule, m), m.step and ", step " .. m.step or "", m.device)
end

local function idle_line(name, t)
  return ("%-10s idle by stage: %s %%, mean %.1f %%; %.3f ms"):format(name, draw.numbers(t.idle, "%.1f", 100),
                                                                      100 * t.bubble, 1e3 * t.makespan)
end

--- measured.report(m, simulated, send) -> lines that set the two side by side.
function measured.report(m, simulated, send)
  local t, apart = m.timeline, {}
  for s, share in ipairs(t.idle) do apart[s] = share - simulated.idle[s] end
  local times, message = measured.times(m)
  local parts = {}
  for _, kind in ipairs(KINDS) do
    local list = times[kind]
    if math.max(unpack(list)) > 0 then parts[#parts + 1] = ("%s %s"):format(kind, draw.numbers(list, "%.3f", 1e3)) end
  end
  return table.concat({
    idle_line("measured", t),
    idle_line("simulated", simulated) .. (send and send > 0 and (", messages of %g ms"):format(1e3 * send) or ""),
    ("apart      %.1f points (by stage: %s)"):format(100 * math.abs(t.bubble - simulated.bubble),
                                                     draw.numbers(apart, "%+.1f", 100)),
    ("ms of a micro-batch, by %s: %s"):format(m.chunks > 1 and "chunk" or "stage", table.concat(parts, ", ")),
    (message and ("a message takes %.3f ms; "):format(1e3 * message) or "no stage waited for a message; ")
      .. (m.clock > 0 and ("the stages' clocks agree within %.3f ms"):format(1e3 * m.clock)
          or "the stages have one clock"),
  }, "\n")
end

--- measured.draw(m, simulated, width) -> lines: both as text, on one scale.
function measured.draw(m, simulated, width)
  local room = math.min(select(3, draw.span(m.timeline)), (select(3, draw.span(simulated))))
  local o = { width = width, room = room }
  return ("measured\n%s\n\nsimulated\n%s"):format(draw.text(m.timeline, o), draw.text(simulated, o))
end

-- Where the timelines of a picture come from, each once: "4 stages on cpu, 2 stages on cpu".
local function stages_of(list)
  local parts, seen = {}, {}
  for _, pair in ipairs(list) do
    local m = pair[1]
    local text = ("%d stage%s on %s"):format(m.stages, m.stages == 1 and "" or "s", m.device)
    if not seen[text] then parts[#parts + 1] = text end
    seen[text] = true
  end
  return table.concat(parts, ", ")
end

--- measured.picture(list) -> the text of an SVG file.  list: of { m, simulated }, all on one axis.
function measured.picture(list)
  local parts = {}
  for _, pair in ipairs(list) do
    local m = pair[1]
    for k, what in ipairs { "measured", "simulated" } do
      local t = k == 1 and m.timeline or pair[2]
      parts[#parts + 1] = { name = ("%s, %s: idle %.1f %%"):format(m.schedule, what, 100 * t.bubble), timeline = t }
    end
  end
  return svg.draw(#list == 1 and measured.title(list[1][1]) or stages_of(list), parts, WIDEST)
end

-- ---- files ----

-- Steps as { kind, micro, chunk, start, stop }.
local function encode(m, simulated)
  local times, message = measured.times(m)
  local out = { schedule = m.schedule, stages = m.stages, micro = m.micro, chunks = m.chunks, step = m.step,
                device = m.device, clock = m.clock, seconds = times, message = message,
                idle = { measured = m.timeline.idle, simulated = simulated.idle }, steps = {} }
  for s, list in ipairs(m.timeline) do
    out.steps[s] = {}
    for i, x in ipairs(list) do out.steps[s][i] = { x.kind, x.micro, x.chunk, x.start, x.stop } end
  end
  return json.encode(out, { digits = 9 }) .. "\n"
end

local function is_time(x) return type(x) == "number" and math.abs(x) <= LONGEST end

local function seconds_of(step, path)
  local start, stop = step[4], step[5]
  if not is_time(start) or not is_time(stop) or stop < start then
    c.fail("%s: a step is written [kind, micro, chunk, start, stop], times in seconds; one has %s and %s", path,
           describe.show(start), describe.show(stop))
  end
  return start, stop
end

-- A name in a file that may be anyone's: no control characters, which would move a terminal's cursor.
local function word(text) return (text:gsub("%c", "?")) end

--- measured.read(path) -> m.  Raises where the file holds no timeline, or no schedule that could have been run.
function measured.read(path)
  local f = json.read(path)
  if type(f) ~= "table" or type(f.steps) ~= "table" or type(f.schedule) ~= "string" then
    c.fail("%s holds no measured timeline; log.timeline = 20 makes timeline-20.json in the folder of a run", path)
  end
  local sizes = steps.sizes(f)
  local lists = steps.fill(f.steps, sizes, path)
  sizes.name = path
  check(lists, sizes)
  local m = { schedule = word(f.schedule), stages = sizes.stages, micro = sizes.micro, chunks = sizes.chunks,
              step = tonumber(f.step), device = word(tostring(f.device)), clock = tonumber(f.clock) or 0,
              timeline = {} }
  for s, list in ipairs(lists) do
    m.timeline[s] = {}
    for i, x in ipairs(list) do
      local start, stop = seconds_of(f.steps[s][i], path)
      m.timeline[s][i] = { kind = x[1], micro = x[2], chunk = x[3], start = start, stop = stop }
    end
  end
  simulate.summary(m.timeline)
  return m
end

--- measured.save(stem, m) -> lines that tell of it.  Writes stem.json and stem.svg.
function measured.save(stem, m)
  local simulated = measured.simulated(m)
  fs.write(stem .. ".json", encode(m, simulated))
  fs.write(stem .. ".svg", measured.picture { { m, simulated } })
  return ("timeline of %s\n%s\n%s.json and .svg"):format(measured.title(m), measured.report(m, simulated), stem)
end

--- measured.tell(engine, stem, step): take, save, and a few lines.  All ranks call it; a disk that is full is told, and
-- the training goes on.
function measured.tell(e, stem, step)
  local m = measured.take(e, step)
  if host.rank ~= 0 then return end
  local ok, text = pcall(measured.save, stem, m)
  log.text("%s", ok and text or ("timeline: %s; going on"):format(text))
end

--- measured.wanted(pp, what): raises where there are no stages to be timed.
function measured.wanted(pp, what)
  if pp == 1 then
    c.fail("%s: a timeline shows the stages of a pipeline, and layout.pp is 1; set layout.pp = 2, or leave it out",
           what)
  end
end

return measured
