-- test_schedule.lua: pipeline schedules as data: they are complete and end, with the bubble and memory of the papers;
-- what is wrong with a schedule is said with stage, position and step; pictures; cutting a model into chunks.
local check = require "tests.check"
local draw = require "pg.parallel.schedule_draw"
local fs = require "pg.fs"
local measured = require "pg.parallel.measured"
local schedule = require "pg.parallel.schedule"
local simulate = require "pg.parallel.simulate"
local stages = require "pg.parallel.stages"
local svg = require "pg.parallel.schedule_svg"
local trace = require "pg.parallel.trace"
local equal, throws, is_true = check.equal, check.throws, check.is_true
local tests = {}

-- ---- the built-in ones ----

local function each(f)
  for p = 1, 6 do
    for _, m in ipairs { 1, 2, 3, 4, 5, 7, 8, 13 } do f(p, m) end
  end
end

local function bubble(name, p, m, v, times)
  local lists, peaks = schedule.make(name, { stages = p, micro = m, chunks = v })
  return simulate.timeline(lists, times or {}).bubble, peaks
end

function tests.test_every_size_is_complete_and_ends()
  each(function(p, m)
    for _, name in ipairs(schedule.names) do schedule.make(name, { stages = p, micro = m }) end
    for v = 2, 4 do
      schedule.make("gpipe", { stages = p, micro = m, chunks = v })
      schedule.make("interleaved", { stages = p, micro = m, chunks = v })
    end
  end)
end

function tests.test_gpipe_and_1f1b_bubble_and_memory()
  each(function(p, m)
    local want, most, all = (p - 1) / (m + p - 1), {}, {}
    for s = 1, p do most[s], all[s] = math.min(m, p - s + 1), m end
    local share, peaks = bubble("gpipe", p, m)
    check.close(share, want, check.double)
    equal(peaks.alive, all)
    share, peaks = bubble("1f1b", p, m)
    check.close(share, want, check.double)
    equal(peaks.alive, most)
  end)
end

function tests.test_interleaved_bubble_and_memory()
  each(function(p, m)
    for v = 2, 4 do
      local share, peaks = bubble("interleaved", p, m, v)
      if m >= p then
        check.close(share, (p - 1) / (v * m + p - 1), check.double)
        local group = math.ceil(m / math.floor(m / p)) -- p where m is a multiple of it
        equal(peaks.alive[1], math.min(v * m, 2 * (p - 1) + (v - 1) * group + 1))
      else
        is_true(share <= bubble("1f1b", p, m) + 1e-9, ("%d stages, %d micro, %d chunks"):format(p, m, v))
      end
    end
  end)
end

function tests.test_interleaved_with_one_chunk_is_1f1b()
  local o = { stages = 4, micro = 6 }
  equal(schedule.make("interleaved", o), schedule.make("1f1b", o))
end

-- Qi et al. 2023: idle for (p - 1)(F + B - W) where W is no longer than B; no more than p micro-batches kept.
function tests.test_zb_h1_bubble_and_memory()
  each(function(p, m)
    local share, peaks = bubble("zb-h1", p, m)
    local _, other = bubble("1f1b", p, m)
    equal(peaks.alive, other.alive)
    for s = 1, p do is_true(peaks.total[s] <= p, "more kept than 1f1b's first stage keeps") end
    if p > 1 then is_true(share < (p - 1) / (m + p - 1) - 1e-9, ("%d stages, %d micro"):format(p, m)) end
    if m >= p then check.close(share, (p - 1) / (3 * m + p - 1), check.double) end
  end)
  local lists = schedule.make("zb-h1", { stages = 4, micro = 12 })
  local function idle(f, b, w)
    return simulate.timeline(lists, { forward = f, backward = b, weight = w }).makespan - 12 * (f + b + w)
  end
  check.close(idle(1, 1.25, 0.75), 3 * 1.5, check.double)
  check.close(idle(2, 1, 3), 3 * 2, check.double)
