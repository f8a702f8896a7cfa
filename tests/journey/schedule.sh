# pgrun schedule: a picture of a schedule, of one's own too, and what is said of mistakes.
set -u
. tests/journey.sh
verb=schedule
cat >mine.lua <<'LUA'
#!/usr/bin/env pgrun
return function(o)
  local list = {}
  for k = 1, o.micro do list[2 * k - 1], list[2 * k] = { "forward", k }, { "backward", k } end
  return { list }
end
LUA
printf 'return 7\n' >seven.lua
printf 'return function(o)\n  return { o.nothing.here }\nend\n' >boom.lua
printf 'return function(\n' >broken.lua

expect 0 "stage 3          F1 B1--- F2 B2---" 1f1b --stages=4 --micro=8
expect 0 "micro-batches alive at most, by stage: 4 3 2 1" 1f1b --stages=4 --micro=8
expect 0 "bubble 15.8 %" interleaved --stages=4 --micro=8 --chunks=2
expect 0 "time 27, bubble 11.1 %" --micro=8 zb-h1 --stages=4
expect 0 "time 10.5," gpipe --stages=2 --micro=2 --forward=1,2 --backward=1 --weight=0.5 --send=0.5
expect 0 "mine.lua: 1 stage, 3 micro-batches" mine.lua --stages=1 --micro=3
expect 0 "usage: pgrun schedule NAME" --help
"$PGRUN" schedule zb-h1 --stages=2 --micro=2 --svg=z.svg >/dev/null
grep -q '<title>weight 2, ' z.svg || complain "z.svg has no weight step"

cat >measured.json <<'JSON'
{"schedule":"1f1b","stages":2,"micro":1,"chunks":1,"step":9,"device":"cpu","clock":0,"steps":[
 [["forward",1,0,0,1],["backward",1,0,4,6]], [["forward",1,1,1.5,2.5],["backward",1,1,2.5,3.5]]]}
JSON
expect 0 "1f1b: 2 stages, 1 micro-batch, step 9 on cpu" --measured=measured.json
expect 0 "stage 0 F1          B1---" --measured=measured.json
expect 0 "apart      8.3 points (by stage: +10.0 +6.7)" --measured=measured.json
expect 0 "apart      0.0 points (by stage: +0.0 +0.0)" --measured=measured.json --send=0.5
expect 0 "simulated" --measured=measured.json,measured.json --svg=m.svg
[ "$(grep -c 'measured: idle 58.3 %' m.svg)" = 2 ] || complain "m.svg has not both files: $(grep idle m.svg)"
grep -q '>2 stages on cpu<' m.svg || complain "the title of m.svg: $(grep -o '>[0-9] stage[^<]*' m.svg)"
sed 's/"stages":2/"stages":1/; s/"cpu"/"x y"/; s/, \[\["forward",1,1.*/]}/' measured.json >one.json
expect 0 "1 stage, 1 micro-batch, step 9 on x y" --measured=measured.json,one.json --svg=m.svg
grep -q '>2 stages on cpu, 1 stage on x y<' m.svg || complain "the title of m.svg: $(grep -o '>[0-9] stage[^<]*' m.svg)"
"$PGRUN" help pipelines.svg | grep -q '>1f1b, measured: idle ' || complain "the help page has no picture"
expect 1 "z.svg" --measured=z.svg
expect 1 "none.json: No such file" --measured=none.json
expect 2 "1f1b is one too many" 1f1b --measured=measured.json
expect 2 "--stages is one too many" --measured=measured.json --stages=2
expect 2 "--measured= names no file" --measured=

expect 1 'schedule "1f1c" is unknown, did you mean "1f1b"?' 1f1c --stages=2 --micro=2
expect 1 "has one chunk a stage, 2 are asked for" 1f1b --stages=2 --micro=2 --chunks=2
expect 1 "the limit is 4" gpipe --stages=2 --micro=8 --limit=4
expect 1 "schedule at mine.lua:2 gives 1 lists" mine.lua --stages=2 --micro=2
expect 1 "none.lua: No such file" none.lua --stages=2 --micro=2
expect 1 "seven.lua returns a number; a schedule is a function" seven.lua --stages=2 --micro=2
expect 1 "boom.lua:2: attempt to index field 'nothing'" boom.lua --stages=2 --micro=2
expect 1 "broken.lua:2:" broken.lua --stages=2 --micro=2
expect 1 "has 3 numbers; one is wanted, or 2 (a stage each)" gpipe --stages=2 --micro=2 --forward=1,2,3
expect 1 "nowhere/" gpipe --stages=2 --micro=2 --svg=nowhere/x.svg
expect 2 "one schedule is wanted, 0 words given" --stages=2 --micro=2
expect 2 "one schedule is wanted, 2 words given" gpipe 1f1b --stages=2 --micro=2
expect 2 "--micro=N is missing" gpipe --stages=2
expect 2 "did you mean --chunks?" gpipe --stages=2 --micro=2 --chunk=2
expect 2 "--stages=x: a whole number from 1 on" gpipe --stages=x --micro=2
expect 2 "--stages=0: a whole number from 1 on" gpipe --stages=0 --micro=2
expect 2 "--forward=-1: seconds are wanted" gpipe --stages=2 --micro=2 --forward=-1
expect 2 "--forward=1,,2: seconds are wanted" gpipe --stages=2 --micro=2 --forward=1,,2
expect 2 "--send is one number" gpipe --stages=2 --micro=2 --send=1,2
expect 2 "with these times no step takes any" gpipe --stages=2 --micro=2 --forward=0 --backward=0 --weight=0
expect 2 "options are written --stages=4" gpipe --stages 2 --micro=2
exit $failed
