-- parallel/schedule_svg.lua: timelines (simulate.lua) as an SVG picture: a band of lanes for each timeline, one lane
-- a stage, one box a step, all on one time axis, so that simulated and measured can be compared by eye.
local draw = require "pg.parallel.schedule_draw"

local svg = {}
local LANE, GAP, LEFT, TOP = 26, 34, 76, 64 -- pixels: of a lane, between bands, before and above the first box
local LETTER = 6.5                          -- pixels of a digit at 11 px
local KINDS = { { "forward", "#7aa6d8" }, { "backward", "#8cc084" }, { "weight", "#efb05c" } }
local STYLE = "" -- of the boxes, by the first letter of their kind, so that their markup stays short
for _, kind in ipairs(KINDS) do
  STYLE = STYLE .. (".%s{fill:%s;stroke:#333;stroke-width:.6}"):format(kind[1]:sub(1, 1), kind[2])
end

local function escape(text)
  return (tostring(text):gsub("[&<>\"]", { ["&"] = "&amp;", ["<"] = "&lt;", [">"] = "&gt;", ['"'] = "&quot;" }))
end

local function text(x, y, words, more)
  return ('<text x="%.2f" y="%.2f"%s>%s</text>'):format(x, y, more or "", escape(words))
end

-- One box, in the coordinates of its lane; a stage's later chunks are paler.
local function box(step, view, timeline, chunks)
  local x, width = LEFT + (step.start - view.first) * view.scale, (step.stop - step.start) * view.scale
  local number = draw.number(step, #timeline, chunks)
  local pale = 1 - 0.55 * math.floor(step.chunk / #timeline) / math.max(chunks - 1, 1)
  local inside = #number * LETTER + 2 <= width
    and ('<text x="%.1f" y="16">%s</text>'):format(x + width / 2, number) or ""
  local tip = ("%s %s, %.4g to %.4g s"):format(step.kind, number, step.start - view.first, step.stop - view.first)
  local opacity = pale < 1 and (' fill-opacity="%.2f"'):format(pale) or ""
  return ('<g><title>%s</title><rect x="%.1f" width="%.1f" height="%d" class="%s"%s/>%s</g>'):format(
    escape(tip), x, width, LANE - 4, step.kind:sub(1, 1), opacity, inside)
end

local function band(out, part, view, top)
  local timeline = part.timeline
  local chunks = draw.chunks(timeline)
  out[#out + 1] = text(4, top - 7, part.name, ' font-weight="bold"')
  for s, list in ipairs(timeline) do
    local y = top + (s - 1) * LANE
    out[#out + 1] = text(4, y + 17, "stage " .. s - 1)
    out[#out + 1] = ('<rect x="%d" y="%d" width="%.2f" height="%d" fill="#f2f2f2"/>'):format(LEFT, y + 1,
      (view.last - view.first) * view.scale, LANE - 4)
    local boxes = { ('<g transform="translate(0,%d)" text-anchor="middle">'):format(y + 1) }
    for _, step in ipairs(list) do
      if step.stop > step.start then boxes[#boxes + 1] = box(step, view, timeline, chunks) end
    end
    out[#out + 1] = table.concat(boxes) .. "</g>"
  end
  return top + #timeline * LANE
end

local function axis(out, view, y)
  local tick = draw.tick(60 / view.scale)
  for i = 0, math.floor((view.last - view.first) / tick * (1 + 1e-9)) do
    local x = LEFT + i * tick * view.scale
    out[#out + 1] = ('<line x1="%.2f" y1="%d" x2="%.2f" y2="%d" stroke="#333"/>'):format(x, y, x, y + 5)
    out[#out + 1] = text(x, y + 17, ("%.6g"):format(i * tick), ' text-anchor="middle"')
  end
  out[#out + 1] = text(4, y + 17, "seconds")
end

local function legend(out, y)
  local x = LEFT
  for _, kind in ipairs(KINDS) do
    out[#out + 1] = ('<rect x="%d" y="%d" width="14" height="12" class="%s"/>'):format(x, y, kind[1]:sub(1, 1))
    out[#out + 1] = text(x + 19, y + 10, kind[1])
    x = x + 100
  end
end

--- svg.draw(title, parts, widest) -> the text of an SVG file.  parts: a list of { name = "simulated", timeline = },
-- drawn one below the other on one axis; each timeline starts at its own first step.  Boxes are as wide as their
-- numbers, or with widest, pixels of the longest timeline, narrower and without them.
function svg.draw(title, parts, widest)
  local longest, shortest, stages = 0, math.huge, 0
  for _, part in ipairs(parts) do
    local first, last, least = draw.span(part.timeline)
    longest, shortest, stages = math.max(longest, last - first), math.min(shortest, least), stages + #part.timeline
  end
  local scale = math.min(26 / shortest, (widest or math.huge) / longest)
  local out, y = {}, TOP
  local width, height = LEFT + longest * scale + 30, TOP + stages * LANE + (#parts - 1) * GAP + 30
  width = math.max(width, 420)
  out[1] = ('<svg xmlns="http://www.w3.org/2000/svg" width="%.0f" height="%.0f" viewBox="0 0 %.0f %.0f" '
            .. 'font-family="sans-serif" font-size="11">'):format(width, height, width, height)
  out[2] = '<rect width="100%" height="100%" fill="white"/>'
  out[3] = "<style>" .. STYLE .. "</style>"
  out[4] = text(4, 17, title, ' font-size="14" font-weight="bold"')
  legend(out, 26)
  for i, part in ipairs(parts) do
    local first = draw.span(part.timeline)
    y = band(out, part, { first = first, last = first + longest, scale = scale }, i > 1 and y + GAP or y)
  end
  axis(out, { first = 0, last = longest, scale = scale }, y + 2)
  out[#out + 1] = "</svg>\n"
  return table.concat(out, "\n")
end

return svg