end

-- The picture of Narayanan et al. 2021, figure 4, second device of four.
function tests.test_1f1b_as_in_the_paper()
  local list, words = schedule.make("1f1b", { stages = 4, micro = 8 })[2], {}
  for i, step in ipairs(list) do words[i] = step[1]:sub(1, 1) .. step[2] end
  equal(table.concat(words, " "), "f1 f2 f3 b1 f4 b2 f5 b3 f6 b4 f7 b5 f8 b6 b7 b8")
end

-- Every chunk adds its gradients up in the order of the micro-batches, whatever the schedule.
function tests.test_gradients_come_in_one_order()
  for _, name in ipairs(schedule.names) do
    local chunks = (name == "interleaved" or name == "gpipe") and 2 or 1
    for _, list in ipairs(schedule.make(name, { stages = 3, micro = 7, chunks = chunks })) do
      local last = {}
      for _, step in ipairs(list) do
        local which = step[1] .. step[3]
        equal(step[2], (last[which] or 0) + 1)
        last[which] = step[2]
      end
    end
  end
end

function tests.test_names()
  local own = function() end
  equal(schedule.find(own), own)
  throws(function() schedule.find "1f1c" end, 'schedule "1f1c" is unknown, did you mean "1f1b"?')
  throws(function() schedule.find "zb_h1" end, 'did you mean "zb-h1"?')
  throws(function() schedule.find(3) end, "a name (gpipe, 1f1b, interleaved, zb-h1) or a function, not a number")
  throws(function() schedule.make("1f1b", { stages = 2, micro = 2, chunks = 2 }) end, "has one chunk a stage, 2 are")
  throws(function() schedule.make("zb-h1", { stages = 2, micro = 2, chunks = 2 }) end, "use interleaved or gpipe")
  throws(function() schedule.make("1f1b", { stages = 0, micro = 2 }) end, "stages is 0; it must be at least 1")
  throws(function() schedule.make("1f1b", { stages = 2, micro = 1.5 }) end, "micro is 1.5, not an integer")
  throws(function() schedule.make("1f1b", { stage = 2, micro = 1 }) end, "did you mean stages?")
end

-- ---- what a check finds ----

local KIND = { F = "forward", B = "backward", W = "weight" }

-- lists("F1 B1", "F1 B1"): a text for each stage; F1/2 is of chunk 2.
local function lists(...)
  local out = {}
  for s, text in ipairs { ... } do
    out[s] = {}
    for kind, micro, chunk in text:gmatch "(%a)(%d+)/?(%d*)" do
      table.insert(out[s], { KIND[kind], tonumber(micro), tonumber(chunk) })
    end
  end
  return out
end

