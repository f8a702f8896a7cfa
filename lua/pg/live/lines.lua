-- live/lines.lua: a line of the prompt on all ranks of a job, or on those it names.  All ranks call session:run
-- with the same text, outside any step; each runs its part under a time limit, a collective that some leave out
-- is undone, and the first rank gets what all have said, labelled.  Neighbours: groups.lua (which groups lines
-- use), guard.lua (what they must leave alone), runtime/host/line.c (time limits, output).
--   @0 x    @0,3 x    @0-2 x    @tp=1,pp=0 x    @all x
local agree = require "pg.agree"
local c = require "pg.c"
local groups = require "pg.live.groups"
local guard = require "pg.live.guard"
local host = require "pg.host"
local labels = require "pg.live.labels"
local mesh = require "pg.mesh"
local repl = require "pg.repl"
local Tensor = require "pg.tensor"
local C, ffi = c.C, c.ffi

jit.off(true, true) -- this file turns the compiler off and on

local GRACE = 30      -- seconds beyond a line's limit that the other ranks wait for a rank
local REST = 0.1      -- seconds that the others have to finish what a failed line had begun with them
local LONGEST = 65536 -- bytes of a rank's answer

local Session = {}
Session.__index = Session

local function setting(name, default)
  local text = os.getenv(name)
  if not text then return default end
  local n = tonumber(text)
  if not (n and n > 0 and n < 1e6) then c.fail("%s=%s; it is a number of seconds above 0", name, text) end
  return n
end

--- lines.new{ keep =, prompt = } -> a session.  keep: a training goes on afterwards, which no line may touch by
-- accident; prompt: Ctrl-C belongs to the lines.  Its globals are its own and last from line to line.
local function new(o)
  local s = setmetatable({ keep = o.keep, prompt = o.prompt, number = 0, given = {}, groups = groups.new(o.keep),
                           seconds = setting("PGRUN_LINE_LIMIT", 30), wait = setting("PGRUN_LINE_TIMEOUT", 10),
                           usual = C.pg_comm_timeout(0) }, Session)
  s.libraries = o.keep and guard.libraries() or {}
  s.libraries.help = function(x) print((repl.describe(x))) end
  s.env = setmetatable({}, { __index = function(_, name)
    local value = s.given[name]
    if value == nil then value = s.libraries[name] end
    if value == nil then value = _G[name] end
    return value
  end })
  return s
end

--- session:start(): once, by all ranks.
function Session:start()
  if self.service then return end
  mesh.ready()
  self.service = self.groups:own "prompt"
end

-- The text of the first rank on all ranks.
function Session:hear(text)
  self:start()
  return agree.tell(text, self.service)
end

-- f() interpreted, under the time limit -> as host.limited.  fresh: of people's code only such runs as was never
-- compiled.
function Session:limited(f, fresh)
  local compiled = jit.status()
  if not fresh then jit.flush() end -- hooks do not reach compiled code
  jit.off()
  local function done(...)
    if compiled then jit.on() end
    return ...
  end
  return done(host.limited(f, self.seconds))
end

-- ---- the line itself ----

local REASONS = {
  time = "stopped: it ran for more than %g s (PGRUN_LINE_LIMIT)",
  asked = "stopped, as asked",
  output = "stopped: it printed more than 64 MiB",
}

-- Its own error, without the frames that the prompt itself adds.
function Session:story(message, reason)
  if reason then return REASONS[reason]:format(self.seconds) end
  local text = tostring(message):gsub("\n    prompt:%d+: in [^\n]*", ""):gsub("\n    %(%d+ more in lua/pg[^\n]*", "")
  return text
end

-- On this rank -> went well, what it printed and returned, hurt: groups may be out of step.
function Session:call(code)
  local chunk, wrong = repl.compile(code, self.env)
  if not chunk then return false, "error: " .. wrong, false end
  c.code = nil
  host.capture()
  local ok, value, reason = self:limited(function()
    local text = repl.results(chunk())
    C.pg_sync() -- what the line left running on the device fails here, within the line
    return text
  end)
  local printed = host.captured()
  local last = ok and value or not ok and "error: " .. self:story(value, reason) or nil
  if last then printed = printed .. last .. "\n" end
  return ok, (printed:gsub("\n$", "")), not ok or c.code == C.PG_ECOMM or c.code == C.PG_ECANCEL
