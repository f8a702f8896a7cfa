#!/bin/bash
# hot_swap.sh: the walk of `pgrun help live` through a recipe that changes while it trains; prints what is seen.
#   PGRUN=build/pgrun bash scripts/hot_swap.sh
set -eu
pgrun=$(realpath "${PGRUN:-build/pgrun}")
text=$(realpath "$(dirname "$0")/../README.md") # any text will do
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cp "$text" text.txt

say() { printf '\n$ %s\n' "$*"; }
cat >small.lua <<'LUA'
return {
  model = require "models.llama" { blocks = 2, width = 64, heads = 4, context = 64 },
  data  = { text = "text.txt", batch = 16 },
  optim = { "adamw", clip = 1.0, rate = function(state) return 1e-3 end },
  steps = 100000, log = { every = 100 },
}
LUA
say cat small.lua
cat small.lua
say 'pgrun -n 2 small.lua --run=first &'
"$pgrun" -n 2 small.lua --run=first >lines 2>&1 & job=$!
wait_for() { for _ in $(seq 200); do grep -q "$1" lines && return; sleep 0.1; done; echo "never seen: $1"; exit 1; }
wait_for 'step 100/'
say "sed -i 's/1e-3/3e-4/' small.lua            # your editor"
sed -i 's/1e-3/3e-4/' small.lua
wait_for 'from step'
say "sed -i 's/width = 64/width = 128/' small.lua"
sed -i 's/width = 64/width = 128/' small.lua
wait_for 'model.width'
sed 's/width = 128/width = 64/; s/log = /loss = function(model, batch) return model:los(batch) end, log = /' small.lua >other.lua
say "grep loss other.lua; pgrun swap first other.lua; echo \$?"
grep loss other.lua
"$pgrun" swap first other.lua 2>&1 && code=0 || code=$?
echo $code
sed -i 's/model:los(batch)/pg.scale(model:loss(batch), 0.5)/' other.lua
say "grep loss other.lua; pgrun swap first other.lua; echo \$?"
grep loss other.lua
"$pgrun" swap first other.lua && code=0 || code=$?
echo $code
say 'pgrun stop first'
"$pgrun" stop first
wait $job || true
say 'pgrun log first'
grep -v '^pgrun: cuda' lines
say 'cut -c1-90 runs/first/journal.jsonl'
cut -c1-90 runs/first/journal.jsonl
