# limit: 110
# A rank, or the launcher, is killed at a random moment of a training: the rest is gone within 10 s, and
# the report's first line names the rank.  RUNS=30 for more of it, SEED=N for the same moments again.
set -u
cd "$SCRATCH"
RANDOM=${SEED:=$(date +%s)}
echo "SEED=$SEED"
cat >work.lua <<'LUA'
-- steps of a training, and sums under way that nobody waits for
local model = pg.build(require "models.llama" { blocks = 1, width = 32, heads = 2, vocab = 259, context = 32 })
local optim = pg.optim.adamw(model:parameters(), { rate = 1e-3 })
local data = pg.data.text("text.txt", { context = 32, batch = 8 })
for _, batch in data:steps(1e6) do
  model:loss(batch):backward()
  optim:step()
  pg.mesh.ready().world:all_reduce(pg.zeros { 1000 }, "sum", true)
end
LUA
seq 3000 >text.txt
# children PID: its children, in order of birth
children() {
    cat /proc/[0-9]*/stat 2>/dev/null |
        awk -v parent="$1" '{ pid = $1; sub(/.*\) /, "") } $2 == parent { print pid }' | sort -n
}
lives() { [ "$(awk '{ print $3 }' "/proc/$1/stat" 2>/dev/null || echo Z)" != Z ]; }
slow=0 left=0 wrong=0 runs=0 longest=0
# run VICTIM: 0 to 3, or "launcher"
run() {
    "$PGRUN" -n 4 work.lua >said 2>&1 & launcher=$!
    ranks=
    while [ "$(echo $ranks | wc -w)" -lt 4 ]; do ranks=$(children $launcher); done
    moment=$((RANDOM % 2000))
    sleep "$(printf '%d.%03d' $((moment / 1000)) $((moment % 1000)))"
    set -- "$1" $ranks
    pid=$launcher
    [ "$1" = launcher ] || { i=$(($1 + 2)); pid=${!i}; }
    began=$(date +%s%N)
    kill -KILL "$pid"
    wait $launcher 2>/dev/null
    code=$?
    while lives "$2" || lives "$3" || lives "$4" || lives "$5"; do
        [ $(($(date +%s%N) - began)) -gt 12000000000 ] && break
        sleep 0.02
    done
    took=$((($(date +%s%N) - began) / 1000000))
    fault=
    [ $took -le 10000 ] || { slow=$((slow + 1)); fault="took $took ms"; }
    for rank in $ranks; do lives "$rank" && { left=$((left + 1)); fault="$fault; left $rank"; }; done
    if [ "$1" != launcher ]; then
        grep -m1 '^pgrun: rank' said | grep -q "^pgrun: rank $1 was killed by SIGKILL" && [ $code = 137 ] ||
            { wrong=$((wrong + 1)); fault="$fault; code $code"; }
    fi
    [ $took -gt $longest ] && longest=$took
    runs=$((runs + 1))
    [ -z "$fault" ] || { echo "killed $1 after $moment ms: $fault"; sed 's/^/    /' said; }
}
for _ in $(seq "${RUNS:-5}"); do run $((RANDOM % 4)); done
for _ in $(seq "${RUNS:-3}"); do run launcher; done
echo "$runs runs: $slow slow, $left processes left, $wrong reports wrong; the slowest took $longest ms"
[ $((slow + left + wrong)) = 0 ] && ! ls /dev/shm | grep -q pgrun
