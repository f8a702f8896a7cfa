-- ranks: 4
-- Asynchronous collectives that are treated badly: dropped, overtaken by a free, left under way at the end; and
-- groups made again and again.
local c = require "pg.c"
local check = require "tests.check"
local mesh = pg.mesh.ready()
local world = mesh.world
local rank, size = world.rank, world.size
local TWICE = size * (size + 1) -- the sum of 2 (rank + 1)

local function collect()
  collectgarbage()
  collectgarbage()
end
local function is(t, value)
  for i, x in ipairs(t:totable()) do
    if x ~= value then error(("element %d is %g, not %g"):format(i, x, value), 2) end
  end
end

-- Handles that nobody waits for: the sums arrive, and neither handles nor tensors stay.
world:all_reduce(pg.zeros { 1 }, "sum", true):wait()
collect()
local before = pg.memory().tensors
local kept = pg.full({ 1000 }, rank + 1)
pg.scope(function()
  for _ = 1, 200 do world:all_reduce(pg.full({ 1000 }, 1), "sum", true) end
  world:all_reduce(kept, "sum", true)
end)
collect()
pg.barrier()
is(kept, TWICE / 2)
world:all_reduce(kept, "max", true):wait() -- frees what was dropped
kept:free()
collect()
assert(pg.memory().tensors <= before, ("%d tensors before, %d after"):format(before, pg.memory().tensors))

-- A tensor freed while its sum is under way: its memory is not given to another tensor meanwhile.
local late = pg.full({ 100000 }, 2 * (rank + 1))
local kept_view = late:view({ 100000 }, 0):keep()
local work = world:all_reduce(late, "sum", true)
late:free()
local other = pg.full({ 100000 }, 7)
work:wait()
is(other, 7)
is(kept_view, TWICE)
assert(work:done() and not pcall(late.alive, late))
work:wait() -- a second wait is nothing

-- Many under way at once, waited for in another order.
local works, sums = {}, {}
for i = 1, 20 do
  sums[i] = pg.full({ i * 1000 }, rank + 1)
  works[i] = world:all_reduce(sums[i], "sum", true)
end
for i = 20, 1, -1 do
  works[i]:wait()
  is(sums[i], TWICE / 2)
end

-- Messages: to oneself, and crossing each other at a size beyond the pipe's.
check.throws(function() world:send(pg.zeros { 1 }, rank) end, "is this rank itself")
check.throws(function() world:recv(pg.zeros { 1 }, size) end, "the group has ranks 0 to 3")
local n = 700000
local got, right, left = pg.zeros { n }, (rank + 1) % size, (rank - 1) % size
local sending = world:send(pg.full({ n }, rank), right, true)
world:recv(got, left)
sending:wait()
is(got, left)

-- Groups made again: each works, the old ones go with their last handle; more than a world holds at a time.
local first = mesh.dp
for i = 1, 3 do
  mesh.build { dp = 2, tp = 2 }
  local t = pg.full({ 10 }, rank)
  mesh.dp:all_reduce(t)
  is(t, rank % 2 == 0 and 0 + 2 or 1 + 3)
  t:fill(rank)
  mesh.tp:all_reduce(t)
  is(t, rank < 2 and 0 + 1 or 2 + 3)
  collect()
  assert(mesh.dp ~= first, i)
end
local t = pg.full({ 10 }, 1)
first:all_reduce(t) -- still ours to use
is(t, size)
check.throws(function() mesh.build { dp = 3 } end, "pp 1 x dp 3 x tp 1 = 3 ranks, but 4 were started; use -n 3")

-- A handle outlives its axis.
local dropped = mesh.dp:all_reduce(t, "sum", true)
mesh.build {}
collect()
dropped:wait()
is(t, 2 * size)

-- The end, with sums, a message and a receive under way that nobody will ever meet.
pg.barrier()
world:send(pg.zeros { 10 }, right, true)
world:send(pg.zeros { n }, left, true)
local never = world:recv(pg.zeros { 5 }, (rank + 2) % size, true)
assert(rank ~= 1 or not never:done())
c.check(c.C.pg_sync())