end

-- Anchored: a pattern that may begin anywhere takes the square of the lines' lengths, a minute for one of 250 KB.
local function last_line(text) return text:match "^.*\n(.*)$" or text end

-- Run it, or stand aside; whoever waits for this rank in vain is told why.
function Session:take_part(mine, code, where)
  local on_many = mesh.world.size > 1
  if not mine then
    self.groups:cancel(("rank %d does not run this line (@%s)"):format(mesh.world.rank, where))
    return true, "", true
  end
  local ok, said, hurt = self:call(code)
  if not ok and on_many then
    host.nap(REST)
    self.groups:cancel("its line failed: " .. last_line(said):gsub("^error: ", ""))
  end
  return ok, said, hurt
end

-- What all ranks have said, at the first rank: { { ok =, text = }, ... }.
function Session:gather(ok, said)
  local axis = self.service
  if #said > LONGEST then said = said:sub(1, LONGEST) .. "\n..." end
  local mine = (ok and "+" or "-") .. said
  if axis.size == 1 then return { { ok = ok, text = said } } end
  local longest = axis:sum_numbers({ #mine }, "max")[1] + 4
  local buffer = ffi.new("uint8_t[?]", longest)
  for i = 0, 3 do buffer[i] = math.floor(#mine / 256^i) % 256 end
  ffi.copy(buffer + 4, mine, #mine)
  local part = Tensor.empty({ longest }, "u8"):write(buffer)
  local all = Tensor.empty({ axis.size, longest }, "u8")
  axis:all_gather(all, part)
  local answers, bytes = {}, all:buffer()
  for r = 0, axis.rank == 0 and axis.size - 1 or -1 do
    local at, n = ffi.cast("uint8_t *", bytes) + r * longest, 0
    for i = 3, 0, -1 do n = n * 256 + at[i] end
    local text = ffi.string(at + 4, n)
    answers[r + 1] = { ok = text:sub(1, 1) == "+", text = text:sub(2) }
  end
  part:release()
  all:release()
  return answers
end

-- The line between its frame: what it must not change is put back whatever it does.
function Session:framed(mine, code, where, model)
  local kept = guard.keep(self.keep and model or nil)
  self.groups:enter()
  C.pg_comm_timeout(self.wait)
  local ok, said, hurt = self:take_part(mine, code, where)
  C.pg_comm_timeout(self.seconds + GRACE)
  self.groups:leave()
  guard.restore(kept)
  return ok, said, hurt
end

--- session:protect(f, ...) -> as pcall, for code of people's that has just been loaded and runs on all ranks between
-- two steps: its output is as always, its time is a line's.
function Session:protect(f, ...)
  local words, n = { ... }, select("#", ...)
  self.number = self.number + 1
  host.line_begin(self.number, self.prompt)
  local function done(ok, ...)
    host.line_end()
    if ok then return ok, ... end
    local value, reason = ...
    return false, reason and self:story(value, reason) or tostring(value):match "[^\n]*"
  end
  return done(self:limited(function() return f(unpack(words, 1, n)) end, true))
end

--- session:run(text, o) -> on the first rank what the ranks said (text), and whether all went well; on all ranks
-- whether groups were out of step and have been reformed.  o: given (names at hand in the line), client (whose
-- interrupt stops it).
function Session:run(text, o)
  o = o or {}
  self.number = self.number + 1
  self.given = o.given or {}
  local where, code = repl.where(text)
  local mine, wrong = labels.selects(where or "all", mesh)
  if wrong then return host.rank == 0 and "error: " .. wrong or "", false, false end
  self.groups:prepare()
  self.service:barrier() -- a rank may cancel them as soon as it runs the line, and others still be making theirs
  host.line_begin(self.number, self.prompt, o.client)
  local ok, said, hurt = self:framed(mine, code, where, self.given.model)
  local bad = self.service:sum_numbers({ hurt and 1 or 0 }, "max")[1] > 0
  if bad then self.groups:reform() end
  local answers = self:gather(ok, said)
  host.line_end()
  C.pg_comm_timeout(self.usual)
  c.collect() -- what the line left behind
  local text_of_all, well = labels.join(answers)
  return text_of_all, well, bad
end

return { new = new }
