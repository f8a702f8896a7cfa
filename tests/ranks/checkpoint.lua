-- ranks: 4
-- A checkpoint of any layout loads in any other (C22); what fails on one rank fails on all, and nothing is lost.
local c = require "pg.c"
local agree = require "pg.agree"
local check = require "tests.check"
local checkpoint = require "pg.checkpoint"
local fs = require "pg.fs"
local pieces = require "tests.pieces"
local rank = pg.rank()
local SEED = 7

local function folder_of(name)
  local folder = (os.getenv "SCRATCH" or "build/tests/by-hand") .. "/" .. name
  if rank == 0 then
    fs.remove(folder)
    fs.mkdir(folder .. "/checkpoints")
  end
  pg.barrier()
  return folder
end

-- Code in a job of its own with n ranks -> its exit code, on all ranks.
local function job(n, code)
  local result = "0"
  if rank == 0 then
    local alone = "env -u RANK -u WORLD_SIZE -u LOCAL_RANK -u LOCAL_WORLD_SIZE -u PG_SHM_FD"
    result = tostring(os.execute(("%s %s -n %d -e '%s' 2>&1"):format(alone, os.getenv "PGRUN", n, code)))
  end
  return tonumber(agree.tell(result))
end

-- ---- from layout to layout ----

local folder = folder_of "passed"
local optim = pieces.trainee({ dp = 4 }, SEED)
pieces.moments(optim)
local reference = checkpoint.save(folder, optim, pieces.manifest(1), 100)

local here = {
  { dp = 4, zero = 1 }, { dp = 4, zero = 2 }, { dp = 4, zero = 3 }, { tp = 4 }, { tp = 2, dp = 2, zero = 1 },
  { pp = 2, dp = 2 }, { pp = 2, tp = 2 }, { pp = 2, dp = 2, zero = 3 }, { dp = 4 },
}
local halves = { -- the same f32 numbers, as values and what masters add
  { { dp = 4 }, "bf16" }, { { dp = 4, zero = 1 }, "f16" }, { { tp = 2, dp = 2, zero = 3 }, "bf16" },
  { { dp = 4, zero = 3 }, "f32" }, { { pp = 2, dp = 2, zero = 2 }, "f16" },
}
local fewer = { -- 4 -> 2 -> 1 -> 2 -> 4 ranks
  { 2, "dp = 2, zero = 1" }, { 1, "" }, { 2, "dp = 2, zero = 2" }, { 1, "" }, { 2, "dp = 2, zero = 3" },
  { 2, "tp = 2" }, { 2, "pp = 2" },
}
local at = reference
for _, layout in ipairs(here) do at = pieces.pass(at, folder, layout, SEED) end
for i, one in ipairs(fewer) do
  local code = ([[require("tests.pieces").pass("%s", "%s", { %s }, %d)]]):format(at, folder, one[2], SEED)
  assert(job(one[1], code) == 0, ("%d ranks, %s failed"):format(one[1], one[2]))
  at = checkpoint.list(folder)[1]
  at = pieces.pass(at, folder, here[i], SEED)
