# Mistakes on the command line and in a script: the exit code, and a message a person can act on.
set -u
. tests/journey.sh
printf 'local x = 1\nlocal y = = 2\n' >broken.lua
printf 'local function f()\n  error "boom"\nend\nf()\n' >boom.lua
printf 'return 7\n' >seven.lua
printf 'return { model = 1 }\n' >recipe.lua
printf 'print(#arg, arg[1], ...)\n' >plain.lua
mkdir -p models
printf 'return { name = "here" }\n' >models/own.lua
printf 'print(require("models.own").name)\n' >models/uses.lua
expect 2 "did you mean --device" --devise cpu plain.lua
expect 1 "pgrun: --device cpu: an option of pgrun stands before the file: pgrun --device cpu recipe.lua" recipe.lua --device cpu
expect 1 "pgrun: --steps 1: a field and its value are one word: --steps=1" recipe.lua --steps 1
expect 2 "-n 0: give a number of ranks" -n 0 plain.lua
expect 2 "-n x: give a number of ranks" -n x plain.lua
expect 2 "-n -3: give a number of ranks" -n -3 plain.lua
expect 2 "the prompt runs on the ranks of one host" --device cuda --nnodes 2 --master h:1 -n 2 -i plain.lua
expect 2 "no such file" nothere.lua
expect 2 "no such file" -n 2 nothere.lua
expect 2 "share memory" --device cpu --nnodes 2 --master localhost:29500 plain.lua
expect 2 "add --master HOST:PORT" --nnodes 2 plain.lua
expect 1 "broken.lua:2:" broken.lua
expect 1 "boom.lua:2: boom" boom.lua
expect 1 "boom.lua:4: in the main chunk" boom.lua
expect 1 "a script returns a recipe (a table), or nothing" seven.lua
expect 1 "(command line):1:" -e 'nothing.at.all()'
expect 0 "1	--some.field=3	--some.field=3" plain --some.field=3
expect 0 "here" models/uses.lua
expect 0 "here" uses
# a file of the user's that is called as one of ours is what its name means: to a run, its watch and a swap, too
echo 'print "mine"' >models/tiny.lua
expect 0 "mine" models/tiny.lua
expect 0 "$PWD/models/tiny.lua" -e 'print(select(2, require("pg.host").source("models/tiny.lua")))'
expect 5 "early" -e 'print "early" os.exit(5)'
# Ctrl-C in pgrun's own Lua: no lines of it
timeout --foreground -s INT 1 env --default-signal=INT "$PGRUN" schedule 1f1b --stages=64 --micro=20000 >said 2>&1
[ "$(cat said)" = "pgrun: interrupted" ] || complain "Ctrl-C in a verb: $(cat said)"
expect 0 "LuaJIT" --version
expect 0 "--memory SIZE" --help
expect 0 "tokenize" help
cd models && expect 0 "here" uses.lua
exit $failed
