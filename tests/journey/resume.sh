# A training that is stopped by SIGTERM saves and goes on where it was, with the same numbers.
set -eu
. tests/journey.sh
text 400
cat > slow.lua <<'LUA'
-- Waits before a step so that a signal can come between.
local waiting = os.getenv "WAIT_AT"
return {
  model = require "models.llama" { blocks = 1, width = 32, heads = 2, context = 32 },
  data = { text = "text.txt", batch = 8 }, steps = 8, save = {},
  optim = { "adamw", clip = 1, rate = pg.rate.linear { peak = 1e-3 } },
  on_step = function(state)
    if waiting and state.step == tonumber(waiting) and pg.rank() == 0 then
      os.execute "touch now; i=0; while [ -e now ] && [ $i -lt 100 ]; do sleep 0.1; i=$((i+1)); done"
    end
  end,
}
LUA
"$PGRUN" slow.lua --run=whole > /dev/null

for ranks in 1 2; do
    rm -f now
    WAIT_AT=3 "$PGRUN" -n $ranks slow.lua --run=part$ranks > out 2>&1 & pid=$!
    while ! [ -e now ]; do sleep 0.1; done
    kill -TERM $pid
    sleep 0.2
    rm now
    code=0; wait $pid || code=$?
    cat out
    test $code = 143
    grep -q "stopped, as asked, at step .*; --resume=runs/part$ranks goes on from step" out
    step=$(ls runs/part$ranks/checkpoints | sed 's/step-0*//')
    test "$step" -ge 3 && test "$step" -le 5
    echo '{"step":' >> runs/part$ranks/metrics.jsonl # a line that was never finished
    mkdir runs/part$ranks/checkpoints/.tmp-step-00000007
    "$PGRUN" -n $ranks slow.lua --run=part$ranks --resume | tee out
    grep -q "step $step, " out
    test ! -e runs/part$ranks/checkpoints/.tmp-step-00000007
    test "$(wc -l < runs/part$ranks/metrics.jsonl)" = 8
done

# Ctrl-C ends at once, and says where the training stands and how to go on
cat > busy.lua <<'LUA'
local r = assert(loadfile "slow.lua")()
r.loss = function(model, batch) -- in a step
  local loss = model:loss(batch)
  if r.at == tonumber(os.getenv "BUSY_AT") then
    io.open("now", "w"):close()
    while true do pg.zeros { 1 } end
  end
  return loss
end
r.on_step = function(state) r.at = state.step + 1 end
return r
LUA
interrupted() { # STEP ARGS...: in that step
    rm -f now
    step=$1; shift
    BUSY_AT=$step env --default-signal=INT "$PGRUN" "$@" > out 2>&1 & pid=$!
    while ! [ -e now ]; do sleep 0.1; done
    kill -INT $pid
    code=0; wait $pid || code=$?
    test $code = 130 || { cat out; exit 1; }
    test "$(grep -c interrupted out)" = 1 || { cat out; exit 1; }
}
said() { grep -qxF -- "$1" out || { cat out; echo "not said: $1"; exit 1; }; }
interrupted 5 busy.lua --run=int --save.every=2
said 'pgrun: interrupted in step 5 of 8; --resume=runs/int goes on from step 4'
interrupted 8 -n 2 busy.lua --resume=int --save.every=5
said '[rank 0] interrupted in step 8 of 8; steps 6 to 7 are lost; --resume=runs/int goes on from step 5'
interrupted 7 busy.lua --resume=int --run=other
said 'pgrun: interrupted in step 7 of 8; step 6 is lost; --resume=runs/int goes on from step 5'
interrupted 6 busy.lua --run=none
said 'pgrun: interrupted in step 6 of 8; steps 1 to 5 are lost: nothing was saved; pgrun stop saves first'
sed 's/, save = {},/,/' slow.lua > slower.lua; sed 's/slow.lua/slower.lua/' busy.lua > busier.lua
interrupted 2 busier.lua --run=without
said 'pgrun: interrupted in step 2 of 8; step 1 is lost: nothing was saved; a recipe with save = {} is saved by pgrun stop'

strip() { sed 's/"memory_peak":[0-9]*,//; s/"seconds":[^,]*,//; s/,"tokens_per_s":[^}]*//' "$1"; }
strip runs/whole/metrics.jsonl > a
strip runs/part1/metrics.jsonl > b
cmp a b # one process: to the bit

# a checkpoint that was damaged on the disk is passed over, by all ranks
"$PGRUN" -n 2 slow.lua --run=worn --save.every=1 > /dev/null
strip runs/worn/metrics.jsonl > a
file=runs/worn/checkpoints/step-00000008/optimizer.safetensors
printf 'pgrun' | dd of=$file bs=1 seek=$(($(wc -c < $file) / 2)) conv=notrunc 2> /dev/null
"$PGRUN" -n 2 slow.lua --run=worn --resume > out
grep -q 'step-00000008 is broken and passed over: optimizer.safetensors has hash .*, the manifest says ' out
grep -q 'resumed from runs/worn/checkpoints/step-00000007: step 7, ' out
strip runs/worn/metrics.jsonl > b
cmp a b
rm -r runs/worn

# without a name: the newest run of this recipe; and what cannot be done is said
"$PGRUN" slow.lua --resume --steps=9 | grep -q 'run: runs/part2'
if "$PGRUN" slow.lua --resume=whole --model.width=64 2> out; then exit 1; fi
grep -q 'resume from runs/whole: model.width was 32 in the checkpoint, is 64 now; .* --resume=RUN' out
if "$PGRUN" slow.lua --resume=whale 2> out; then exit 1; fi
grep -q 'runs/whale has no checkpoint to go on from: there is no such folder; did you mean --resume=whole?' out
