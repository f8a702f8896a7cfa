# tests/bench/layouts.lua small, on the CPU: layouts that agree pass; one that trains otherwise is found out.
set -u
top=$PWD
cat >"$SCRATCH/other.sh" <<'SH'
#!/bin/bash
for word; do [ "$word" = 2 ] && exec "$REAL" "$@" --seed=1; done # two ranks begin with other weights
exec "$REAL" "$@"
SH
chmod +x "$SCRATCH/other.sh"
head -c 200000 README.md >"$SCRATCH/text.txt"
failed=0
complain() { echo "$*"; sed 's/^/    /' "$SCRATCH/said"; failed=1; }
# layouts CODE ROW ARGUMENTS...: a line of the table that begins with ROW
layouts() {
    code=$1 row=$2; shift 2
    PGRUN=${REAL:+$SCRATCH/other.sh} "$PGRUN" "$top/tests/bench/layouts.lua" --shape=tiny --device=cpu --steps=4 \
        --text="$SCRATCH/text.txt" --out="$SCRATCH/out" "$@" >"$SCRATCH/said" 2>&1
    [ $? = "$code" ] || complain "$*: not exit code $code"
    grep -q "^$row" "$SCRATCH/said" || complain "$*: no line $row"
}
layouts 0 '| dp2 zero 3 | .* pass |' --only="zero 3"
grep -q '^| dp2 zero 3 | .* pass |' "$SCRATCH/out/layouts.md" || complain "no table in the file"
layouts 1 'pgrun: layouts: --out=.* holds results already' --only="zero 3"
rm -r "$SCRATCH/out"
layouts 0 '| pp2 zb-h1 | .* pass |' --only=zb-h1 --precision=bf16
rm -r "$SCRATCH/out"
export REAL=$PGRUN
layouts 1 '| dp2 zero 1 | .* \*\*FAIL\*\*: step 1: the loss differs by' --only="zero 1"
exit $failed