end
for _, one in ipairs(halves) do at = pieces.pass(at, folder, one[1], SEED, one[2]) end
pieces.same_files(at, reference, "at the end")
assert(#checkpoint.list(folder) == 1 + #here + 2 * #fewer + #halves)

-- ---- what cannot be done ----

-- A model of other shapes, seen by the one rank that holds the tensor.
optim = pieces.trainee({ tp = 2, dp = 2, zero = 1 }, SEED)
for _, s in ipairs(optim.segments) do
  for _, p in ipairs(s.params) do
    if p.pieces[1].name == "layers.1.out.weight" then p.pieces[1].whole = { 7, 10 } end
  end
end
check.throws(function() checkpoint.load_model(reference, optim.segments) end, "layers.1.out.weight is [7,12] in")

-- Numbers that no rank writes, or two do.
optim = pieces.trainee({ dp = 4 }, SEED)
local piece = optim.segments[1].params[1].pieces[1]
piece.whole = { 6, 12 }
local function save() checkpoint.save(folder, optim, pieces.manifest(99), 100) end
check.throws(save, "table.weight [6,12] has 72 numbers, the ranks would write 60")
piece.whole = { 5, rank == 2 and 12 or 13 }
check.throws(save, "table.weight is [5,1")

-- A host that does not see rank 0's folder.
optim = pieces.trainee({ dp = 4 }, SEED)
local tell = agree.tell
function agree.tell(text)
  text = tell(text)
  return rank == 3 and "/nowhere/" .. text or text
end
local told = check.throws(save, "must lie where all hosts see it")
assert(told:find("rank 3: ", 1, true), told)
agree.tell = tell

-- ---- a disk that is slow on one rank ----

folder = folder_of "slow"
optim = pieces.trainee({ dp = 4 }, SEED)
local hash, usual, slowest = fs.hash, c.C.pg_comm_timeout(0.5), checkpoint.slowest
function fs.hash(...) -- on rank 0, while the others wait
  local till = pg.time() + 0.6
  while pg.time() < till do end
  return hash(...)
end
checkpoint.slowest = 1000 -- bytes a second: the files have more than 5000
checkpoint.save(folder, optim, pieces.manifest(1), 1)
assert(checkpoint.reading(folder) > 5)
fs.hash, checkpoint.slowest = hash, slowest
assert(c.C.pg_comm_timeout(usual) == 0.5, "a wait as usual again")

-- ---- a disk that is full on one rank ----

folder = folder_of "full"
optim = pieces.trainee({ dp = 2, tp = 2, zero = 1 }, SEED)
checkpoint.save(folder, optim, pieces.manifest(1), 1)
for _, full in ipairs { 0, 1, 3 } do
  local failed = 0
  for n = 1, 1000 do
    if rank == full then c.C.pg_fs_fail_after(n) end
    local ok, why = pcall(checkpoint.save, folder, optim, pieces.manifest(2), 2)
    c.C.pg_fs_fail_after(0)
    pg.barrier() -- rank 0 has looked after its folders
    if ok then break end
    failed = failed + 1
    assert(why:find("save: checkpoint of step 2: ", 1, true) and why:find("No space left on device", 1, true), why)
    assert((why:find(("rank %d: "):format(full), 1, true) ~= nil) == (full > 0), why)
    local _, m = checkpoint.newest(folder, error)
    assert(m.step == 1 or full == 0 and #checkpoint.list(folder) == 2, "nothing valid is lost")
    assert(#fs.glob(folder .. "/checkpoints/.tmp-*") == 0)
    pg.barrier()
    if rank == 0 then fs.remove(folder .. "/checkpoints/step-00000002") end
    pg.barrier()
  end
  assert(failed >= 6, ("rank %d: only %d places failed"):format(full, failed))
  local path, m = checkpoint.newest(folder, error)
  assert(m.step == 2)
  checkpoint.load(path, m, optim)
  pg.barrier()
  if rank == 0 then fs.remove(path) end
  pg.barrier()
end

-- ---- a rank killed while it saves ----

local killed = [[
local agree, pieces = require "pg.agree", require "tests.pieces"
local optim, together, calls = pieces.trainee({ dp = 4, zero = 1 }, 7), agree.together, 0
function agree.together(...)
  calls = calls + 1
  if calls == 6 and pg.rank() == 2 then os.execute "kill -9 $PPID" end
  return together(...)
end
require("pg.checkpoint").save("%s", optim, pieces.manifest(2), 2)]]
assert(job(4, killed:format(folder)) ~= 0, "the job should have failed")
local path, m = checkpoint.newest(folder, error)
assert(m.step == 1)
checkpoint.load(path, m, optim)
pg.barrier()
if rank == 0 then checkpoint.clean(folder) end
pg.barrier()
assert(#fs.glob(folder .. "/checkpoints/.tmp-*") == 0)
pg.barrier()
