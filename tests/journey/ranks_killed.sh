# limit: 110
# A training of three ranks is killed or stopped in each of its phases: every rank in turn by SIGKILL, the
# launcher by each signal, also twice in a row.  All are gone in time, the report's first line names the
# rank, its signal and a step, and nothing stays behind.
set -u
cd "$SCRATCH"
seq 3000 >text.txt
cat >phases.lua <<'LUA'
-- A file PHASE.RANK with the process's number appears when a rank enters the phase that is asked for.
local host = require "pg.host"
local tape = require "pg.tape"
local phase, there = os.getenv "PHASE", false
local function enter(name)
  if name ~= phase or there then return end
  there = true
  local f = assert(io.open(("%s.%d"):format(name, host.rank), "w"))
  f:write((io.open("/proc/self/stat"):read "*l"):match "^%d+")
  f:close()
end
if phase == "first" then -- the victim never comes to the first collective
  enter "first"
  while host.rank == tonumber(os.getenv "VICTIM") do end
end
return {
  model = require "models.llama" { blocks = 1, width = 32, heads = 2, vocab = 259, context = 32 },
  data = { text = "text.txt", batch = 12, held_out = 0.3 }, steps = 100000,
  eval = { every = phase == "evaluation" and 2 or 0 },
  sample = phase == "generation" and { every = 2, prompt = "The ", tokens = 1000000 } or nil,
  save = { every = 0 },
  loss = function(model, batch)
    if not tape.context.training then enter "evaluation" end
    return model:loss(batch)
  end,
  on_step = function(state)
    if state.step == 2 then enter "generation" end
    if state.step == 5 then enter "training" end
  end,
}
LUA
failed=0
complain() { echo "$PHASE, $what: $*"; sed 's/^/    /' said; failed=1; }
# start PHASE: the launcher, once all ranks are in that phase
start() {
    export PHASE=$1
    rm -rf runs "$PHASE".?
    env --default-signal=INT,TERM "$PGRUN" -n 3 phases.lua >said 2>&1 & launcher=$!
    for _ in $(seq 300); do
        [ -s $PHASE.0 ] && [ -s $PHASE.1 ] && [ -s $PHASE.2 ] && break
        sleep 0.1
    done
    [ -s $PHASE.2 ] || { echo "$PHASE: the ranks do not come to it"; cat said; exit 1; }
    sleep 0.1
    began=$(date +%s)
}
# ended CODE SECONDS: the launcher with that code, the ranks, and what they shared
ended() {
    wait $launcher 2>/dev/null
    code=$?
    [ $code = "$1" ] || complain "exit code $code, not $1"
    for i in 0 1 2; do
        while [ "$(awk '{ print $3 }' "/proc/$(cat $PHASE.$i)/stat" 2>/dev/null || echo Z)" != Z ]; do
            [ $(($(date +%s) - began)) -le "$2" ] || { complain "rank $i is still there"; break; }
            sleep 0.1
        done
    done
    [ $(($(date +%s) - began)) -le "$2" ] || complain "took more than $2 s"
    ls /dev/shm | grep pgrun && complain "left shared memory"
}
# death PHASE VICTIM WHEN: WHEN is how the report tells the step
death() {
    export VICTIM=$2
    start "$1"
    what="rank $2 killed"
    kill -KILL "$(cat $PHASE.$VICTIM)"
    ended 137 10
    grep -m1 '^pgrun: rank' said | grep -qE "^pgrun: rank $2 was killed by SIGKILL $3\$" || complain "report"
}
for rank in 0 1 2; do
    death first $rank 'before the first step'
    grep -qE 'then rank [012] waits in comm_split \(dp\) at lua/pg/[a-z/]+.lua:[0-9]+ since' said ||
        complain "does not tell where the others waited"
    death training $rank 'at step [0-9]+'
    death evaluation $rank 'at step [0-9]+'
done
death generation 0 'at step [0-9]+'
death generation 1 'at step [0-9]+'

export VICTIM=none
# stop PHASE CODE SIGNAL...: of the launcher
stop() {
    start "$1"
    what="launcher told $3 ${4:-}"
    kill -s "$3" $launcher
    [ -z "${4:-}" ] || { sleep 0.01; kill -s "$4" $launcher 2>/dev/null; }
    ended "$2" 10
    [ "$2" = 137 ] || grep -q "^pgrun: stopped by SIG$3" said || complain "does not say what stopped it"
}
for phase in training evaluation generation; do
    stop $phase 143 TERM
    ls runs/*/checkpoints/step-*/manifest.json >/dev/null || complain "SIGTERM without a checkpoint"
    stop $phase 130 INT
    stop $phase 137 KILL
done
stop training 130 INT INT
stop training 143 TERM TERM
stop training 143 TERM INT
exit $failed
