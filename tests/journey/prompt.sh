# The prompt: lines from a pipe, Ctrl-C in a running line and on a terminal, history, completion.
set -u
. tests/journey.sh
said=$(printf '1 + 1\n= "a", {1, x = 2}\nfor i = 1, 2 do\nprint("i", i)\nend\nk = 5\nk\n' | "$PGRUN" 2>&1) ||
    complain "exit code $? from a pipe where all went well"
[ "$said" = "$(printf '2\na\t{1, x = 2}\ni\t1\ni\t2\n5')" ] || complain "from a pipe: $said"
said=$(printf 'nothing.x\nprint "still here"\n' | "$PGRUN" 2>&1) && complain "an error, but exit code 0"
printf '%s' "$said" | grep -q "prompt:1: attempt to index global 'nothing'" || complain "no line: $said"
printf '%s' "$said" | grep -q '^still here' || complain "an error ended the session: $said"
said=$(printf 'x = pg.randn{ 2, 3 }\n(x + x):softmax().shape[2]\n' | "$PGRUN") && [ "$said" = 3 ] || complain "methods: $said"
printf 'answer = 42\n' >first.lua
said=$(echo 'answer' | "$PGRUN" -i first.lua) && [ "$said" = 42 ] || complain "-i FILE: $said"
said=$(echo 'answer' | "$PGRUN" -e 'answer = 43' -i) && [ "$said" = 43 ] || complain "-e -i: $said"

# what a script calls local at its end is at hand; what was global stays; where it returns, nothing is
cat >own.lua <<'LUA'
local x, print = 1, 5
local x, double = 42, function(n) return 2 * n end
do local inner = 1 end -- a comment at its end, and no new line
LUA
truncate -s -1 own.lua
said=$(printf 'double(x)\ninner\nprint("fine")\nx = 4\nx\n' | "$PGRUN" -i own.lua) && [ "$said" = "$(printf '84\nnil\nfine\n4')" ] ||
    complain "locals: $said"
said=$(printf 'double(x)\n' | "$PGRUN" -i -n 2 own.lua) && [ "$said" = "[all] 84" ] || complain "locals on two ranks: $said"
printf 'local x = 42\nreturn\n' >returns.lua
said=$(echo 'x' | "$PGRUN" -i returns.lua) && [ "$said" = nil ] || complain "a script that returns: $said"
printf 'local x = 42\nerror "boom"' >fails.lua
said=$(echo 'x' | "$PGRUN" -i fails.lua 2>&1) && complain "a script that fails: exit code 0"
printf '%s' "$said" | grep -q '^pgrun: fails.lua:2: boom' || complain "a script that fails: $said"
printf 'local x = = 42\n' >wrong.lua
said=$(echo 'x' | "$PGRUN" -i wrong.lua 2>&1)
printf '%s' "$said" | grep -q '^pgrun: wrong.lua:1: unexpected symbol' || complain "a script that is none: $said"

# Ctrl-C stops the line and the session goes on
mkfifo lines
env --default-signal=INT "$PGRUN" <lines >said 2>&1 & prompt=$!
exec 3>lines
printf 'x = 7\nio.stdout:write "go\\n" io.stdout:flush() while true do x = 8 end\n' >&3
for _ in $(seq 100); do grep -q go said && break; sleep 0.1; done
kill -INT $prompt
for _ in $(seq 100); do grep -q interrupted said && break; sleep 0.1; done
printf 'print("after", x)\n' >&3
exec 3>&-
wait $prompt
grep -q '^after	8' said || { complain "after Ctrl-C:"; cat said; }

# on a terminal
script -qec true /dev/null >/dev/null 2>&1 || { echo "skipped: script(1) gives no terminal here"; exit $failed; }
export PGRUN_HISTORY="$SCRATCH/history" TERM=xterm
(sleep 1; printf 'y = 6 * 7\r'; sleep 0.5; printf 'half a line'; sleep 0.5; printf '\003'; sleep 0.5
 printf 'string.reve\t(y)\r'; sleep 0.5; printf '\004') |
    script -qec "exec '$PGRUN'" /dev/null >said 2>&1 || complain "on a terminal: exit code $?"
tr -d '\r' <said | grep -q '^24' || { complain "on a terminal:"; cat -v said; }
grep -q '6' history || complain "no history"
exit $failed
