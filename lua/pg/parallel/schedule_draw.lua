-- parallel/schedule_draw.lua: a timeline (simulate.lua) as text: a line for each stage, time from left to right.
-- F1 is the forward of micro-batch 1, B1 its backward, W1 its weight gradient; where stages hold several chunks a
-- letter tells which, a for a stage's first: F1a.  A step longer than its name goes on in dashes, blanks are idle.
-- Neighbour: schedule_svg.lua draws the same as SVG.
local simulate = require "pg.parallel.simulate"

local draw = {}
local WIDTH = 120 -- columns of a line; longer pictures go on in a further band of lines
local RATIO = 8   -- longest step to shortest that a picture makes room for; shorter ones may lose their names
local LETTER = { forward = "F", backward = "B", weight = "W" }

--- draw.chunks(timeline) -> chunks a stage, as far as its steps tell.
function draw.chunks(timeline)
  local last = 0
  for _, list in ipairs(timeline) do
    for _, step in ipairs(list) do last = math.max(last, step.chunk) end
  end
  return math.floor(last / #timeline) + 1
end

--- draw.number(step, stages, chunks) -> "3", or "3b" where stages hold several chunks.
function draw.number(step, stages, chunks)
  if chunks == 1 then return ("%d"):format(step.micro) end
  local own = math.floor(step.chunk / stages)
  return ("%d%s"):format(step.micro, own < 26 and string.char(97 + own) or "." .. own)
end

--- draw.span(timeline) -> first start, last stop, the step to make room for (seconds).
function draw.span(timeline)
  local first, last, shortest, longest = math.huge, -math.huge, math.huge, 0
  for _, list in ipairs(timeline) do
    for _, step in ipairs(list) do
      local time = step.stop - step.start
      first, last, longest = math.min(first, step.start), math.max(last, step.stop), math.max(longest, time)
      if time > 0 then shortest = math.min(shortest, time) end
    end
  end
  if longest == 0 then return 0, 1, 1 end -- nothing takes time
  return first, last, math.max(shortest, longest / RATIO)
end

--- draw.tick(seconds) -> the smallest of 1, 2, 5 times a power of ten that is not below.
function draw.tick(least)
  local power = 10 ^ math.floor(math.log10(least))
  for _, k in ipairs { 1, 2, 5 } do
    if k * power >= least * (1 - 1e-9) then return k * power end
  end
  return 10 * power
end

local function round(x) return math.floor(x + 0.5) end

-- `name`, dashes up to the width, and a blank at the end where there is room.
local function cell(name, width)
  if width <= #name then return name:sub(1, width) end
  return name .. ("-"):rep(width - #name - 1) .. " "
end

-- One stage -> its whole line; scale: columns a second.
local function row(list, stages, chunks, first, scale)
  local parts, at = {}, 0
  for _, step in ipairs(list) do
    local from, to = math.max(at, round((step.start - first) * scale)), round((step.stop - first) * scale)
    if to > from then
      local name = LETTER[step.kind] .. draw.number(step, stages, chunks)
      parts[#parts + 1] = (" "):rep(from - at) .. cell(name, to - from)
      at = to
    end
  end
  return table.concat(parts)
end

-- The line of times over all columns; a number that would go on in the next band is left out.
local function axis(columns, scale, band)
  local tick, parts, at = draw.tick(10 / scale), {}, 0
  for i = 0, math.floor(columns / scale / tick) do
    local from, text = round(i * tick * scale), ("%.6g"):format(i * tick)
    if from >= at and from % band + #text <= band then
      parts[#parts + 1] = (" "):rep(from - at) .. text
      at = from + #text
    end
  end
  return table.concat(parts)
end

local function longest(timeline, chunks)
  local n = 0
  for _, list in ipairs(timeline) do
    for _, step in ipairs(list) do n = math.max(n, 1 + #draw.number(step, #timeline, chunks)) end
  end
  return n
end

--- draw.text(timeline, o) -> lines.  o.width: columns of a line (120); o.room: seconds of the step that its name must
-- fit into, so that several pictures have one scale (the shortest).
function draw.text(timeline, o)
  local chunks = draw.chunks(timeline)
  local first, last, shortest = draw.span(timeline)
  local unit = longest(timeline, chunks) + 1 -- columns of the shortest step: its name and a blank
  local scale = unit / (o and o.room or shortest)
  local columns = round((last - first) * scale)
  local name = ("stage %%-%dd "):format(#tostring(#timeline - 1))
  local margin = #name:format(0)
  local band = math.max(unit, math.floor(((o and o.width or WIDTH) - margin) / unit) * unit)
  local rows = { ("time" .. (" "):rep(margin)):sub(1, margin) }
  rows[1] = { rows[1], axis(columns, scale, band) }
  for s, list in ipairs(timeline) do
    rows[s + 1] = { name:format(s - 1), row(list, #timeline, chunks, first, scale) }
  end
  local lines = {}
  for from = 1, math.max(columns, 1), band do
    if from > 1 then lines[#lines + 1] = "" end
    for _, r in ipairs(rows) do lines[#lines + 1] = (r[1] .. r[2]:sub(from, from + band - 1)):gsub("%s+$", "") end
  end
  return table.concat(lines, "\n")
end

-- ---- words ----

--- draw.title(name, sizes) -> "1f1b: 2 stages, 8 micro-batches".
function draw.title(name, o)
  return ("%s: %d stage%s, %d micro-batch%s%s"):format(name, o.stages, o.stages == 1 and "" or "s", o.micro,
    o.micro == 1 and "" or "es", o.chunks > 1 and (", %d chunks a stage"):format(o.chunks) or "")
end

--- draw.numbers(list, format, by) -> each times `by`, in one text.
function draw.numbers(list, format, by)
  local out = {}
  for i, x in ipairs(list) do out[i] = format:format(x * by) end
  return table.concat(out, " ")
end

--- draw.report(timeline, peaks) -> lines under a picture: bubble, idle shares, what each stage keeps at most.
function draw.report(timeline, peaks)
  if not timeline.idle then simulate.summary(timeline) end
  local what = draw.chunks(timeline) > 1 and "micro-batches and chunks" or "micro-batches"
  local lines = {
    ("time %.6g, bubble %.1f %% (idle by stage: %s %%)"):format(timeline.makespan, 100 * timeline.bubble,
                                                                draw.numbers(timeline.idle, "%.1f", 100)),
    ("%s alive at most, by stage: %s"):format(what, table.concat(peaks.alive, " ")),
  }
  if math.max(unpack(peaks.put_off)) > 0 then
    lines[#lines + 1] = ("waiting for their weight gradients: %s; both together: %s"):format(
      table.concat(peaks.put_off, " "), table.concat(peaks.total, " "))
  end
  return table.concat(lines, "\n")
end

return draw
