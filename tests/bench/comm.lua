-- ranks: 8
-- Collectives from Lua over all ranks, medians: small and large all_reduce, barrier, a message there and back.
-- On two idle cores and eight ranks 4 bytes are to take under 50 us, 64 MiB under 200 ms.  The same call
-- without mesh.lua shows what the Lua side costs; it is made ten calls deep, as a trainer makes it.
--   pgrun -n 8 tests/bench/comm.lua
local c = require "pg.c"
local mesh = require "pg.mesh"
mesh.rank()
local world = mesh.world

-- Median seconds of f over `turns` measurements of `inner` calls.
local function median(turns, inner, f)
  local times = {}
  f()
  world:barrier()
  for i = 1, turns do
    local start = pg.time()
    for _ = 1, inner do f() end
    times[i] = (pg.time() - start) / inner
  end
  table.sort(times)
  return times[math.ceil(turns / 2)]
end

local function tell(what, seconds, bytes)
  if world.rank > 0 then return end
  local speed = bytes and ("  %6.2f GB/s"):format(bytes / seconds * 1e-9) or ""
  print(("%-40s %10.1f us%s"):format(what, seconds * 1e6, speed))
end

-- f, called at the end of so many frames; the addition keeps them from being tail calls.
local function deep(frames, f)
  if frames == 0 then return f() or 0 end
  return deep(frames - 1, f) + 0
end

local small, large = pg.zeros { 1 }, pg.zeros { 16 * 2^20 }
local function reduce_small() world:all_reduce(small) end
local function reduce_raw() c.check(c.C.pg_allreduce(world.comm, small.raw, c.C.PG_OP_SUM, nil)) end

tell("barrier", median(100, 20, function() world:barrier() end))
tell("all_reduce, 4 bytes", median(100, 20, reduce_small), 4)
tell("all_reduce, 4 bytes, ten calls deep", median(100, 20, function() deep(10, reduce_small) end), 4)
tell("all_reduce, 4 bytes, without mesh.lua", median(100, 20, reduce_raw), 4)
tell("all_reduce, 64 MiB", median(5, 1, function() world:all_reduce(large) end), 64 * 2^20)
if world.size > 1 then
  local peer = world.rank == 0 and 1 or world.rank == 1 and 0 or nil
  local function there_and_back()
    if world.rank == 0 then world:send(small, peer) end
    if peer then world:recv(small, peer) end
    if world.rank == 1 then world:send(small, peer) end
  end
  tell("message of 4 bytes, there and back", median(100, 20, there_and_back))
end
