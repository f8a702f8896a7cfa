# `make help` is where a newcomer looks: each target in one line, and none named that is not there.
set -eu
help=$(make --no-print-directory help)
echo "$help"
for target in all demo test check layers lint format bench dist install valgrind clean; do
    echo "$help" | grep -q "^  make $target " || { echo "make help does not tell of: $target"; exit 1; }
done
for target in $(echo "$help" | sed -n 's/^  make \([a-z-]*\) .*/\1/p'); do
    make -n "$target" >/dev/null || { echo "make $target is announced but does not work"; exit 1; }
done
