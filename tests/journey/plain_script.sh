# The plain script of `pgrun help scripts`, as the page prints it, on a corpus of pgrun tokenize: its loss falls,
# a second run gives the same losses, and two ranks give those of one.
# limit: 200
set -u
. tests/journey.sh

awk 'BEGIN { s = 1; split("red green blue black white grey", word, " ")
             for (i = 0; i < 40000; i++) { s = (s * 16807) % 2147483647; printf "%s ", word[int(s / 1000) % 6 + 1] } }' >corpus.txt
"$PGRUN" tokenize corpus.txt -o corpus.bin || complain "no corpus"
"$PGRUN" help scripts | awk '/^```lua$/ { inside = 1; next } /^```$/ { exit } inside' >script.lua
grep -q 'pg.data.tokens("corpus.bin"' script.lua || complain "the page has another script: $(cat script.lua)"

# The same training, but shorter and of a smaller model: 30 steps of 300.
sed -e 's/steps(300)/steps(30)/' -e 's/blocks = 4, width = 128/blocks = 1, width = 64/' \
    -e 's/context = 128/context = 64/g' -e 's/batch = 32/batch = 8/' script.lua >short.lua
cmp -s script.lua short.lua && complain "nothing was shortened"
"$PGRUN" short.lua >one.log || complain "exit code of one rank"
"$PGRUN" short.lua >again.log || complain "exit code of the second run"
"$PGRUN" -n 2 short.lua >two.log || complain "exit code of two ranks"
cmp one.log again.log || complain "two runs differ"
cat one.log
[ "$(wc -l <one.log)" = 3 ] || complain "3 lines were expected"
[ "$(wc -l <two.log)" = 3 ] || complain "two ranks gave $(cat two.log)"
paste one.log two.log | awk '
    { one = $4; two = $8; if (NR == 1) first = one; last = one
      d = one - two; if (d < 0) d = -d
      if ($1 != "step" || $3 != "loss" || d > 1e-4 * one) { print "one rank", one, "two ranks", two; bad = 1 } }
    END { if (!(last < 0.8 * first)) { print "loss from", first, "to", last; bad = 1 }; exit bad }' || failed=1

# Tensors have their operators where no op was named before.
sed -e 's/model:loss(batch) /model:loss(batch) * 2 /' -e 's/steps(30)/steps(10)/' short.lua >double.lua
cmp -s short.lua double.lua && complain "nothing was doubled"
"$PGRUN" double.lua || complain "exit code of a loss times 2"

# As it stands, but for the number of steps.
sed 's/steps(300)/steps(3)/' script.lua >whole.lua
"$PGRUN" whole.lua || complain "the script as it stands"
exit $failed
