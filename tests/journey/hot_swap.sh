# scripts/hot_swap.sh, the walk that `pgrun help live` shows: what is saved is taken or refused as it says there.
set -u
failed=0
PGRUN=$PGRUN bash scripts/hot_swap.sh >"$SCRATCH/said" 2>&1 || { echo "exit code $?"; failed=1; }
seen() { grep -q -- "$1" "$SCRATCH/said" || { echo "never seen: $1"; failed=1; }; }
seen '^small.lua from step [0-9]* on; the run stood still for [0-9.]* ms$'
seen '^step [0-9]*: small.lua was offered and refused: small.lua:2: model.width was 64, is 128; it cannot change'
seen "^pgrun swap: runs/first: .*other.lua:5: attempt to call method 'los' (a nil value)$"
seen '^runs/first: .*other.lua from step [0-9]* on; the run stood still for [0-9.]* ms$'
seen '^runs/first: stopped at step [0-9]* of 100000'
[ "$(grep -c '^{"accepted":true' "$SCRATCH/said") $(grep -c '^{"accepted":false' "$SCRATCH/said")" = "2 2" ] ||
    { echo "the journal has other lines"; failed=1; }
[ $failed = 0 ] || sed 's/^/    /' "$SCRATCH/said"
exit $failed
