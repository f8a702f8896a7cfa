# limit: 60
# Ranks that part ways, and ranks started wrongly: ended at once, with a message that names both sides.
set -u
cd "$SCRATCH"
failed=0
# fails CODE 'text|text...' NAME RANKS: script NAME ends with CODE and says each text
fails() {
    code=$1 texts=$2; shift 2
    began=$(date +%s)
    timeout 30 "$PGRUN" "$@" >said 2>&1
    got=$?
    [ $got = "$code" ] || { echo "$*: exit code $got, not $code"; cat said; failed=1; }
    [ $(($(date +%s) - began)) -le 10 ] || { echo "$*: took more than 10 s"; failed=1; }
    says "$texts" "$*"
}
says() {
    printf '%s\n' "$1" | tr '|' '\n' | while read -r text; do
        grep -qF -- "$text" said || { echo "$2: expected: $text"; sed 's/^/    /' said; exit 1; }
    done || failed=1
}
cat >one.lua <<'LUA'
pg.barrier()
if pg.rank() == 0 then pg.barrier() end
LUA
fails 1 'pgrun: rank 0 failed before the first step: one.lua:2: barrier (world): rank 1 has left|then rank 1 had ended well' -n 2 one.lua
cat >lengths.lua <<'LUA'
pg.rank()
local t = pg.zeros { 3 + pg.rank() }
pg.mesh.world:all_reduce(t)
LUA
fails 1 'lengths.lua:3: group world: rank 0 calls allreduce f32 x 3, rank 1 calls allreduce f32 x 4' -n 2 lengths.lua
cat >kinds.lua <<'LUA'
local t = pg.zeros { pg.ranks() }
if pg.rank() == 1 then pg.mesh.world:broadcast(t) end
pg.mesh.world:all_reduce(t)
LUA
fails 1 'rank 0 calls allreduce f32 x 3, rank 1 calls broadcast f32 x 3 from root 0' -n 3 kinds.lua
# a collective that one rank leaves out is found at its next one: both sides, both lines
cat >left_out.lua <<'LUA'
local t = pg.zeros { 3 }
pg.barrier()
if pg.rank() == 0 then
  pg.mesh.world:all_reduce(t)
end
pg.barrier()
LUA
fails 1 'group world: rank 0 calls allreduce f32 x 3, rank 1 calls barrier|left_out.lua:4: |left_out.lua:6: ' -n 2 left_out.lua
cat >no_step.lua <<'LUA'
local model = pg.build(require "models.llama" { blocks = 1, width = 16, heads = 2, vocab = 11, context = 4 })
local optim = pg.optim.adamw(model:parameters(), { rate = 1e-3 })
local ids = pg.tensor({ { 1, 2, 3 } }, "i32")
for step = 1, 3 do
  model:loss({ tokens = ids, targets = ids }):backward()
  if not (pg.rank() == 1 and step == 2) then
    optim:step()
  end
end
LUA
fails 1 'group dp: rank 0 calls allreduce f32 x |, rank 1 calls allreduce f64 x 1 (call |no_step.lua:7: |no_step.lua:5: ' -n 2 no_step.lua
cat >early.lua <<'LUA'
pg.barrier()
if pg.rank() == 2 then return end
pg.barrier()
LUA
fails 1 'early.lua:3: barrier (world): rank 2 has left' -n 3 early.lua
cat >raises.lua <<'LUA'
pg.barrier()
if pg.rank() == 1 then error "boom" end
pg.barrier()
LUA
fails 1 'pgrun: rank 1 failed before the first step: raises.lua:2: boom|raises.lua:3: barrier (world): rank 1 failed' -n 2 raises.lua
cat >exits.lua <<'LUA'
pg.barrier()
local start = pg.time()
while pg.time() < start + 0.3 do end -- until rank 0 has passed the barrier, too
if pg.rank() == 1 then os.exit(3) end
pg.barrier()
LUA
fails 3 'pgrun: rank 1 ended with exit code 3 before the first step|exits.lua:5: barrier (world): rank 1 ' -n 2 exits.lua
cat >inside.lua <<'LUA'
coroutine.wrap(function()
  pg.barrier()
  if pg.rank() == 1 then error "in a coroutine" end
  pg.barrier()
end)()
LUA
fails 1 'inside.lua:3: in a coroutine|inside.lua:4: barrier (world): rank 1 failed' -n 2 inside.lua
# both alive, each at a line of its own: the time limit names them
cat >waits.lua <<'LUA'
pg.barrier()
if pg.rank() == 0 then
  pg.mesh.world:all_reduce(pg.zeros { 4 })
else
  pg.mesh.build { dp = 2 }
