# limit: 120
# A training over stages, ranks of tp and dp as a person meets it: the plan, the same numbers, text; a stop that
# saves and goes on in another layout; mistakes refused at once, before anything is built.
set -u
cd "$SCRATCH"
failed=0
i=0
while [ $i -lt 400 ]; do echo "the quick brown fox number $i jumps over the lazy dog"; i=$((i + 1)); done >text.txt
small="--model.width=32 --data.text=text.txt --data.batch=8 --micro=2"

says() {
    printf '%s\n' "$1" | tr '|' '\n' | while read -r text; do
        grep -qF -- "$text" said || { echo "$2: expected: $text"; sed 's/^/    /' said; exit 1; }
    done || failed=1
}
# ends CODE 'text|text...' WORDS: pgrun WORDS ends with CODE and says each text
ends() {
    code=$1 texts=$2; shift 2
    timeout 60 "$PGRUN" "$@" >said 2>&1
    got=$?
    [ $got = "$code" ] || { echo "$*: exit code $got, not $code"; sed 's/^/    /' said; failed=1; }
    says "$texts" "$*"
}
last() { grep -h '"step":12,' "runs/$1/metrics.jsonl" | sed "s/.*\"$2\":\([0-9.]*\).*/\1/"; }

# ---- the same training, the same text ----
ends 0 'done at step 12 of 12' models/tiny.lua $small --steps=12 --run=one
sed -n '/^---- sample/,/^----$/p' said >text.one
ends 0 'layout: pp 2 x dp 2 x tp 2, zero 3 (dp shares out weights, gradients and moments), rows between blocks cut over tp, schedule 1f1b|stage 0, ranks 0-3: embedding, blocks 0-1|stage 1, ranks 4-7: blocks 2-3, head|a rank holds at most: weights |a step sends over dp, a rank at most: |done at step 12 of 12' \
    -n 8 models/tiny.lua $small --steps=12 --run=eight --layout.pp=2 --layout.tp=2 --layout.zero=3
sed -n '/^---- sample/,/^----$/p' said | cmp - text.one || { echo "the text differs"; failed=1; }
for key in loss val_loss; do
    awk "BEGIN { d = $(last one $key) / $(last eight $key) - 1; exit !(d < 1e-5 && d > -1e-5) }" ||
        { echo "$key differs: $(last one $key), $(last eight $key)"; failed=1; }
done

# ---- stopped, saved, gone on with in another layout ----
: >said # what the last run said has a step 3 as well
"$PGRUN" -n 4 models/tiny.lua $small --steps=100000 --run=stopped --layout.pp=2 --layout.tp=2 --log.every=1 >said 2>&1 &
pid=$!
n=0
until grep -q '^step 3/' said || [ $n -ge 200 ]; do n=$((n + 1)); sleep 0.1; done
kill -TERM $pid
wait $pid
got=$?
[ $got = 143 ] || { echo "asked to stop: exit code $got, not 143"; failed=1; }
says 'saved runs/stopped/checkpoints/step-|stopped, as asked, at step' 'asked to stop'
step=$(sed -n 's/^stopped, as asked, at step \([0-9]*\) .*/\1/p' said)
ends 0 "resumed from runs/stopped/checkpoints/step-|done at step $((step + 2)) of $((step + 2))" -n 2 models/tiny.lua \
    $small --steps=$((step + 2)) --run=stopped --resume --layout.dp=2 --layout.zero=1

# ---- mistakes ----
ends 1 'layout: pp 2 x dp 2 x tp 2 = 8 ranks, but 4 were started; use -n 8' -n 4 models/tiny.lua $small \
    --layout.pp=2 --layout.dp=2 --layout.tp=2
ends 1 'layout: pp 3 x tp 1 = 3, which does not divide the ranks: 4 were started; use -n 6, or a layout of 4 ranks, such as pp 4 x dp 1 x tp 1' \
    -n 4 models/tiny.lua $small --layout.pp=3
ends 1 '--layout.pp=4: layout.pp = 4: 4 stages, each takes at least one block, and the model has 2; nearest that fit: layout.pp = 2, or a model of 4 blocks' \
    -n 4 models/tiny.lua $small --model.blocks=2 --layout.pp=4
ends 1 'layout.tp = 3: |would fit' -n 3 models/tiny.lua $small --layout.tp=3
ends 1 '--layout.blocks=1,2: layout.blocks: { 1, 2 } makes 3 items, there are 4; take 1 more' -n 2 models/tiny.lua $small \
    --layout.pp=2 --layout.blocks=1,2
ends 1 'layout.schedule: schedule 1f1b has one chunk a stage, 2 are asked for' -n 2 models/tiny.lua $small \
    --layout.pp=2 --layout.chunks=2
ends 1 'data.batch 9 does not divide over dp = 2 ranks; nearest: 8 or 10' -n 4 models/tiny.lua $small --data.batch=9 \
    --layout.tp=2
cat >twice.lua <<'LUA'
return {
  model = require "models.llama" { blocks = 2, width = 32, heads = 2, vocab = 259, context = 32 },
  data = { text = "text.txt", batch = 4 }, layout = { pp = 2 }, steps = 1,
  loss = function(model, batch)
    model(batch.tokens)
    return pg.cross_entropy(model(batch.tokens), batch.targets, { step = batch.step })
  end,
}
LUA
ends 1 'twice.lua:6: loss: with layout.pp > 1 a loss calls the model once, on batch.tokens' -n 2 twice.lua
cat >early.lua <<'LUA'
local data = pg.data.text("text.txt", { context = 32, batch = 4 })
local run = pg.parallel(require("models.llama") { blocks = 2 }, { pp = 2 })
LUA
ends 1 'early.lua:2: parallel: the ranks are laid out already, as pp 1 x dp 2 x tp 1; call pg.parallel before pg.data' \
    -n 2 early.lua
exit $failed
