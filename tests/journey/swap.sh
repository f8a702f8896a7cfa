# limit: 90
# pgrun swap and saved files: a new recipe for a run that goes on, in the same processes; one that cannot be taken
# changes nothing, and whoever offered it is told why (CASES.md C39).
set -u
. tests/journey.sh
text 200
# recipe RATE STEPS MORE FILE: with a module beside it
recipe() {
    cat >"$4" <<LUA
local rule = require "rule"
return {
  model = require "models.llama" { blocks = 1, width = 16, heads = 2, context = 16 },
  data = { text = "text.txt", batch = 4 }, steps = $2, log = { every = 1000 },
  optim = { "adamw", clip = 1, rate = function(state) return rule.rate(state) * $1 end },
  $3
}
LUA
}
# start NAME FILE: two ranks
start() {
    "$PGRUN" -n 2 "$2" --run="$1" >"out-$1" 2>&1 & job=$!
    for _ in $(seq 100); do [ -s "runs/$1/metrics.jsonl" ] && break; sleep 0.1; done
}
# refused TEXT: new.lua is not taken
refused() {
    "$PGRUN" swap live new.lua >said 2>&1
    code=$?
    [ $code = 1 ] && grep -qF -- "$1" said || { complain "exit code $code; expected: $1"; cat said; }
    for _ in $(seq 50); do grep -qF -- "$1" out-live && break; sleep 0.1; done # the answer may come first
    grep -qF -- "$1" out-live || complain "the run did not tell: $1"
}
# line TEXT: what the first rank says to it
line() { echo "@0 $1" | "$PGRUN" attach live | sed 's/^.0. //'; }
rate_at() { sed -n "s/.*\"rate\":\([^,]*\),.*\"step\":$1[,}].*/\1/p" runs/live/metrics.jsonl; }
losses() { sed 's/.*"loss":\([^,]*\),.*"step":\([0-9]*\).*/\2 \1/' "runs/$1/metrics.jsonl"; }

echo 'return { rate = function() return 1e-3 end }' >rule.lua
recipe 1 300 '' first.lua
"$PGRUN" -n 2 first.lua --run=alone >/dev/null || complain "alone: exit code $?"
recipe 1 1000000 '' long.lua
export PGRUN_TRIAL_LIMIT=5 PGRUN_TIMEOUT=4
start live long.lua
pids=$(line 'require("pg.host").pid .. " " .. require("pg.host").starter')
echo 'return { steps = = 3 }' >new.lua
refused 'new.lua:1: unexpected symbol near'
recipe 1 1000000 'lose = 1,' new.lua
refused 'new.lua:6: unknown field lose, did you mean loss?'
recipe 1 1000000 'layout = { tp = 2 },' new.lua
refused 'layout.dp was 2, is 1; it cannot change while a run goes on: pgrun stop RUN saves the run, and --resume=RUN'
recipe 1 1 '' new.lua
refused 'steps is 1, and step'
echo 'while true do end' >new.lua
refused 'new.lua:1: stopped: it ran for more than 5 million instructions'
recipe 1 1000000 'log = pg.rank() == 1 and error "not here" or nil,' new.lua
refused 'new.lua:6: not here'
recipe 1 1000000 'loss = function(model, batch) if model:loss(batch):item() > 0 and pg.rank() == 1 then error "late" end return model:loss(batch) end,' new.lua
refused 'late'
# ranks that wait for one another in vain in the first step: either may be the first to tell
recipe 1 1000000 'loss = function(model, batch) if pg.rank() == 1 then pg.barrier() end return model:loss(batch) end,' new.lua
refused ' waited '
[ "$pids" = "$(line 'require("pg.host").pid .. " " .. require("pg.host").starter')" ] || complain "other processes: $pids"
# a module that was saved; then the script; a broken one is offered once
from=$(line 'state.step')
echo 'return { rate = function() return 5e-4 end }' >rule.lua
for _ in $(seq 100); do grep -q 'long.lua from step' out-live && break; sleep 0.1; done
[ "$(line 'trainer.optim.last_rate')" = 0.0005 ] || complain "a saved module"
echo 'return {' >long.lua
for _ in $(seq 100); do grep -q "long.lua:2: unexpected symbol near '<eof>'" out-live && break; sleep 0.1; done
sleep 0.6
[ "$(grep -c "near '<eof>'" out-live)" = 1 ] || complain "a broken file was offered again"
# pgrun swap: the module is new as well; twice in a row; on_step is called once a step
echo 'return { rate = function() return 2e-4 end }' >rule.lua
recipe 3 1000000 'on_step = function(state) pg.calls = (pg.calls or 0) + 1 end,' new.lua
"$PGRUN" swap live new.lua >said 2>&1 && grep -q 'runs/live: .*new.lua from step [0-9]* on; the run stood still for' said ||
    { complain "taken:"; cat said; }
first=$(sed 's/.*from step \([0-9]*\) on.*/\1/' said)
recipe 4 1000000 'on_step = function(state) pg.calls = (pg.calls or 0) + 1 end,' new.lua
"$PGRUN" swap live new.lua >said 2>&1 || { complain "taken twice:"; cat said; }
[ "$(line "pg.calls == state.step - $first + 1 and optim.steps == state.step")" = true ] || complain "hooks and counters"
step=$(line 'state.step')
recipe 4 $((step + 200)) '' new.lua
"$PGRUN" swap live new.lua >/dev/null || complain "fewer steps"
wait $job || { complain "the run: exit code $?"; tail -5 out-live; }
[ "$(rate_at $((first - 1)))" = 0.0005 ] && [ "$(rate_at "$first")" = 0.0006 ] || complain "rates: $(rate_at $((first - 1))) $(rate_at "$first")"
[ "$(grep -c '"accepted":true' runs/live/journal.jsonl)" = 4 ] && [ "$(grep -c '"accepted":false' runs/live/journal.jsonl)" = 9 ] ||
    { complain "the journal:"; cut -c1-200 runs/live/journal.jsonl; }
# what was refused has not touched the training: to the bit
losses alone | head -"$((from < 300 ? from : 300))" >a
losses live | head -"$(wc -l <a)" >b
cmp a b || complain "a refused recipe changed the losses"
exit $failed
