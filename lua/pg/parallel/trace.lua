-- parallel/trace.lua: when the steps of a stage began and ended, by marks (pg.h) among the kernels of one step of
-- training.  The host waits for none of them until trace:read, after the step.
-- The stages' clocks: on the CPU all ranks of a host have one.  A GPU counts from a mark of its own; before the first
-- step all stages pass the same few sums over pp, and what separates their marks there is taken for the clocks'
-- difference.
local c = require "pg.c"
local mesh = require "pg.mesh"
local Tensor = require "pg.tensor"
local C, ffi = c.C, c.ffi

local trace = {}
local Trace = {}
Trace.__index = Trace
local ROUNDS = 9 -- sums; after the first, which may open connections, the middle one counts

--- trace.new(lists, micro, stage) -> a trace of that stage's steps.  All ranks of pp call it, and stand together when
-- it returns: nothing is under way on any.
function trace.new(lists, micro, stage)
  local list = lists[stage + 1]
  local slot = ffi.new "pg_marks *[1]"
  c.check(C.pg_marks_new(slot, ROUNDS + 2 * #list))
  local t = setmetatable({ lists = lists, micro = micro, stage = stage, raw = ffi.gc(slot[0], C.pg_marks_free),
                           set = 0 }, Trace)
  local one = Tensor.zeros({ 1 }, "f32")
  c.check(C.pg_sync())
  mesh.pp:barrier()
  for _ = 1, ROUNDS do
    mesh.pp:all_reduce(one)
    t:mark()
  end
  one:release()
  return t
end

--- t:mark(): this moment is the next step's start, or its stop; both of every step, in the list's order.
function Trace:mark()
  c.check(C.pg_marks_set(self.raw, self.set))
  self.set = self.set + 1
end

-- ---- afterwards ----

--- trace.middle(list) -> the number in the middle; nil of an empty list.  Sorts it.
function trace.middle(list)
  table.sort(list)
  return list[math.floor(#list / 2) + 1]
end

-- Where each stage's numbers lie in those of all; ends with their count.
local function places(lists)
  local at = { 0 }
  for s, list in ipairs(lists) do at[s + 1] = at[s] + ROUNDS + 2 * #list end
  return at
end

-- This stage's seconds among zeros, so that a sum over pp brings all of them to all.
local function share(self, at)
  local numbers = {}
  for i = 1, at[#at] do numbers[i] = 0 end
  local n = ROUNDS + 2 * #self.lists[self.stage + 1]
  local seconds = ffi.new("double[?]", n)
  c.check(C.pg_marks_read(self.raw, seconds))
  for i = 0, n - 1 do numbers[at[self.stage + 1] + i + 1] = seconds[i] end
  C.pg_marks_free(ffi.gc(self.raw, nil))
  self.raw = nil
  return numbers
end

--- trace.clocks(rounds) -> what each stage's clock is ahead of stage 0's, a list; and what the round that agrees least
-- is off by.  rounds[s]: when stage s - 1 saw the end of each round, on its own clock.
function trace.clocks(rounds)
  local ahead, off = {}, 0
  for s, seen in ipairs(rounds) do
    local each = {}
    for i = 2, #seen do each[i - 1] = seen[i] - rounds[1][i] end
    ahead[s] = trace.middle(each)
    for _, x in ipairs(each) do off = math.max(off, math.abs(x - ahead[s])) end
  end
  return ahead, off
end

-- Nothing to set right where one clock serves all.
local function clocks(all, at, stages)
  local rounds = {}
  for s = 1, stages do rounds[s] = { unpack(all, at[s] + 1, at[s] + ROUNDS) } end
  if c.device() ~= "cpu" then return trace.clocks(rounds) end
  local ahead = {}
  for s = 1, stages do ahead[s] = 0 end
  return ahead, 0
end

--- t:read() -> timeline (simulate.lua), seconds: how exactly the clocks agree (0: there is one clock).  Waits for the
-- device.  All ranks of pp call it once, after the step; each gets the same.
function Trace:read()
  local lists, at = self.lists, places(self.lists)
  local all = mesh.pp:sum_numbers(share(self, at))
  local ahead, exact = clocks(all, at, #lists)
  local timeline, zero = {}, math.huge
  for s, list in ipairs(lists) do
    timeline[s] = {}
    for k, step in ipairs(list) do
      local i = at[s] + ROUNDS + 2 * k
      local start, stop = all[i - 1] - ahead[s], all[i] - ahead[s]
      timeline[s][k] = { kind = step[1], micro = step[2], chunk = step[3], start = start, stop = stop }
      zero = math.min(zero, start)
    end
  end
  for _, list in ipairs(timeline) do -- from the first start of all on
    for _, step in ipairs(list) do step.start, step.stop = step.start - zero, step.stop - zero end
  end
  return timeline, exact
end

return trace
