# Graphs on a stand-in for the GPU whose recordings are real (tests/cuda/fake_graphs.cpp): the tests of pg.graph and of
# trainings with it, compiled and not, with cached blocks and without; then a run from the command line.
# limit: 300
set -eu
command -v "${CXX:-g++}" >/dev/null || { echo "skipped: no C++ compiler here"; exit 0; }
ln "$PGRUN" "$SCRATCH/pgrun" 2>/dev/null || cp "$PGRUN" "$SCRATCH/pgrun"
"${CXX:-g++}" -std=c++17 -O1 -g -Wall -Wextra -fPIC -shared tests/cuda/fake_graphs.cpp -o "$SCRATCH/libpg_cuda.so"
cp "$SCRATCH/libpg_cuda.so" "$SCRATCH/libcuda.so.1"
export LD_LIBRARY_PATH=$SCRATCH OMP_NUM_THREADS=1 PG_DEVICE=cuda
unset DEVICE

for way in "" --no-jit; do
    for pool in 1 0; do
        for test in graph graph_train; do
            PG_POOL=$pool "$SCRATCH/pgrun" $way "tests/lua/test_$test.lua" >"$SCRATCH/log" 2>&1 ||
                { echo "$test PG_POOL=$pool $way"; grep -a -A60 "^Tests with\|^Failed\|^fake_graphs" "$SCRATCH/log" ||
                  tail -n 40 "$SCRATCH/log"; exit 1; }
            grep -aq " 0 failed, 0 skipped" "$SCRATCH/log"
        done
    done
done

cp "$(dirname "$PGRUN")/tests/test_cuda_memory" "$SCRATCH"
"$SCRATCH/test_cuda_memory" >"$SCRATCH/log" 2>&1 || { tail -n 40 "$SCRATCH/log"; exit 1; }
! grep -q SKIPPED "$SCRATCH/log" || exit 1

# The same losses with and without, from the command line, and through a resume.
. tests/journey.sh
text 200
cat >small.lua <<'LUA'
return {
  model = require "models.gpt2" { blocks = 1, width = 32, heads = 2, vocab = 259, context = 32, dropout = 0.1 },
  data = { text = "text.txt", batch = 8, held_out = 0.1 }, micro = 4, steps = 8, eval = { every = 4 }, save = {},
  optim = { "adamw", clip = 1, rate = pg.rate.linear { peak = 1e-3 } },
}
LUA
train() { "$SCRATCH/pgrun" small.lua "$@" >log 2>&1 || { tail log; exit 1; }; }
numbers() { sed 's/.*"loss":\([^,}]*\).*/\1/' "runs/$1/metrics.jsonl"; }
train --run=without
train --graphs=true --run=with
! grep "without a recording" log || exit 1
[ "$(numbers with | wc -l)" -eq 8 ]
[ "$(numbers with)" = "$(numbers without)" ] || { numbers with; numbers without; exit 1; }
train --run=without --resume --steps=14 --graphs=true
train --run=with --resume --steps=14
[ "$(numbers with | wc -l)" -eq 14 ]
[ "$(numbers with)" = "$(numbers without)" ] || { numbers with; numbers without; exit 1; }

# Where it cannot be, the reason comes before anything is trained.
if PG_NAN=1 "$SCRATCH/pgrun" small.lua --graphs=true --run=nan >log 2>&1; then exit 1; fi
grep -q -- "--graphs=true: .*PG_NAN=1 looks at every one" log || { tail log; exit 1; }
