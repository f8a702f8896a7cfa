#!/bin/bash
# sanitize.sh: the device's code under compute-sanitizer: memcheck over the twins, memory and some Lua tests;
# racecheck, initcheck and synccheck over our own kernels at small sizes.
#
#   bash tests/sanitize.sh FOLDER [SECONDS]
#
# Run where tests/device.sh runs.  Every block of numbers is an allocation of its own (PG_POOL=0), so that
# overruns are seen.  Lua runs without its compiler, whose code compute-sanitizer does not bear.  All run
# side by side, each for SECONDS (200) at most; whole outputs go to FOLDER.
set -u
out=${1:?usage: bash tests/sanitize.sh FOLDER [SECONDS]} seconds=${2:-200} bad=0
cd "$(dirname "$0")/.." || exit 1
mkdir -p "$out/scratch"
. tests/built.sh
tool=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
[ -n "$tool" ] || { echo "no compute-sanitizer on this machine"; exit 1; }
export PG_POOL=0 PGRUN=$build/pgrun SCRATCH=$out/scratch

check() { # NAME CHECK COMMAND...
    local name=$1 kind=$2 code
    shift 2
    timeout "$seconds" "$tool" --tool "$kind" --error-exitcode 9 "$@" >"$out/$kind-$name.log" 2>&1
    code=$?
    printf '%-10s %-22s %s\n' "$kind" "$name" "$([ $code -eq 124 ] && echo "stopped after $seconds s, ")exit code $code, $(
        sed -n 's/^=* \(.*SUMMARY.*\)/\1/p' "$out/$kind-$name.log" | tail -1)"
    return $code
}
jobs=()
start() { check "$@" & jobs+=($!); }

for test in test_twins test_twins_nn test_twins_update test_twins_mixed test_twins_attention; do
    start $test memcheck "$build/tests/$test"
    for kind in racecheck initcheck synccheck; do
        start $test $kind env PG_TWINS_MOST=$([ $test = test_twins_attention ] && echo 24 || echo 64) "$build/tests/$test"
    done
done
for test in test_twins_gemm test_twins_cudnn test_cuda_memory; do start $test memcheck "$build/tests/$test"; done
for test in test_grad test_ops_golden test_curves test_nn test_optim test_vocab test_graph test_segment test_half; do
    start $test memcheck env PG_DEVICE=cuda "SCRATCH=$out/scratch/$test" "$build/pgrun" --no-jit "tests/lua/$test.lua"
done
for job in "${jobs[@]}"; do wait "$job" || bad=1; done
exit $bad
