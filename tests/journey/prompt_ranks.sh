# limit: 120
# The prompt on several ranks: who runs a line and who said what, Ctrl-C, and a training on four ranks that 200 lines
# with errors, endless loops and half collectives in them neither end nor change.
set -u
. tests/journey.sh

# ---- pgrun -i -n 4 ----
printf 'w = pg.full({ 3 }, pg.rank() + 1)\n' >first.lua
cat >lines <<'LUA'
1 + 1
pg.rank()
@0,3 pg.rank() * 2
@1-2 print("mine")
x = pg.rank()
@dp=2 x
@3 error "boom"
@0 pg.barrier()
if pg.rank() == 1 then pg.barrier() end
pg.mesh.world:all_reduce(w) return w:totable()[1]
for i = 1, 2 do
io.write(i, "\n")
end
@9 x
@cp=1 x
LUA
cat >wanted <<'TEXT'
[all] 2
[0] 0
[1] 1
[2] 2
[3] 3
[0] 0
[3] 6
[1-2] mine
[2] 2
[3] error: prompt:1: boom
[0] error: prompt:1: barrier (world): cancelled by rank 1: rank 1 does not run this line (@0)
[1] error: prompt:1: barrier (world): rank 1 waited 0.6 s for rank 0, time limit 0.5 s
[all] 10
[all] 1
[all] 2
error: @9: there are ranks 0 to 3
error: @cp=1: places are written tp=1,pp=0; the axes are pp, dp and tp
TEXT
PGRUN_LINE_TIMEOUT=0.5 "$PGRUN" -i -n 4 first.lua <lines >said 2>&1
code=$?
[ $code = 1 ] || complain "lines failed, exit code $code"
sed -i 's/waited 0\.[0-9]* s/waited 0.6 s/; s/ (PGRUN_TIMEOUT).*//; s/cancelled by rank [123]: rank [123] does/cancelled by rank 1: rank 1 does/' said
cmp -s said wanted || { complain "not what was wanted:"; diff said wanted; }
said=$(echo 'pg.ranks()' | "$PGRUN" -n 2 2>&1) && [ "$said" = "[all] 2" ] || complain "no script: $said"

# Ctrl-C stops a line that only one rank runs, and nothing else
mkfifo fifo
env --default-signal=INT "$PGRUN" -i -n 2 first.lua <fifo >said 2>&1 & job=$!
exec 3>fifo
printf '@1 io.stderr:write "go\\n" while true do end\n' >&3
for _ in $(seq 100); do grep -q go said && break; sleep 0.1; done
kill -INT $job
for _ in $(seq 100); do grep -q 'stopped, as asked' said && break; sleep 0.1; done
printf 'w:totable()[1]\n' >&3
exec 3>&-
wait $job
code=$?
grep -q '^\[1\] error: stopped, as asked' said && grep -q '^\[1\] 2' said && [ $code = 1 ] ||
    { complain "Ctrl-C, exit code $code:"; cat said; }

# on a terminal: the first rank reads there, Ctrl-C stops the line on all, Ctrl-D ends
if script -qec true /dev/null >/dev/null 2>&1; then
    export PGRUN_HISTORY="$SCRATCH/history" TERM=xterm
    (sleep 1; printf 'y = 6 * pg.ranks()\r'; sleep 0.3; printf 'while true do end\r'; sleep 0.7; printf '\003'; sleep 0.7
     printf 'half a line'; sleep 0.3; printf '\003'; sleep 0.3; printf '@1 y\r'; sleep 0.5; printf '\004') |
        script -qec "exec '$PGRUN' -i -n 2 first.lua" /dev/null >said 2>&1 || { complain "on a terminal: exit code $?"; cat -v said; }
    tr -d '\r' <said | grep -q '.all. error: stopped, as asked' && tr -d '\r' <said | grep -q '^.1. 12' ||
        { complain "on a terminal:"; cat -v said; }
fi

# what stands still in C ends the rank and with it the job, and the launcher says why
echo '@1 os.execute "sleep 30"' | PGRUN_LINE_LIMIT=0.5 timeout 25 "$PGRUN" -i -n 2 first.lua >said 2>&1 &&
    complain "a hung C call, but exit code 0"
grep -q 'pgrun: rank 1 failed before the first step: a line of the prompt stood still in C' said ||
    { complain "a hung C call:"; cat said; }

# ---- 200 lines against a training ----
text 200
cat >train.lua <<'LUA'
return {
  model = require "models.llama" { blocks = 1, width = 16, heads = 2, context = 16 },
  data = { text = "text.txt", batch = 4 }, steps = 900, log = { every = 300 },
  optim = { "adamw", clip = 1, rate = pg.rate.linear { peak = 1e-3 } },
  on_step = function() pg.rest = math.random() end,
}
LUA
"$PGRUN" -n 4 train.lua --run=alone >/dev/null || complain "the undisturbed run: exit code $?"
cat >some <<'LUA'
1 + pg.rank()
error "one"
@0 pg.barrier()
if pg.rank() == 2 then error "two" end pg.barrier()
x = pg.randn { 4, 4 } return x:sum()
math.random(), math.randomseed(7)
@1,2 pg.mesh.world:all_reduce(pg.zeros { 4 })
pg.mesh.world:all_reduce(pg.zeros { 1 + pg.rank() })
pg.no_grad(function() error "three" end)
pg.scope(function() pg.scope(function() error "four" end) end)
@3 w = pg.mesh.dp:all_reduce(pg.zeros { 4 }, "sum", true)
pg.mesh.dp:all_reduce(x)
pg.mesh.build { dp = 4 }
for _, p in ipairs(model:parameters()) do p.grad:fill(3) end
(model:parameters()[1] * 2):sum():backward()
@2 model = nil
@0 state.step = state.step
@dp=1 x = nil
undefined.x
syntax error here
if pg.rank() == 3 then w = pg.mesh.dp:all_reduce(pg.zeros { 4 }, "sum", true) end
@0 os.exit(3)
while pg.rank() == 1 do end
if pg.rank() == 3 then pg.mesh.world:all_reduce(pg.zeros { 2 }) end
state.step, optim.steps
LUA
: >many
for _ in 1 2 3 4 5 6 7 8; do cat some >>many; done
[ "$(wc -l <many)" = 200 ] || complain "there are $(wc -l <many) lines"
PGRUN_LINE_TIMEOUT=0.3 PGRUN_LINE_LIMIT=0.3 "$PGRUN" -n 4 train.lua --run=watched >out 2>&1 & job=$!
for _ in $(seq 100); do [ -e runs/watched/control ] && break; sleep 0.1; done
timeout 100 "$PGRUN" attach watched <many >said 2>&1
code=$?
[ $code = 1 ] || complain "attach: exit code $code"
[ "$(grep -c 'error: prompt:1: one' said)" = 8 ] && [ "$(grep -c '^\[1\] error: stopped: it ran' said)" = 8 ] ||
    { complain "the lines said:"; tail -40 said; }
grep -q 'attach: ' said && { complain "the run did not wait for the lines:"; tail -3 said; }
wait $job
code=$?
[ $code = 0 ] || { complain "the watched run: exit code $code"; tail -5 out; }
losses() { sed 's/.*"loss":\([^,]*\),.*"step":\([0-9]*\).*/\2 \1/' "runs/$1/metrics.jsonl"; }
losses alone >a
losses watched >b
[ "$(wc -l <b)" = 900 ] && cmp a b || complain "the lines changed the training"
exit $failed