local function refused(text, given, micro, chunks, more)
  local o = { stages = #given, micro = micro, chunks = chunks }
  for k, v in pairs(more or {}) do o[k] = v end
  throws(function() schedule.check(given, o) end, text)
end

function tests.test_peaks()
  local peaks = schedule.check(lists("F1 F2 B1 B2", "F1 B1 F2 B2 W1 W2"), { stages = 2, micro = 2 })
  equal(peaks, { alive = { 2, 1 }, put_off = { 0, 2 }, total = { 2, 2 } })
end

function tests.test_incomplete()
  refused("schedule: stage 1 has no backward of micro-batch 2", lists("F1 F2 B1 B2", "F1 B1 F2"), 2)
  refused("stage 0 has no forward of micro-batch 1, chunk 2", lists("F1/0 B1/0", "F1/1 F1/3 B1/3 B1/1"), 1, 2)
  refused("stage 0, step 2: forward of micro-batch 1 again; step 1 did it", lists("F1 F1 B1"), 1)
  refused("stage 0, step 4: weight of micro-batch 1 again; step 3 did it", lists("F1 B1 W1 W1"), 1)
  refused("stage 0, step 1: backward of micro-batch 1 comes before its forward, step 2", lists("B1 F1"), 1)
  refused("stage 0, step 2: weight of micro-batch 1 comes before its backward, step 3", lists("F1 W1 B1"), 1)
  refused("comes before its forward, which the list does not have", lists("B1"), 1)
end

function tests.test_steps_that_are_none()
  refused('stage 0, step 1: "forwards" is no kind of step, did you mean "forward"?', { { { "forwards", 1 } } }, 1)
  refused("stage 0, step 2: forward of micro-batch 3; they are numbered 1 to 2", lists("F1 F3 B1 B2"), 2)
  refused("stage 0, step 1: forward of micro-batch nil", { { { "forward" } } }, 1)
  refused("stage 1, step 1: forward of micro-batch 1 names chunk 2; stage 1 holds chunk 1, 3",
          lists("F1/0 F1/2 B1/2 B1/0", "F1/2 F1/3 B1/3 B1/1"), 1, 2)
  refused("stage 0, step 1: forward of micro-batch 1 names chunk nil; stage 0 holds chunk 0, 1", lists("F1 B1"), 1, 2)
  refused('stage 0, step 1 is "F1"; a step is written { "forward", 1 }', { { "F1" } }, 1)
  refused("stage 0 has 3, no list of steps", { 3 }, 1)
  refused("gives 1 lists; a list of steps for each of the 2 stages is wanted", lists("F1 B1"), 1, 1, { stages = 2 })
  throws(function() schedule.make(function() return nil end, { stages = 2, micro = 1 }) end, "gives nil; a list of")
end

function tests.test_messages_out_of_order()
  refused("stage 0 sends the activations of micro-batch 1 (its step 1) where stage 1 receives those of micro-batch 2 "
          .. "(its step 1); messages arrive as they were sent", lists("F1 F2 B1 B2", "F2 F1 B1 B2"), 2)
  refused("stage 1 sends the gradients of micro-batch 2 (its step 3) where stage 0 receives those of micro-batch 1 "
          .. "(its step 3)", lists("F1 F2 B1 B2", "F1 F2 B2 B1"), 2)
  -- One order among all chunks that meet between two stages: activations of 0 -> 1 and of 2 -> 3 share a channel.
  refused("micro-batch 1 for chunk 1 (its step 1) where stage 1 receives those of micro-batch 1 for chunk 3",
          lists("F1/0 F1/2 B1/2 B1/0", "F1/3 F1/1 B1/3 B1/1"), 1, 2)
end

function tests.test_waits_in_a_circle()
  refused("schedule never ends: stage 0 waits at its step 2 (backward of micro-batch 1) for step 3 of stage 1; "
          .. "stage 1 waits at its step 2 (forward of micro-batch 2) for step 3 of stage 0",
          lists("F1 B1 F2 B2", "F1 F2 B1 B2"), 2)
  refused("stage 0 waits at its step 1 (forward of micro-batch 1, chunk 1) for step 2 of stage 0",
          lists("F1/1 F1/0 B1/1 B1/0"), 1, 2)
end

-- Groups smaller than the stages stop an interleaved pipeline; the check sees it (5 micro-batches in groups of 3, 2).
function tests.test_small_groups_of_interleaved_never_end()
  local function small(o)
    local out = {}
    for s = 0, 3 do
      local f, b, list = {}, {}, {}
      for _, group in ipairs { { 1, 3 }, { 4, 5 } } do
        for j = 0, 1 do
          for micro = group[1], group[2] do
            f[#f + 1], b[#b + 1] = { "forward", micro, j * 4 + s }, { "backward", micro, (1 - j) * 4 + s }
          end
        end
      end
      local warm = 2 * (3 - s) + 3
      for k = 1, #f + warm do list[#list + 1], list[#list + 2] = f[k] or b[k - warm], f[k] and b[k - warm] end
      out[s + 1] = list
    end
    return out
  end
  throws(function() schedule.make(small, { stages = 4, micro = 5, chunks = 2 }) end, "never ends: stage")
end

function tests.test_limit()
  local o = { stages = 4, micro = 8, limit = 4 }
  schedule.make("1f1b", o)
  throws(function() schedule.make("gpipe", o) end, "schedule gpipe: stage 0 keeps the activations of 8 micro-batches "
         .. "at its step 8 (forward of micro-batch 8); the limit is 4")
  throws(function() schedule.make("1f1b", { stages = 4, micro = 8, limit = { 4, 2, 2, 1 } }) end, "stage 1 keeps the")
end

function tests.test_messages_name_the_users_function()
  local function mine() return { {} } end
  throws(function() schedule.make(mine, { stages = 1, micro = 1 }) end,
         "schedule at tests/lua/test_schedule.lua:%d+: stage 0 has no forward of micro%-batch 1")
end

-- ---- time ----

function tests.test_times()
  local two = schedule.make("1f1b", { stages = 2, micro = 2 })
  local t = simulate.timeline(two, { forward = { 1, 2 }, backward = 3, weight = { 0.5, 1 }, send = 0.25 })
  -- stage 1: F1 at 1.25..3.25, B1 ..7.25, F2 ..9.25, B2 ..13.25; stage 0 has B2 from 13.5 on
  equal(t[2][3], { kind = "forward", micro = 2, chunk = 1, start = 7.25, stop = 9.25 })
  equal(t[1][4], { kind = "backward", micro = 2, chunk = 0, start = 13.5, stop = 17 })
  equal(t.makespan, 17)
  check.close(t.idle, { 1 - 9 / 17, 1 - 12 / 17 }, check.double)
  check.close(t.bubble, 1 - 21 / 34, check.double)
end

function tests.test_times_of_chunks()
  local l = schedule.make("gpipe", { stages = 2, micro = 1, chunks = 2 })
  equal(simulate.timeline(l, { forward = 2, backward = 0, weight = 0 }).makespan, 4)
  equal(simulate.timeline(l, { forward = { 1, 2, 3, 4 }, backward = 0, weight = 0 }).makespan, 10)
  equal(simulate.timeline(l, { forward = { 2, 6 }, backward = 0, weight = 0 }).makespan, 8)
  throws(function() simulate.timeline(l, { forward = { 1, 2, 3 } }) end, "has 3 numbers; one is wanted, or 2 (a stage")
  throws(function() simulate.timeline(l, { forward = -1 }) end, "times.forward is -1; seconds are wanted")
  throws(function() simulate.timeline(l, { forwards = 1 }) end, "did you mean forward?")
  throws(function() simulate.timeline(lists("F1 F2 B1"), {}) end, "has no backward of micro-batch 2")
  throws(function() simulate.timeline {} end, "simulate wants the lists of a schedule")
end

-- Chunks on one stage hand over without a message.
function tests.test_one_stage_sends_nothing()
  local l = schedule.make("interleaved", { stages = 1, micro = 2, chunks = 2 })
  local t = simulate.timeline(l, { send = 100 })
  equal(t.makespan, 6)
  equal(t.bubble, 0)
end

-- ---- pictures ----

function tests.test_text()
  local function text(name, o, width)
    return draw.text(simulate.timeline(schedule.make(name, o), {}), { width = width })
  end
  equal(text("zb-h1", { stages = 2, micro = 2 }), [[
time    0              5
stage 0 F1 F2    B1 W1 B2 W2
stage 1    F1 B1 F2 B2 W1 W2]])
  equal(text("gpipe", { stages = 2, micro = 2 }), [[
time    0              5
stage 0 F1 F2          B1--- B2---
stage 1    F1 F2 B1--- B2---]])
  equal(text("gpipe", { stages = 1, micro = 1, chunks = 2 }), [[
time    0               2
stage 0 F1a F1b B1b---- B1a----]])
  for line in text("interleaved", { stages = 8, micro = 16, chunks = 2 }, 100):gmatch "[^\n]+" do
    is_true(#line <= 100 and (line:find "^stage %d" or line:find "^time ") ~= nil, line)
  end
end

function tests.test_report()
  local l, peaks = schedule.make("zb-h1", { stages = 2, micro = 2 })
  equal(draw.report(simulate.timeline(l, {}), peaks), [[
time 7, bubble 14.3 % (idle by stage: 14.3 14.3 %)
micro-batches alive at most, by stage: 2 1
waiting for their weight gradients: 1 2; both together: 2 2]])
end

function tests.test_svg()
  local l = schedule.make("interleaved", { stages = 2, micro = 2, chunks = 2 })
  local t = simulate.timeline(l, {})
  local late = simulate.timeline(l, { forward = 2 })
  for _, list in ipairs(late) do
    for _, step in ipairs(list) do step.start, step.stop = step.start + 50, step.stop + 50 end
  end
  local text = svg.draw("a < b", { { name = "simulated", timeline = t }, { name = "measured", timeline = late } })
  is_true(text:find("a &lt; b", 1, true) and text:find(">measured<", 1, true) and text:find(">2b<", 1, true) ~= nil)
  local _, boxes = text:gsub("<g>", "")
  equal(boxes, 32)
  local function place(after) -- x of the first box behind a word
    return tonumber(text:match(after .. '<.-<g>.-<rect x="([%d.]+)"'))
  end
  equal(place ">simulated", place ">measured")
  for _, tag in ipairs { "svg", "g", "text", "title" } do
    local _, open = text:gsub("<" .. tag .. "[ >]", "")
    local _, close = text:gsub("</" .. tag .. ">", "")
    equal(open, close)
  end
end

-- ---- measured ----

-- Clocks from the ends of rounds; the first round and a late look change nothing.
function tests.test_clocks()
  local ahead, off = trace.clocks { { 1, 2, 3, 4, 5, 6 }, { 60, 52, 53, 54, 55.5, 56 }, { 1, 1, 2, 2.75, 4, 5 } }
  equal(ahead, { 0, 50, -1 })
  equal(off, 0.5)
end

-- Stage 1 takes its messages 0.5 s late; forwards 1 and 3 s, of which the mean counts.
local function late()
  local m = { schedule = "1f1b", stages = 2, micro = 2, chunks = 1, step = 3, device = "cpu", clock = 0 }
  local function step(kind, micro, chunk, start, stop)
    return { kind = kind, micro = micro, chunk = chunk, start = start, stop = stop }
  end
  m.timeline = simulate.summary {
    { step("forward", 1, 0, 0, 1), step("forward", 2, 0, 1, 4), step("backward", 1, 0, 5, 7),
      step("backward", 2, 0, 9, 11) },
    { step("forward", 1, 1, 1.5, 2.5), step("backward", 1, 1, 2.5, 4.5), step("forward", 2, 1, 4.5, 5.5),
      step("backward", 2, 1, 5.5, 8.5) } }
  return m
end

function tests.test_measured_beside_simulated()
  local m = late()
  local times, message = measured.times(m)
  equal(times, { forward = { 2, 1 }, backward = { 2, 2.5 }, weight = { 0, 0 } })
  equal(message, 0.5)
  local t = measured.simulated(m)
  equal(t[1][2], { kind = "forward", micro = 2, chunk = 0, start = 2, stop = 4 })
  equal(t[2][4], { kind = "backward", micro = 2, chunk = 1, start = 6.5, stop = 9 })
  equal(t.makespan, 11)
  equal(measured.simulated(m, 0.5).makespan, 12)
  equal(measured.report(m, t), ([[
measured   idle by stage: 27.3 36.4 %%, mean 31.8 %%; 11000.000 ms
simulated  idle by stage: 27.3 36.4 %%, mean 31.8 %%; 11000.000 ms
apart      0.0 points (by stage: +0.0 +0.0)
ms of a micro-batch, by stage: forward 2000.000 1000.000, backward 2000.000 2500.000
a message takes 500.000 ms; the stages have one clock]]):format())
  local a, b = measured.draw(m, t):match "^measured\n(.-)\n\nsimulated\n(.-)$"
  equal(a, [[
time    0              5              10
stage 0 F1 F2------    B1---       B2---
stage 1      F1 B1--- F2 B2------]])
  equal(b, [[
time    0              5              10
stage 0 F1--- F2---      B1---     B2---
stage 1       F1 B1----- F2 B2----]])
end

function tests.test_measured_files_that_are_none()
  local path = (os.getenv "SCRATCH" or "build") .. "/timeline.json"
  local good = '{"schedule":"1f1b","stages":1,"micro":1,"chunks":1,"device":"cpu","clock":0,'
    .. '"steps":[[["forward",1,0,0,1],["backward",1,0,1,3]]]}'
  fs.write(path, good)
  equal(measured.read(path).timeline.makespan, 3)
  local function no_file(from, to, text)
    local changed, n = good:gsub(from, to)
    equal(n, 1)
    fs.write(path, changed)
    throws(function() measured.read(path) end, text)
  end
  no_file('"steps".*$', '"step":1}', "holds no measured timeline; log.timeline = 20 makes timeline-20.json")
  no_file('"stages":1', '"stages":0', "stages is 0; it must be at least 1")
  no_file(',%["backward".-%]', "", "stage 0 has no backward of micro-batch 1")
  no_file('"backward"', '"backwards"', 'did you mean "backward"?')
  no_file("1,3%]", "1,0.5]", "a step is written [kind, micro, chunk, start, stop], times in seconds; one has 1 and 0.5")
  no_file(",1,3%]", "]", "timeline.json: a step is written")
  no_file("1,3%]", "1,1e308]", "times in seconds; one has 1 and 1e+308")
  no_file("0,1%]", "-1e308,1]", "times in seconds; one has -1e+308 and 1")
end

-- Files of other hands may leave out what goes without saying; what they call a thing moves no terminal's cursor.
function tests.test_measured_files_of_others()
  local path = (os.getenv "SCRATCH" or "build") .. "/others.json"
  fs.write(path, '{"schedule":"a\\u001b[31mb","stages":1,"micro":1,"device":"c\\nd",'
    .. '"steps":[[["forward",1,0,0,1],["backward",1,0,1,3]]]}')
  local m = measured.read(path)
  equal(m.chunks, 1)
  equal(measured.title(m), "a?[31mb: 1 stage, 1 micro-batch on c?d")
  equal(measured.simulated(m).makespan, 3)
end

-- The page's pictures are what the tool prints, and its own schedule can be run.
function tests.test_help_page()
  local page, n = fs.read "lua/pg/help/pipelines.md", 0
  for name, options, picture in page:gmatch "```\n%$ pgrun schedule (%S+) ([^\n]+)\n(.-)\n```" do
    local o = { chunks = 1 }
    for key, value in options:gmatch "%-%-(%a+)=(%d+)" do o[key] = tonumber(value) end
    local what = name
    if name == "mine.lua" then what = assert(loadstring(page:match "```lua\n(.-)```"))() end
    local l, peaks = schedule.make(what, o)
    local t = simulate.timeline(l, {})
    is_true(picture:find(draw.text(t) .. "\n" .. draw.report(t, peaks), 1, true) ~= nil, "pipelines.md: " .. name)
    n = n + 1
  end
  equal(n, #schedule.names + 1)
end

-- Its measured picture is that of its lines, and small.
function tests.test_help_picture()
  local page, picture = fs.read "lua/pg/help/pipelines.md", fs.read "lua/pg/help/pipelines.svg"
  is_true(#picture < 60000 and picture:find "^<svg .*</svg>\n$" ~= nil)
  for _, what in ipairs { "measured", "simulated" } do
    local share = page:match("\n" .. what .. " +idle by stage: [^\n]*mean ([%d.]+) %%")
    equal(picture:match(">1f1b, " .. what .. ": idle ([%d.]+) %%<"), share)
    for _, name in ipairs { "interleaved", "zb-h1" } do
      is_true(picture:find((">%s, %s: idle "):format(name, what), 1, true) ~= nil, name)
    end
  end
end

-- ---- cutting ----

local function counts(n, chunks, cost)
  local costs, out, last = {}, {}, 0
  for i = 1, n do costs[i] = cost and cost(i) or 1 end
  for i, run in ipairs(stages.cut(costs, chunks)) do
    equal(run[1], last + 1)
    last, out[i] = run[2], run[2] - run[1] + 1
  end
  equal(last, n)
  return table.concat(out, " ")
end

function tests.test_cut()
  equal(counts(30, 4), "7 7 8 8")
  equal(counts(7, 3), "2 2 3")
  equal(counts(4, 4), "1 1 1 1")
  equal(counts(5, 1), "5")
  equal(counts(9, 4, function(i) return i == 1 and 5 or 1 end), "1 2 3 3")
  equal(counts(6, 3, function(i) return i == 4 and 9 or 1 end), "3 1 2")
  equal(counts(4, 2, function() return 0 end), "1 3") -- of equal ways the one with small first chunks
end

-- The largest chunk against all cuts, for costs without a pattern.
function tests.test_cut_is_the_best()
  local state = 12345
  local function random() state = (state * 1103515245 + 12345) % 2^31 return state % 20 end
  for _ = 1, 40 do
    local costs, least = {}, math.huge
    for i = 1, 9 do costs[i] = random() end
    local function sum(a, b)
      local s = 0
      for i = a, b do s = s + costs[i] end
      return s
    end
    for a = 1, 7 do
      for b = a + 1, 8 do least = math.min(least, math.max(sum(1, a), sum(a + 1, b), sum(b + 1, 9))) end
    end
    local most = 0
    for _, run in ipairs(stages.cut(costs, 3)) do most = math.max(most, sum(run[1], run[2])) end
    equal(most, least)
  end
end

function tests.test_cut_refuses()
  throws(function() counts(2, 4) end, "2 items for 4 chunks, each wants at least one; nearest: 2 chunks, or 4 items")
  throws(function() counts(0, 1) end, "0 items for 1 chunks")
  throws(function() stages.cut({ 1, -1 }, 2) end, "the cost of item 2 is -1; it must be at least 0")
  throws(function() stages.cut({ 1, "x" }, 2) end, 'the cost of item 2 is "x"')
end

function tests.test_cut_as_the_user_says()
  local costs = {}
  for i = 1, 30 do costs[i] = 1 end
  equal(stages.cut(costs, 4, { 8, 8, 8, 6 }), { { 1, 8 }, { 9, 16 }, { 17, 24 }, { 25, 30 } })
  throws(function() stages.cut(costs, 4, { 8, 8, 8 }) end, "{ 8, 8, 8 } has 3 counts for 4 chunks")
  throws(function() stages.cut(costs, 4, { 8, 8, 8, 8 }) end,
         "{ 8, 8, 8, 8 } makes 32 items, there are 30; take 2 away")
  throws(function() stages.cut(costs, 4, { 8, 8, 8, 5 }) end, "makes 29 items, there are 30; take 1 more")
  throws(function() stages.cut(costs, 4, { 15, 0, 8, 7 }) end, "the count of chunk 1 is 0; it must be at least 1")
  throws(function() stages.cut(costs, 4, 8) end, "the counts are 8; a list is wanted")
end

check.run(tests)
