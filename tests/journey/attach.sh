# limit: 100
# pgrun attach: a prompt inside a run that goes on, its socket, and what happens when either side ends.
set -u
. tests/journey.sh
text 200
cat >slow.lua <<'LUA'
return {
  model = require "models.llama" { blocks = 1, width = 16, heads = 2, context = 16 },
  data = { text = "text.txt", batch = 4 }, steps = 100000, save = {}, log = { every = 1000 },
  optim = { "adamw", clip = 1, rate = pg.rate.linear { peak = 1e-3 } },
}
LUA
# begin FOLDER RANKS: a run there; its pid is $job
begin() {
    "$PGRUN" -n "$2" slow.lua --run="$1" >out 2>&1 & job=$!
    for _ in $(seq 100); do [ -e "$1/process.json" ] && return; sleep 0.1; done
    complain "no run in $1:"; cat out
}
# a path that is longer than a socket's may be
long=$PWD/$(printf 'long%.0s' $(seq 40))/run
begin "$long" 2
[ ${#long} -gt 160 ] && [ "$(stat -c %a "$long/control")" = 600 ] || complain "mode $(stat -c %a "$long/control")"
printf 'state.steps\nmodel ~= nil, optim ~= nil, recipe.data.batch, trainer.state == state\nx = 5\n@1 x * 2\npg.barrier()\n' |
    "$PGRUN" attach "$long" >said 2>&1 || { complain "attach: exit code $?"; cat said; }
printf '[all] 100000\n[all] true\ttrue\t4\ttrue\n[1] 10\n' >wanted
cmp -s said wanted || { complain "attach:"; diff said wanted; }
echo '(model:gradient("model.norm.weight") * 2):stats().count' | "$PGRUN" attach "$long" | grep -q '^\[all\] 16$' ||
    complain "tensors have no methods in a run whose recipe names no op"
echo 'x' | "$PGRUN" attach "$long" | grep -q '^\[all\] 5' || complain "globals of the prompt are gone"
echo 'x, y = 1 error "no"' | "$PGRUN" attach "$long" >said 2>&1 && complain "a failed line, but exit code 0"

# one at a time; Ctrl-C stops the line, not the run
mkfifo fifo
env --default-signal=INT "$PGRUN" attach "$long" <fifo >said 2>&1 & client=$!
exec 3>fifo
printf '1 + 1\n' >&3
for _ in $(seq 100); do grep -q 2 said && break; sleep 0.1; done
echo 1 | "$PGRUN" attach "$long" >second 2>&1 && complain "a second attach was let in"
grep -q "process $client is attached already; one at a time" second || { complain "second:"; cat second; }
printf '@1 io.open("%s/busy", "w"):close() while true do end\n' "$PWD" >&3
for _ in $(seq 100); do [ -e busy ] && break; sleep 0.1; done
kill -INT $client
for _ in $(seq 100); do grep -q 'stopped, as asked' said && break; sleep 0.1; done
printf '"still here"\n' >&3
for _ in $(seq 100); do grep -q 'still here' said && break; sleep 0.1; done
grep -q 'all. still here' said || { complain "after Ctrl-C:"; cat said; }
# a client that is killed lets its line end
rm busy
printf 'io.open("%s/busy", "w"):close() while true do end\n' "$PWD" >&3
for _ in $(seq 100); do [ -e busy ] && break; sleep 0.1; done
kill -KILL $client
exec 3>&-
wait $client 2>/dev/null
echo '"after"' | timeout 20 "$PGRUN" attach "$long" | grep -q 'after' || complain "the line of a dead client goes on"

# the folder is the run's alone; a run that was killed leaves a socket that the next replaces
"$PGRUN" slow.lua --run="$long" --resume >said 2>&1 && complain "two runs in a folder"
grep -q 'holds a run already\|has no checkpoint\|another process trains in it' said || { complain "two runs:"; cat said; }
kill -KILL $job
wait $job 2>/dev/null
[ -S "$long/control" ] || complain "a killed run leaves no socket to replace"
echo 1 | "$PGRUN" attach "$long" >said 2>&1
[ $? = 1 ] && grep -q 'it died, at step' said || { complain "attach to the dead:"; cat said; }

begin runs/saves 1
echo 'trainer:save()' | "$PGRUN" attach saves >said 2>&1 || { complain "save:"; cat said; }
"$PGRUN" slow.lua --run=saves --resume >said 2>&1 && complain "two runs in a folder"
grep -q 'runs/saves: another process trains in it; pgrun stop ends it' said || { complain "two runs:"; cat said; }
[ "$(wc -l <runs/saves/metrics.jsonl)" -gt 2 ] || complain "the second run cut the metrics of the first"
kill -KILL $job
wait $job 2>/dev/null
"$PGRUN" slow.lua --run=saves --resume >out 2>&1 & job=$!
for _ in $(seq 100); do echo 'state.step' | "$PGRUN" attach saves >said 2>&1 && break; sleep 0.1; done
grep -q '^[0-9]' said || { complain "after a resume:"; cat said; }
# the run ends while somebody is attached
"$PGRUN" attach saves <fifo >said 2>&1 & client=$!
exec 3>fifo
printf '1 + 1\n' >&3
for _ in $(seq 100); do grep -q 2 said && break; sleep 0.1; done
"$PGRUN" stop saves >stopped 2>&1 || { complain "stop: exit code $?"; cat stopped; }
printf '2 + 2\n' >&3
exec 3>&-
wait $client
[ $? = 1 ] && grep -q 'runs/saves: it has ended, at step [0-9]* of 100000' said || { complain "its end:"; cat said; }
wait $job
[ $? = 143 ] || complain "a run that was stopped ends with 143"
[ ! -e runs/saves/control ] || complain "the socket is left"
exit $failed