end
LUA
PGRUN_TIMEOUT=2 fails 1 'time limit 2 s (PGRUN_TIMEOUT)|waits in comm_split (dp) at waits.lua:5|waits in allreduce (world) at waits.lua:3' -n 2 waits.lua
# one computes, the other waits
cat >busy.lua <<'LUA'
pg.barrier()
if pg.rank() == 0 then pg.mesh.world:recv(pg.zeros { 4 }, 1) end
local start = pg.time()
while pg.time() < start + 20 do end
LUA
PGRUN_TIMEOUT=2 fails 1 'recv f32 x 4 (world): rank 0 waited|rank 0 waits in recv (world) at busy.lua:2|rank 1 is at its start, not waiting, last at busy.lua:1' -n 2 busy.lua
PGRUN_TIMEOUT=soon fails 1 'PGRUN_TIMEOUT=soon; it is a number of seconds above 0' -n 2 one.lua

printf 'return { model = require "models.llama" {}, steps = 1, data = { batch = 12 } }\n' >recipe.lua
fails 1 'pp 1 x dp 4 x tp 1 = 4 ranks, but 3 were started; use -n 4' -n 3 recipe.lua --layout.dp=4
for n in 0 -1 2.5 300 many; do fails 2 "-n $n: give a number of ranks from 1 to 256" -n $n one.lua; done

# ---- started by another launcher ----
cat >sum.lua <<'LUA'
local t = pg.full({ 3 }, pg.rank() + 1)
pg.mesh.ready().world:all_reduce(t)
print(("rank %d of %d: %d"):format(pg.rank(), pg.ranks(), t:totable()[1]))
LUA
# job RANKS CODE FAMILY: each rank as that launcher would start it; all end with CODE
job() {
    pids=
    for r in $(seq 0 $(($1 - 1))); do
        case $3 in
        torchrun) set -- "$1" "$2" "$3" RANK=$r WORLD_SIZE=$1 LOCAL_RANK=$r LOCAL_WORLD_SIZE=$1 MASTER_ADDR=localhost ;;
        mpirun) set -- "$1" "$2" "$3" OMPI_COMM_WORLD_RANK=$r OMPI_COMM_WORLD_SIZE=$1 \
            OMPI_COMM_WORLD_LOCAL_RANK=$r OMPI_COMM_WORLD_LOCAL_SIZE=$1 ;;
        hydra) set -- "$1" "$2" "$3" PMI_RANK=$r PMI_SIZE=$1 ;;
        slurm) set -- "$1" "$2" "$3" SLURM_NTASKS=$1 SLURM_PROCID=$r SLURM_LOCALID=$r SLURM_NNODES=1 SLURM_JOB_ID=7 ;;
        hosts) set -- "$1" "$2" "$3" RANK=$r WORLD_SIZE=$1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 ;;
        differ) set -- "$1" "$2" "$3" RANK=$r WORLD_SIZE=$((2 + r)) ;;
        esac
        (shift 3; exec timeout 20 env "$@" MASTER_PORT="${PORT:-29871}" "$PGRUN" sum.lua) >said.$r 2>&1 &
        pids="$pids $!"
    done
    for pid in $pids; do
        wait "$pid"
        got=$?
        [ $got = "$2" ] || { echo "$3: exit code $got, not $2"; cat said.?; failed=1; }
    done
    cat said.? >said
    rm -f said.?
}
for family in torchrun mpirun hydra slurm; do
    job 3 0 $family
    says 'rank 0 of 3: 6|rank 2 of 3: 6' $family
    job 3 0 $family # again under the same name: nothing stands in the way
done
job 2 1 hosts
says '1 of 2 ranks are on this host (torchrun)' hosts
job 2 1 differ
says '[rank 0] sum.lua:1: ranks: rank 1 says 3 ranks, rank 0 says 2; set WORLD_SIZE alike on all' differ
RANK=2 WORLD_SIZE=2 fails 1 'RANK=2; it is an integer from 0 to 1' sum.lua
RANK=0 fails 1 'RANK is set, WORLD_SIZE is not' sum.lua
RANK=0 WORLD_SIZE=3 PGRUN_TIMEOUT=1 fails 1 'only 1 of 3 ranks joined within 1 s; missing: 1, 2' sum.lua
RANK=1 WORLD_SIZE=3 PGRUN_TIMEOUT=1 fails 1 'rank 0 did not come within 1 s; start it on this host' sum.lua
# the ranks' shared memory is a file to ulimit
(ulimit -f 64; fails 1 'ulimit -f counts it as a file' -n 2 sum.lua; exit $failed) || failed=1
# a rank that was killed while it waited for the others leaves nothing that the next job could meet
RANK=0 WORLD_SIZE=2 MASTER_PORT=29871 "$PGRUN" sum.lua >/dev/null 2>&1 & first=$!
sleep 0.3
kill -KILL $first
wait $first 2>/dev/null
job 2 0 torchrun
says 'rank 1 of 2: 3' 'after a kill'
exit $failed
