# pgrun ps, log and stop: which runs there are, what they print, and ending one.
set -u
. tests/journey.sh
text 200
cat >small.lua <<'LUA'
return {
  model = require "models.llama" { blocks = 1, width = 16, heads = 2, context = 16 },
  data = { text = "text.txt", batch = 4 }, steps = 5,
  optim = { "adamw", clip = 1, rate = pg.rate.linear { peak = 1e-3 } },
}
LUA
[ "$("$PGRUN" ps)" = "RUN  RECIPE  STEP  RANKS  PID  AGE  STATE" ] || complain "ps where there is nothing"
"$PGRUN" small.lua --run=done >printed 2>&1 || complain "done: exit code $?"
"$PGRUN" log 'done' >said && cmp -s said printed || { complain "log:"; diff said printed; }
"$PGRUN" -n 2 small.lua --run=going --steps=100000 --save.every=0 >out 2>&1 & job=$!
for _ in $(seq 100); do grep -q '"pid"' runs/going/process.json 2>/dev/null && break; sleep 0.1; done
"$PGRUN" log going -f >followed 2>&1 & follower=$!
"$PGRUN" small.lua --run=killed --steps=100000 >/dev/null 2>&1 & killed=$!
for _ in $(seq 100); do grep -q '"pid"' runs/killed/process.json 2>/dev/null && break; sleep 0.1; done
kill -KILL $killed
wait $killed 2>/dev/null
"$PGRUN" ps >said
grep -q "^done  *small.lua  5/5  *1  .* ended$" said || complain "ps: done"
grep -q "^going  *small.lua  [0-9]*/100000  *2  *$job  *0:[0-9]*  *running$" said || complain "ps: going"
grep -q "^killed  *small.lua  .*/100000  *1  *$killed  .* died$" said || complain "ps: killed"
[ $failed = 0 ] || cat said

# expect CODE TEXT WORDS...: that exit code and text
expect() {
    code=$1 text=$2; shift 2
    "$PGRUN" "$@" >said 2>&1
    got=$?
    [ $got = "$code" ] && grep -qF -- "$text" said || { complain "$*: exit code $got, not $code; wanted: $text"; cat said; }
}
expect 2 'pgrun stop: no run goin, did you mean going?; pgrun ps lists them' stop goin
expect 2 'did you mean done?' log dine
expect 2 'no run zzzzzzzz; pgrun ps lists them' attach zzzzzzzz
expect 1 'runs/done: it has ended, at step 5 of 5' stop 'done'
expect 1 'runs/killed: it died, at step' attach killed
expect 2 'usage: pgrun stop RUN' stop
expect 2 'unknown option --force' stop going --force
expect 2 'one run is wanted' log -f -f
mkdir runs/empty
expect 1 'runs/empty: it has not begun to train' stop empty
expect 1 'runs/empty/log.txt: No such file' log empty

began=$(date +%s)
expect 0 'runs/going: stopped at step' stop going
[ $(($(date +%s) - began)) -le 10 ] || complain "stop took more than 10 s"
kill -0 $job 2>/dev/null && complain "stop came back before the run had ended"
wait $job
code=$?
[ $code = 143 ] || complain "a stopped run ends with 143, this one with $code"
grep -q 'stopped, as asked' out && ! grep -q 'pgrun: rank' out || { complain "the launcher calls it a failure:"; cat out; }
wait $follower || complain "log -f: exit code $?"
grep -q 'stopped, as asked' followed || { complain "log -f:"; cat followed; }
"$PGRUN" ps | grep -q '^going .* ended (stopped)$' || complain "ps after stop"
exit $failed
