# limit: 100
# Ranks end together: one killed, one that raises, Ctrl-C, SIGTERM, a killed launcher; within 10 s,
# with a report whose first line names the rank, and nothing left running.
set -u
cd "$SCRATCH"
failed=0
cat >loop.lua <<'LUA'
local host = require "pg.host"
local f = assert(io.open("pid" .. host.rank, "w"))
f:write((io.open("/proc/self/stat"):read "*l"):match "^%d+")
f:close()
local n = 0
while true do n = n + 1 end -- no collective and no C: nothing here hears of the others
LUA
complain() { echo "$*"; sed 's/^/    /' said; failed=1; }
# start: three ranks in the background, waited for until they run
start() {
    rm -f pid?
    "$PGRUN" -n 3 loop.lua >said 2>&1 & launcher=$!
    for _ in $(seq 100); do
        [ -s pid0 ] && [ -s pid1 ] && [ -s pid2 ] && break
        sleep 0.1
    done
    began=$(date +%s)
}
# ended CODE: the launcher has ended so within 10 s, and no rank lives
ended() {
    wait $launcher
    got=$?
    [ "$got" = "$1" ] || complain "exit code $got, not $1"
    [ $(($(date +%s) - began)) -le 10 ] || complain "took more than 10 s"
    for i in 0 1 2; do
        [ "$(awk '{ print $3 }' "/proc/$(cat pid$i)/stat" 2>/dev/null || echo Z)" = Z ] ||
            complain "rank $i is still there"
    done
}
start; kill -KILL "$(cat pid2)"; ended 137
[ "$(grep -m1 '^pgrun: rank' said)" = "pgrun: rank 2 was killed by SIGKILL before the first step" ] ||
    complain "the report does not begin with rank 2"
grep -q 'rank 0 is at its start' said || complain "the report does not tell of rank 0"
start; kill -TERM $launcher; ended 143
start; kill -KILL $launcher; wait $launcher 2>/dev/null; sleep 0.3
for i in 0 1 2; do
    [ "$(awk '{ print $3 }' "/proc/$(cat pid$i)/stat" 2>/dev/null || echo Z)" = Z ] ||
        complain "rank $i outlives the launcher"
done
# a shell's background job ignores SIGINT, so this one is started with the default
rm -f pid?
env --default-signal=INT "$PGRUN" -n 3 loop.lua >said 2>&1 & launcher=$!
while ! { [ -s pid0 ] && [ -s pid1 ] && [ -s pid2 ]; }; do sleep 0.1; done
began=$(date +%s); kill -INT $launcher; ended 130
grep -q 'stopped by SIGINT' said || complain "does not say what stopped it"

printf 'if require("pg.host").rank == 1 then error "boom" end\nprint "one line"\nwhile true do end' >raise.lua
"$PGRUN" -n 3 raise.lua >said 2>&1
[ $? = 1 ] || complain "a rank that raises: not exit code 1"
grep -q '^pgrun: rank 1 failed before the first step: raise.lua:1: boom' said || complain "no report"
grep -q '^\[rank 1\] raise.lua:1: boom' said || complain "the message has no rank"
grep -q '^one line' said && grep -q '^\[rank 2\] one line' said || complain "lines have no rank"

seen=$("$PGRUN" -n 2 -e 'print(os.getenv "WORLD_SIZE", os.getenv "OMP_NUM_THREADS" ~= nil, os.getenv "OMP_WAIT_POLICY")')
[ "$(printf '%s\n' "$seen" | sort | head -1)" = "2	true	passive" ] || { echo "environment: $seen"; failed=1; }
exit $failed
