# pgrun generate: the newest valid checkpoint of a run goes on from a text, in any folder; and what cannot be done.
set -eu
. tests/journey.sh
text 40 it
mkdir recipes
echo 'return { width = 16 }' > recipes/sizes.lua
cat > recipes/own.lua <<'LUA'
-- A model of one's own, that needs a file beside the recipe.
local nn, sizes = pg.nn, require "sizes"
local Own = nn.class("Own", nn.LM)
function Own:init()
  local norm = nn.RMSNorm { width = sizes.width }
  self.vocab, self.context = 300, 16 -- more ids than there are bytes
  self.layers = self:add("", nn.Sequential {
    { "embed", nn.Embedding { entries = 300, width = sizes.width } },
    { "", nn.Head { norm = { "norm", norm }, width = sizes.width, vocab = 300 } } })
end
return {
  model = function() return Own {} end,
  data = { text = "text.txt", batch = 4 }, steps = 40, save = { every = 20 }, optim = { "adamw", rate = 1e-2 },
}
LUA
"$PGRUN" recipes/own.lua --run=own > /dev/null
"$PGRUN" generate own 'the ' --tokens=20 > one
"$PGRUN" generate own 'the ' --tokens=20 > two
cmp one two
"$PGRUN" generate own 'the ' --tokens=20 --seed=1 > two
if cmp -s one two; then echo 'another seed, the same text'; exit 1; fi
test "$(head -c 4 one)" = 'the '
"$PGRUN" generate own 'the ' --tokens=20 --temperature=0 --seed=1 > three
"$PGRUN" generate own 'the ' --tokens=20 --temperature=0 --seed=2 > four
cmp three four
test "$("$PGRUN" generate own 'a b' --tokens=0)" = 'a b'
test "$("$PGRUN" generate own --tokens=0 -- --x)" = --x
"$PGRUN" generate own '' --tokens=3 > /dev/null                                # from the start of a text
"$PGRUN" generate own "$(head -c 500 text.txt)" --tokens=300 > /dev/null       # longer than the context; no id without a text
"$PGRUN" generate own "$(printf '\377\376\303(')" --tokens=0 > bytes           # no UTF-8
test "$(od -An -tx1 bytes | tr -d ' ')" = fffec3280a
(cd /; "$PGRUN" generate "$SCRATCH/runs/own" 'the ' --tokens=20 | cmp - "$SCRATCH/one")
(cd runs/own; "$PGRUN" generate . 'the ' --tokens=20 | cmp - "$SCRATCH/one")

# a broken newest checkpoint is passed over
cp -r runs/own runs/torn
truncate -s -9 runs/torn/checkpoints/step-00000040/model.safetensors
"$PGRUN" generate torn x --tokens=2 > /dev/null 2> err
grep -q 'step-00000040 is broken and passed over' err
cp runs/own/checkpoints/step-00000040/model.safetensors runs/torn/checkpoints/step-00000040
printf 'pgrun' | dd of=runs/torn/checkpoints/step-00000040/model.safetensors bs=1 seek=10000 conv=notrunc 2> /dev/null
"$PGRUN" generate torn x --tokens=2 > /dev/null 2> err
grep -q 'step-00000040 is broken and passed over: model.safetensors has hash .*, the manifest says ' err

refuse() { # CODE MESSAGE WORDS...
    want=$1 message=$2 code=0; shift 2
    "$PGRUN" generate "$@" > out 2>&1 || code=$?
    test $code = $want || { cat out; echo "exit code $code: $*"; exit 1; }
    grep -qF -- "$message" out || { cat out; echo "expected: $message"; exit 1; }
    if grep -q 'lua/pg/' out; then cat out; exit 1; fi
}
refuse 1 'no run owm, did you mean own?; pgrun ps lists them' owm x
mkdir runs/empty
refuse 1 'runs/empty is no run (no recipe.json in it)' empty x
refuse 2 'a run and a text are wanted, 1 words given' own
refuse 2 'unknown option --tokns, did you mean --tokens?' own x --tokns=3
refuse 2 '--tokens= is not a number' own x --tokens=
refuse 1 'tokens is -1; it must be at least 0' own x --tokens=-1
refuse 1 'tokens is nan, not an integer' own x --tokens=nan
refuse 1 'top_k is 1.5, not an integer' own x --top_k=1.5
refuse 1 'temperature' own x --temperature=nan
refuse 1 'seed is "x"' own x --seed=x
broken() { # MESSAGE FILE CONTENT: a run in which that file says something else
    rm -rf runs/broken
    cp -r runs/own runs/broken
    printf '%s' "$3" > "runs/broken/$2"
    refuse 1 "$1" broken x
}
broken 'recipe.json: json: ' recipe.json '{'
broken 'does not tell of a recipe' recipe.json '[1]'
broken 'does not tell of a recipe' recipe.json 3
broken 'runs/broken/recipe.lua: recipes/own.lua:1: unexpected symbol' recipe.lua 'return ='
broken 'returns no recipe but a nil' recipe.lua 'local x'
broken 'model is missing' recipe.lua 'return {}'
rm -r runs/broken/checkpoints
refuse 1 'model is missing' broken x
cp runs/own/recipe.lua runs/broken
refuse 1 'no checkpoint under runs/broken/checkpoints can be read' broken x

# a run of token files has no text
"$PGRUN" -e 'pg.fs.write("ids.bin", ("\1\0\2\0\3\0\4\0"):rep(400))'
"$PGRUN" recipes/own.lua --run=ids --data.tokens=ids.bin > /dev/null
refuse 1 'has learnt ids whose text nobody knows' ids x
