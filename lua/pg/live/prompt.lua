-- live/prompt.lua: the prompt on several ranks: pgrun -i -n 4 FILE.  The first rank reads lines, all run them.
-- Neighbours: repl.lua (what a line means, the prompt on one rank), lines.lua (how it runs on all).
local host = require "pg.host"
local lines = require "pg.live.lines"
local repl = require "pg.repl"

jit.off(true, true)

local prompt = {}
local session -- it outlives a Ctrl-C between two lines

local function show(text)
  if text == "" then return end
  io.write(text, "\n")
  io.stdout:flush()
end

-- One line on all ranks -> true if it did its work on all of them.
local function run_everywhere(text)
  host.call()
  local said, well = session:run(session:hear(text))
  show(said)
  return well
end

local function lead(native)
  local all_well = true
  host.prompt_open(true)
  while not native.ended() do
    local chunk, text = repl.read(native)
    if chunk then
      all_well = run_everywhere(text) and all_well
    elseif text then
      io.stderr:write(text, "\n")
      all_well = false
    elseif chunk == nil then
      host.prompt_open(false)
      host.call()
      session:hear ""
      host.told()
      return all_well
    end
  end
  return false
end

local function follow()
  local seen = 0
  while true do
    seen = host.wait_call(seen)
    if not seen then return false end
    local text = session:hear ""
    if text == "" then return true end
    session:run(text)
  end
end

--- prompt.run(native) -> true if every line did its work on all ranks.
function prompt.run(native)
  if not session then
    session = lines.new { prompt = true }
    session:start()
    if not host.shared() then
      error("the prompt on several ranks wants pgrun -n, which gives them a board to meet at", 0)
    end
  end
  if host.rank == 0 then return lead(native) end
  return follow()
end

return prompt
