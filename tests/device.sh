#!/bin/bash
# device.sh: on a machine with a GPU: the kernels against their twins, memory, and the Lua tests, ranks
# and layouts on the device.
#
#   bash tests/device.sh FOLDER [SECONDS] [PATTERN]
#
# From the source tree after `make built`, or from what `make dist DIST_TESTS=1` made.  Whole outputs go
# to FOLDER; what is printed is short.  It goes on after failures, and ends within SECONDS (540): what
# there was no time for is named.  PATTERN: only Lua tests, ranks and layouts whose name holds it.
set -u
out=${1:?usage: bash tests/device.sh FOLDER [SECONDS] [PATTERN]} seconds=${2:-540} pattern=${3-}
start=$SECONDS bad=0
cd "$(dirname "$0")/.." || exit 1
mkdir -p "$out"
. tests/built.sh
left() { echo $((seconds - 10 - SECONDS + start)); }

echo "== versions"
"$build/pgrun" --version 2>&1 | tee "$out/version.log"
nvidia-smi --query-gpu=index,name,memory.free --format=csv,noheader 2>/dev/null

grep -q '^GPU 0' "$out/version.log" || { echo "no GPU answers: all will skip"; bad=1; }

# tests/c: cmocka programs; a failing one shows its first complaints.
echo "== twins"
: >"$out/twins.log"
for test in "$build"/tests/test_twins* "$build"/tests/test_cuda_memory "$build"/tests/test_nccl; do
    case $test in *.d | *'*') continue ;; esac
    name=$(basename "$test") left=$(left)
    [ "$left" -gt 5 ] || { echo "$name: no time left"; bad=1; continue; }
    began=$SECONDS
    timeout "$((left < 120 ? left : 120))" "$test" >"$out/one" 2>&1
    code=$?
    { echo "== $name, exit code $code"; cat "$out/one"; } >>"$out/twins.log"
    count() { sed -n "s/^\[ *$1 *\] \([0-9]*\) test(s).*/\1/p" "$out/one" | head -1; }
    passed=$(count PASSED) failed=$(count FAILED) skipped=$(count SKIPPED)
    printf '%-24s %3d passed %3d failed %3d skipped  %3d s%s\n' "$name" "${passed:-0}" "${failed:-0}" \
        "${skipped:-0}" $((SECONDS - began)) "$([ -n "$passed" ] || echo "  ended early, exit code $code")"
    if [ "$code" -ne 0 ]; then
        bad=1
        grep -vE '^\[ +(RUN|OK|SKIPPED) |^\[=+|^ *$' "$out/one" | cut -c1-220 | head -14 | sed 's/^/    /'
    fi
done
rm -f "$out/one"

# The runner's own output, with a few lines of each failure.
for part in lua ranks layouts; do
    left=$(left)
    [ "$left" -gt 10 ] || { echo "== $part: no time left"; bad=1; continue; }
    echo "== $part on the device"
    BUILD=$build DEVICE=cuda timeout "$left" "$build/pgrun" tests/run.lua "tests/$part/.*$pattern" >"$out/$part.log" 2>&1
    code=$?
    [ "$code" -eq 0 ] || bad=1
    awk '/^(FAIL|ok|skip|none) /{ shown = /^FAIL/ ? 7 : 0 } shown-- > 0 { print substr($0, 1, 200) }' "$out/$part.log" |
        head -60
    grep -hE 'skipped: ' "$out/$part.log" | sort | uniq -c | head -3
    if [ "$code" -eq 124 ]; then echo "stopped after $left s"; fi
    tail -1 "$out/$part.log"
done
echo "== $((SECONDS - start)) s; details in $out; $([ $bad -eq 0 ] && echo 'all passed' || echo 'not all passed')"
exit $bad
