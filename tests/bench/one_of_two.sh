#!/bin/bash
# one_of_two.sh: one rank of two on one card, with a stand-in for NCCL (nccl_stand_in.cu): how fast layouts of two
# cards would be, and what of their time is communication.  Losses mean nothing.
#
#   bash tests/bench/one_of_two.sh [FOLDER]          STEPS=4 MODEL=models/llama7b.lua ONLY=tp LIMIT=60 (seconds a run)
#
# From the source tree, or from what `make dist DIST_TESTS=1` made; needs a GPU and nvcc.  A line a row: medians of
# tokens/s a card from step 2 on, and beside one card alone.  Rows with "free" have communication that costs nothing.
set -u
out=${1:-build/one-of-two-$(date +%Y%m%d-%H%M%S)} steps=${STEPS:-4} model=${MODEL:-models/llama7b.lua} limit=${LIMIT:-60}
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.." || exit 2
. tests/built.sh
pgrun=${PGRUN:-$build/pgrun}
nvcc=$(command -v nvcc || echo "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc")
header=$(find /usr/include /usr/local /opt -xdev -name nccl.h 2>/dev/null | head -1)
"$nvcc" -O2 -arch=native -I"$(dirname "$header")" -shared -Xcompiler -fPIC -Xlinker -soname=libnccl.so.2 \
    "$here/nccl_stand_in.cu" -o "$out/libnccl.so.2" || { echo "one_of_two: nvcc and nccl.h are needed"; exit 2; }

PGRUN_SECRET=$(head -c 24 /dev/urandom | base64)
export PGRUN_SECRET PGRUN_TIMEOUT=$limit
port=29620 alone='' failed=0
echo 'pg.barrier() os.execute("sleep '"$limit"'")' >"$out/asleep.lua"
options="--device cuda --steps=$steps --log.every=1 --save.at_end=false --live.watch=false"

# rank NUMBER COMMAND...: of two that seem to be on two hosts
rank() {
    local number=$1; shift
    exec env RANK="$number" WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
        LD_LIBRARY_PATH="$out:$LD_LIBRARY_PATH" "$@"
}
# median of a run's tokens/s, a card
speed() { # NAME CARDS
    sed -n '2,$s/.*"tokens_per_s":\([0-9.e+]*\).*/\1/p' "$out/$1/metrics.jsonl" 2>/dev/null | sort -g |
        awk -v cards="$2" '{ x[NR] = $1 } END { if (NR) printf "%.0f", x[int((NR + 1) / 2)] / cards }'
}
tell() { # NAME SPEED
    if [ -z "$2" ]; then
        failed=1
        echo "$1: no steps; the end of its log:"
        tail -n 3 "$out/$1.log"
    else
        echo "$1: $2 tokens/s a card$(awk -v a="$2" -v b="$alone" 'BEGIN { if (b) printf ", %.3f of one card", a / b }')"
    fi
}
# row NAME "VARIABLES" ARGUMENTS...
row() {
    local name=$1 variables=$2 first second
    shift 2
    [[ $name == *"${ONLY:-}"* ]] || return
    port=$((port + 1))
    (rank 1 "$pgrun" --device cuda "$out/asleep.lua") >"$out/$name.asleep" 2>&1 & second=$!
    # shellcheck disable=SC2086
    (rank 0 env $variables "$pgrun" $model $options --run="$out/$name" "$@") >"$out/$name.log" 2>&1 & first=$!
    for _ in $(seq $((limit * 10))); do
        grep -q "step $steps/" "$out/$name.log" && break
        kill -0 $first 2>/dev/null || break
        sleep 0.1
    done
    kill -KILL $first $second 2>/dev/null
    wait $first $second 2>/dev/null
    tell "$name" "$(speed "$name" 2)"
}

# shellcheck disable=SC2086
timeout "$limit" "$pgrun" $model $options --run="$out/one" --data.batch=8 >"$out/one.log" 2>&1
alone=$(speed one 1)
tell one "$alone"
tp="--layout.tp=2 --data.batch=8" dp="--layout.dp=2 --data.batch=16"
# shellcheck disable=SC2086
{
    row zero-1 "" $dp --layout.zero=1
    row zero-3 "" $dp --layout.zero=3
    row zero-3-free STAND_IN_GB_S=0 $dp --layout.zero=3
    row tp "" $tp
    row tp-free STAND_IN_GB_S=0 $tp
    row tp-micro-4 "" $tp --micro=4
    row tp-one-chunk "" $tp --layout.tp_chunks=1
    row tp-one-chunk-free STAND_IN_GB_S=0 $tp --layout.tp_chunks=1
    row tp-8-blocks NCCL_MAX_CTAS=8 $tp
    row tp-32-blocks NCCL_MAX_CTAS=32 $tp
}
exit $failed
