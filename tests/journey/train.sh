# A first training as a person sees it: lines, files, text of the model's own; and what a mistake says.
set -eu
. tests/journey.sh
text 400
small="--model.blocks=1 --model.width=32 --data.text=text.txt --data.batch=8"

"$PGRUN" models/tiny.lua $small --steps=12 --run=first | tee out
grep -q '1 rank, 29,216 parameters' out
grep -q '1,024 tokens a step: 8 sequences x 128' out
grep -q '^step 12/12  loss ' out
grep -q 'val_loss' out
grep -q '^---- sample, step 12 ----' out
grep -q '^The ' out
test "$(wc -l < runs/first/metrics.jsonl)" = 12
ls runs/first/events.out.tfevents.* runs/first/recipe.lua runs/first/recipe.json
tail -1 runs/first/recipe.lua | grep -q -- '--steps=12'
for file in model.safetensors optimizer.safetensors manifest.json; do
    test -s runs/first/checkpoints/step-00000012/$file
done

# tokens that mean nothing are called so
mkdir -p shipped && cd shipped
"$PGRUN" models/gpt2_124m.lua --model.blocks=1 --model.width=32 --model.heads=2 --model.vocab=64 --model.context=16 \
    --data.context=16 --data.batch=2 --micro=2 --precision=fp32 --steps=1 --save.at_end=false > out
cd ..
drawn='tokens: drawn at random, for timing; --data.tokens=GLOB trains on files of pgrun tokenize, --data.text=FILE on a text'
grep -qxF -- "$drawn" shipped/out || { cat shipped/out; exit 1; }
test "$(grep -c 'drawn at random' out)" = 0

# without --run a run is named after recipe and time; two ranks do the same work
"$PGRUN" -n 2 models/tiny.lua $small --steps=12 --micro=2 | tee two
grep -q '2 ranks' two
grep -q 'a rank takes 2 micro-batches of 2' two
one=$(grep -h '"step":12,' runs/first/metrics.jsonl | sed 's/.*"loss":\([0-9.]*\).*/\1/')
both=$(grep -h '"step":12,' runs/tiny-*/metrics.jsonl | sed 's/.*"loss":\([0-9.]*\).*/\1/')
awk "BEGIN { d = $one / $both - 1; exit !(d < 1e-5 && d > -1e-5) }"

# each mistake: no training, a code, and a line that says what to do
refuse() {
    want=$1; shift
    if "$PGRUN" "$@" > out 2>&1; then echo "was not refused: $*"; exit 1; fi
    grep -qF -- "$want" out || { cat out; echo "expected: $want"; exit 1; }
}
refuse 'did you mean blocks?' models/tiny.lua --model.block=3
refuse '--steps=many: steps is "many"; it must be an integer' models/tiny.lua --steps=many
refuse 'pp 1 x dp 4 x tp 1 = 4 ranks, but 2 were started; use -n 4' -n 2 models/tiny.lua $small --layout.dp=4
refuse 'data.batch 8 does not divide over dp = 3 ranks; nearest: 6 or 9' -n 3 models/tiny.lua $small
refuse 'no such file' models/tiny.lua $small --data.text=nothing.txt
refuse 'holds a run already' models/tiny.lua $small --run=first
printf 'return {\n  model = require "models.llama" {},\n  data = { batch = 4 },\n  stepz = 3,\n}\n' > bad.lua
refuse 'bad.lua:4: unknown field stepz, did you mean steps?' bad.lua
refuse '[rank 0] bad.lua:4: ' -n 2 bad.lua
test "$(grep -c 'rank 1] ' out)" = 0 # one rank speaks for both
printf 'return {\n  model = require "models.llama" {},\n  data = { text = "text.txt", batch = 4 },\n  steps = 3 + pg.rank(),\n}\n' > uneven.lua
refuse 'uneven.lua: rank 1 has other settings than rank 0' -n 2 uneven.lua

# the choices of matrix products are looked up once the device is open, also where nobody has named one
cat > order.lua <<'LUA'
local c, choices = require "pg.c", require "pg.choices"
choices.open = function() print("opened on " .. c.ffi.string(c.C.pg_device())) end
return { model = require "models.llama" { blocks = 1, width = 16, heads = 2, context = 16 },
         data = { text = "text.txt", batch = 4 }, steps = 1 }
LUA
env -u PG_DEVICE CUDA_VISIBLE_DEVICES= "$PGRUN" order.lua --run=order > out 2>/dev/null
grep -q '^opened on cpu$' out
