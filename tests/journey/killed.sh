# A training that is killed at any moment, also in the middle of a save, goes on to the same numbers: one and two
# ranks, across the end of an epoch, with accumulation, dropout and momentum.
# limit: 240
set -eu
. tests/journey.sh
text 13 it
cat > train.lua <<'LUA'
local kind, at, signal = os.getenv "KIND", tonumber(os.getenv "AT"), os.getenv "SIGNAL"
local shape = { blocks = 1, width = 16, heads = 2, vocab = 259, context = 16 }
if kind == "dropout" then shape.dropout = 0.1 end
return {
  model = require(kind == "dropout" and "models.gpt2" or "models.llama")(shape),
  data = { text = "text.txt", batch = 8, held_out = 0.1 }, micro = kind == "plain" and 4 or 1, eval = { every = 4 },
  optim = kind == "momentum" and { "sgd", momentum = 0.9, nesterov = true, rate = 1e-2, clip = 1 }
    or { "adamw", clip = 1, rate = pg.rate.cosine { peak = 1e-3, warmup = 3 } },
  steps = 10, save = { every = 3 }, -- an epoch is 4.x steps
  on_step = function(state) -- $PPID is this very process
    if state.step == at and pg.rank() == 0 then os.execute("kill -" .. signal .. " $PPID") end
  end,
}
LUA
plain() { sed 's/"memory_peak":[0-9]*,//; s/"seconds":[^,]*,//; s/,"tokens_per_s":[^,}]*//' "$1"; }
same() { # RUN KIND RANKS: has every step once, and the numbers of the run that nobody stopped
    plain "runs/$1/metrics.jsonl" > a
    plain "runs/whole-$2-$3/metrics.jsonl" > b
    cmp a b || { diff a b; echo "$1 differs"; exit 1; }
}

for ranks in 1 2; do
    for kind in plain dropout momentum; do
        KIND=$kind "$PGRUN" -n $ranks train.lua --run=whole-$kind-$ranks > /dev/null
    done
done
stop() { # KIND RANKS SIGNAL STEP EVERY [STEP]: stopped there, and again at the second step
    run=$1-$2-$3-$4-$5
    for step in "$4" ${6-}; do
        code=0
        KIND=$1 AT=$step SIGNAL=$3 "$PGRUN" -n $2 train.lua --run=$run --save.every=$5 ${resume-} > out 2>&1 || code=$?
        test $code != 0 || { cat out; echo "$run was not stopped at step $step"; exit 1; }
        # a rank that ends because it was asked to is no failure, which others in the last collective would die of
        test $3 != TERM || ! grep '^pgrun: ' out || { cat out; exit 1; }
        resume=--resume
    done
    unset resume
    KIND=$1 "$PGRUN" -n $2 train.lua --run=$run --save.every=$5 --resume > out 2>&1 || { cat out; exit 1; }
    same $run $1 $2
}
stop plain 1 KILL 4 1
stop plain 1 KILL 5 3
stop plain 1 TERM 2 3
stop plain 2 KILL 9 3
stop dropout 1 KILL 7 3 9
stop dropout 2 TERM 4 3 6 # a step that is told to be the last is not evaluated, so not 7
stop dropout 2 KILL 6 1
stop momentum 1 TERM 1 1
stop momentum 1 KILL 5 3
stop momentum 2 KILL 8 3
# killed after the last record and before the checkpoint
stop plain 1 KILL 10 3

# killed at any moment of a save, again and again: what is there is whole, and in the end nothing is missing
KIND=plain AT=2 SIGNAL=KILL "$PGRUN" train.lua --run=loop --save.every=1 > /dev/null 2>&1 || true
for delay in 04 05 06 07 08 09 10 11 12 13 14 15 16 18 20; do
    KIND=plain "$PGRUN" train.lua --run=loop --resume --save.every=1 > out 2>&1 & pid=$!
    sleep 0.$delay
    kill -KILL $pid 2> /dev/null || true
    wait $pid 2> /dev/null || true
    if grep 'broken' out; then echo 'a save left a broken checkpoint'; exit 1; fi
done
KIND=plain "$PGRUN" train.lua --run=loop --resume --save.every=1 > out 2>&1 || { cat out; exit 1; }
same loop plain 1
