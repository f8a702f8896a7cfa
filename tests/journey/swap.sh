# limit: 60
# pgrun swap: a new recipe for a run that goes on; one that cannot be taken changes nothing (CASES.md C39).
set -u
cd "$SCRATCH"
failed=0
complain() { echo "$*"; failed=1; }
i=0
while [ $i -lt 200 ]; do echo "the quick brown fox number $i jumps over the lazy dog"; i=$((i + 1)); done >text.txt
# recipe RATE STEPS MORE FILE: with a module beside it
recipe() {
    cat >"$4" <<LUA
local rule = require "rule"
return {
  model = require "models.llama" { blocks = 1, width = 16, heads = 2, context = 16 },
  data = { text = "text.txt", batch = 4 }, steps = $2, log = { every = 100 },
  optim = { "adamw", clip = 1, rate = function(state) return rule.rate(state) * $1 end },
  $3
}
LUA
}
echo 'return { rate = function() return 1e-3 end }' >rule.lua
recipe 1 600 '' first.lua
"$PGRUN" -n 2 first.lua --run=alone >/dev/null || complain "alone: exit code $?"
recipe 1 100000 '' long.lua
"$PGRUN" -n 2 long.lua --run=live >out 2>&1 & job=$!
for _ in $(seq 100); do [ -e runs/live/process.json ] && break; sleep 0.1; done
# refused TEXT: new.lua is not taken
refused() {
    "$PGRUN" swap live new.lua >said 2>&1
    code=$?
    [ $code = 1 ] && grep -qF -- "$1" said || { complain "exit code $code; expected: $1"; cat said; }
}
echo 'return { steps = = 3 }' >new.lua
refused 'new.lua:1: unexpected symbol near'
recipe 1 100000 'lose = 1,' new.lua
refused 'unknown field lose, did you mean loss?'
recipe 1 100000 'micro = 1,' new.lua
refused 'micro was 2, is 1; it cannot change while a run goes on'
recipe 1 1 '' new.lua
refused 'steps is 1, and step'
echo 'while true do end' >new.lua
"$PGRUN" stop live >/dev/null
wait $job
PGRUN_LINE_LIMIT=0.5 "$PGRUN" -n 2 long.lua --run=second --save.every=0 >out 2>&1 & job=$!
for _ in $(seq 100); do [ -e runs/second/process.json ] && break; sleep 0.1; done
"$PGRUN" swap second new.lua >said 2>&1
[ $? = 1 ] && grep -q 'it ran for more than 0.5 s' said || { complain "an endless recipe:"; cat said; }
echo 'if pg.rank() == 1 then error "not here" end return {}' >new.lua
"$PGRUN" swap second new.lua >said 2>&1
[ $? = 1 ] && grep -q 'new.lua:1: not here' said || { complain "one rank refuses:"; cat said; }
# the module is new as well; twice in a row; on_step is called once a step
echo 'return { rate = function() return 5e-4 end }' >rule.lua
recipe 3 100000 'on_step = function(state) pg.calls = (pg.calls or 0) + 1 end,' new.lua
"$PGRUN" swap second new.lua >said 2>&1 && grep -q 'runs/second: new.lua from step [0-9]* on' said || { complain "taken:"; cat said; }
from=$(sed 's/.*from step \([0-9]*\) on/\1/' said)
recipe 4 100000 'on_step = function(state) pg.calls = (pg.calls or 0) + 1 end,' new.lua
"$PGRUN" swap second new.lua >said 2>&1 || { complain "taken twice:"; cat said; }
echo "pg.calls == state.step - $from + 1, optim.steps == state.step" | "$PGRUN" attach second >said
grep -q '^.all. true	true' said || { complain "hooks and counters:"; cat said; }
step=$(echo 'state.step' | "$PGRUN" attach second | sed 's/.all. //')
recipe 4 $((step + 200)) '' new.lua
"$PGRUN" swap second new.lua >/dev/null || complain "fewer steps"
wait $job || complain "the run: exit code $?"
rate_at() { sed -n "s/.*\"rate\":\([^,]*\),.*\"step\":$1[,}].*/\1/p" runs/second/metrics.jsonl; }
[ "$(rate_at $((from - 1)))" = 0.001 ] && [ "$(rate_at "$from")" = 0.0015 ] || complain "rates: $(rate_at $((from - 1))) $(rate_at "$from")"
[ "$(rate_at $((step + 200)))" = 0.002 ] || complain "the last rate: $(rate_at $((step + 200)))"
[ "$(grep -c '"accepted":true' runs/second/journal.jsonl)" = 3 ] && [ "$(grep -c '"accepted":false' runs/second/journal.jsonl)" = 2 ] ||
    { complain "the journal:"; cat runs/second/journal.jsonl; }
# what was refused has not touched the training: to the bit
losses() { sed 's/.*"loss":\([^,]*\),.*"step":\([0-9]*\).*/\2 \1/' "runs/$1/metrics.jsonl"; }
losses alone | head -"$((from < 600 ? from - 1 : 600))" >a
losses second | head -"$(wc -l <a)" >b
cmp a b || complain "a refused recipe changed the losses"
exit $failed
