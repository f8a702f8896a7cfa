# tests/bench/one_of_two.sh without a GPU: its stand-in for NCCL compiles, rows are told beside one card, one that
# makes no steps is found out.
set -u
if ! command -v nvcc >/dev/null && [ ! -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ]; then
    echo "skipped: no nvcc here"
    exit 0
fi
cat >"$SCRATCH/pgrun" <<'SH'
#!/bin/bash
for word; do
    case $word in
    *asleep.lua) exec sleep 30 ;;
    --run=*) run=${word#--run=} ;;
    esac
done
[ "$(basename "$run")" = tp-free ] && { echo "no such thing"; exit 1; }
[ -z "${RANK:-}" ] || grep -aq ncclReduceScatter "${LD_LIBRARY_PATH%%:*}/libnccl.so.2" || exit 1
mkdir -p "$run"
for speed in 1 300 100 200; do echo "{\"step\":1,\"tokens_per_s\":$speed,\"seconds\":1}"; done >"$run/metrics.jsonl"
echo "step 4/4"
SH
chmod +x "$SCRATCH/pgrun"
PGRUN=$SCRATCH/pgrun ONLY=tp- LIMIT=5 bash tests/bench/one_of_two.sh "$SCRATCH/out" >"$SCRATCH/said" 2>&1
code=$?
failed=0
expect() { grep -qxF -- "$1" "$SCRATCH/said" || { echo "no line: $1"; failed=1; }; }
expect "one: 200 tokens/s a card, 1.000 of one card"
expect "tp-micro-4: 100 tokens/s a card, 0.500 of one card"
expect "tp-free: no steps; the end of its log:"
expect "no such thing"
[ $code = 1 ] || { echo "exit code $code, not 1"; failed=1; }
[ $failed = 0 ] || sed 's/^/    /' "$SCRATCH/said"
exit $failed
