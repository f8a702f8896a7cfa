-- cmd/schedule.lua: pgrun schedule NAME|FILE.lua --stages=4 --micro=8 [--chunks=2] [--svg=FILE]: draw a pipeline
-- A schedule is checked, simulated with the times given, drawn, and its bubble and its peaks are printed
-- (pg.parallel.schedule; `pgrun help pipelines`).  --measured=FILE.json draws what a run has measured (measured.lua).
local c = require "pg.c"
local draw = require "pg.parallel.schedule_draw"
local fs = require "pg.fs"
local measured = require "pg.parallel.measured"
local schedule = require "pg.parallel.schedule"
local simulate = require "pg.parallel.simulate"
local svg = require "pg.parallel.schedule_svg"

-- Kinds: a whole number, seconds (a number, or several with commas: a stage each), or a file's name.
local options = { stages = "whole", micro = "whole", chunks = "whole", limit = "whole", width = "whole",
                  forward = "seconds", backward = "seconds", weight = "seconds", send = "seconds", svg = "file",
                  measured = "file" }
local NAMES = { "stages", "micro", "chunks", "forward", "backward", "weight", "send", "limit", "width", "svg",
                "measured" }
local WITH_MEASURED = { measured = true, send = true, width = true, svg = true }
local USAGE = [[
usage: pgrun schedule NAME|FILE.lua --stages=4 --micro=8 [--chunks=1] [--forward=1] [--backward=1] [--weight=1]
                      [--send=0] [--limit=N] [--width=120] [--svg=FILE]
       pgrun schedule --measured=FILE.json[,FILE.json...] [--send=0] [--width=120] [--svg=FILE]
  NAME      ]] .. table.concat(schedule.names, ", ") .. [[; FILE.lua returns one of your own (pgrun help pipelines)
  --chunks  chunks of the model on each stage
  --forward, --backward, --weight   seconds a micro-batch takes on a stage: forward, gradient of the input, gradient
            of the weights; 1,1,2 gives each stage its own.  --send: seconds until a message arrives
  --limit   most micro-batches (times chunks) that a stage may keep; --width: columns of the picture
  --measured  what log.timeline has written, beside the same schedule simulated with the measured times
]]

local function usage(why)
  io.stderr:write("pgrun schedule: ", why, "\n", USAGE)
  os.exit(2, true)
end

local read = {}
function read.file(text, name)
  if text == "" then usage(("--%s= names no file"):format(name)) end
  return text
end
function read.whole(text, name)
  local n = text:match "^%d+$" and tonumber(text)
  return n and n >= 1 and n <= 2^20 and n or usage(("--%s=%s: a whole number from 1 on is wanted"):format(name, text))
end
function read.seconds(text, name)
  local list = {}
  for part in (text .. ","):gmatch "([^,]*)," do
    local x = tonumber(part)
    if not (x and x >= 0 and x < math.huge) then
      usage(("--%s=%s: seconds are wanted, such as 1.5, or 1,1,2 for the stages"):format(name, text))
    end
    list[#list + 1] = x
  end
  return #list == 1 and list[1] or list
end

local function arguments(args)
  local words, o = {}, {}
  for _, a in ipairs(args) do
    local name, value = a:match "^%-%-([%w_]+)=(.*)$"
    if a == "--help" or a == "-h" then io.stdout:write(USAGE) os.exit(0, true) end
    if name and not options[name] then
      local near = c.nearest(name, NAMES)
      usage(("unknown option --%s%s"):format(name, near and ", did you mean --" .. near .. "?" or ""))
    elseif name then o[name] = read[options[name]](value, name)
    elseif a:find "^%-" then usage(a .. ": options are written --stages=4")
    else words[#words + 1] = a end
  end
  if type(o.send) == "table" then usage "--send is one number" end
  if o.measured then return words, o end
  if #words ~= 1 then usage(("one schedule is wanted, %d words given"):format(#words)) end
  for _, name in ipairs { "stages", "micro" } do
    if not o[name] then usage(("--%s=N is missing"):format(name)) end
  end
  return words, o
end

-- A name stays one; a file gives its function.
local function find(name)
  if not name:find "%.lua$" and not name:find "/" then return name end
  local chunk, wrong = loadstring(fs.read(name):gsub("^#[^\n]*", ""), "@" .. name)
  if not chunk then c.fail("%s", wrong) end
  local f = chunk()
  if type(f) ~= "function" then
    c.fail("%s returns a %s; a schedule is a function: return function(o) ... return lists end", name, type(f))
  end
  return f
end

local function simulated(name, o)
  local chunks = o.chunks or 1
  local lists, peaks = schedule.make(find(name), { stages = o.stages, micro = o.micro, chunks = chunks,
                                                   limit = o.limit })
  local timeline = simulate.timeline(lists, { forward = o.forward, backward = o.backward, weight = o.weight,
                                              send = o.send })
  local title = draw.title(name, { stages = o.stages, micro = o.micro, chunks = chunks })
  if timeline.makespan == 0 then usage "with these times no step takes any" end
  print(title)
  print(draw.text(timeline, { width = o.width }))
  print(draw.report(timeline, peaks))
  if o.svg then fs.write(o.svg, svg.draw(title, { { name = "simulated", timeline = timeline } })) end
end

-- Each file's step beside its simulation; the picture holds all of them on one axis.
local function from_files(words, o)
  if #words > 0 then usage(("--measured has its schedule in the file; %s is one too many"):format(words[1])) end
  for name in pairs(o) do
    if not WITH_MEASURED[name] then usage(("--measured has its own; --%s is one too many"):format(name)) end
  end
  local list = {}
  for path in o.measured:gmatch "[^,]+" do
    local m = measured.read(path)
    local beside = measured.simulated(m, o.send)
    print((#list > 0 and "\n" or "") .. measured.title(m))
    print(measured.draw(m, beside, o.width))
    print(measured.report(m, beside, o.send))
    list[#list + 1] = { m, beside }
  end
  if o.svg then fs.write(o.svg, measured.picture(list)) end
end

local words, o = arguments { ... }
if o.measured then from_files(words, o) else simulated(words[1], o) end
return 0
