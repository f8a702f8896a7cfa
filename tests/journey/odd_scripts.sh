# Scripts as editors, shells and generators write them; memory and devices that are not there; start-up time.
set -u
. tests/journey.sh

# ---- the text of a script ----
printf '\357\273\277print("bom")\nerror "here"' >bom.lua
printf '#!/usr/bin/env pgrun\nprint("shebang")\nerror "here"\n' >shebang.lua
printf '\357\273\277#!/usr/bin/env pgrun\r\nprint("both")\r\nerror "here"\r\n' >both.lua
printf 'print("cr")\rerror "here"\r' >cr.lua
printf 'print "a\\0b"; local name\0 = 1\n' >nul.lua
printf '#' >hash.lua
: >empty.lua
printf 'return 5' >five.lua
printf 'return nil, 5' >nil.lua
printf 'error { code = 3 }' >table.lua
printf 'error(setmetatable({}, { __tostring = function() return "its own words" end }))' >own.lua
printf 'local function f() return f() + 1 end f()' >deep.lua
printf 'print(("x"):rep(3), #("' >long.lua
head -c 3000000 /dev/zero | tr '\0' y >>long.lua
printf '"))' >>long.lua
mkdir folder
expect 1 "bom.lua:2: here" bom.lua
expect 1 "shebang.lua:3: here" shebang.lua
expect 1 "both.lua:3: here" both.lua
expect 1 "cr.lua:2: here" cr.lua
expect 1 "nul.lua:1:" nul.lua
expect 0 "" hash.lua
expect 0 "" empty.lua
expect 0 "" nil.lua
expect 1 "five.lua returned a number; a script returns a recipe (a table), or nothing" five.lua
expect 1 "an error that is a table" table.lua
expect 1 "its own words" own.lua
expect 1 "stack overflow" deep.lua
expect 0 "xxx	3000000" long.lua
expect 2 "folder: Is a directory" folder
expect 2 "five.lua/x: Not a directory" five.lua/x
expect 2 "no such file" missing.lua
expect 2 "no such file" ""
expect 1 "(command line):1:" -e 'x = = 1'
expect 1 "(command line):1: b" -e 'print "a"' -e 'error "b"' -e 'print "never"'
if [ "$(id -u)" != 0 ]; then # root may read everything
    cp five.lua secret.lua && chmod 0 secret.lua
    expect 2 "secret.lua: Permission denied" secret.lua
fi
said=$("$PGRUN" -e 'print "a"' -e 'error "b"' -e 'print "never"' 2>/dev/null)
[ "$said" = a ] || complain "-e went on after an error: $said"
cp shebang.lua run.lua && sed -i '3d' run.lua && chmod +x run.lua
mkdir -p bin && ln -s "$PGRUN" bin/pgrun
[ "$(PATH="$PWD/bin:$PATH" ./run.lua)" = shebang ] || complain "a script started by its first line"

# ---- devices ----
expect 2 "a device is cpu, cuda or auto" --device nope -e 'print(1)'
expect 0 "cpu" --device cpu -e 'pg.zeros{1}; print(require("pg.c").ffi.string(require("pg.c").C.pg_device()))'
if [ ! -e "$(dirname "$PGRUN")/libpg_cuda.so" ]; then
    expect 1 "cuda: this pgrun was built without CUDA" --device cuda -e 'print(1)'
fi

# ---- memory ----
expect 2 "give a size such as 4G" --memory many -e 'print(1)'
expect 2 "give a size such as 4G" --memory 0 -e 'print(1)'
expect 2 "give a size such as 4G" --memory=-1 -e 'print(1)'
cat >memory.lua <<'LUA'
local model = pg.build(require("models.llama") { blocks = 2, width = 128, heads = 4, vocab = 259, context = 64 })
local optim = pg.optim.adamw(model:parameters(), { rate = 1e-3 })
local held = {}
local ok, message = pcall(function() for i = 1, 1e4 do held[i] = pg.exp(pg.ones { 2^18 }) end end)
print(ok, message)
held = nil
local batch = { tokens = pg.zeros({ 2, 64 }, "i32"), targets = pg.zeros({ 2, 64 }, "i32") }
model:loss(batch):backward()
optim:step()
print("goes on", ok)
LUA
expect 0 "goes on	false" --memory 48M memory.lua
for part in "memory.lua:4: exp: out of memory: 1.0 MiB asked, 4" "in use of 48.0 MiB (--memory)" \
    "largest holders: activations" ", moments" ", weights"; do
    expect 0 "$part" --memory 48M memory.lua
done
expect 1 "out of memory: 400.0 MiB asked" --memory 64M -e 'pg.empty { 100, 1024, 1024 }'

# ---- looking closer ----
said=$(PG_NAN=1 "$PGRUN" -e 'pg.tensor { 1, -1 }:sqrt()' 2>&1)
printf '%s' "$said" | grep -qF "sqrt: 1 of 2 numbers of its result [2] f32 are not finite" || complain "PG_NAN: $said"
said=$(PG_NAN=0 "$PGRUN" -e 'pg.tensor { 1, -1 }:sqrt()' 2>&1) || complain "PG_NAN=0: $said"
said=$(PG_TRACE=1 "$PGRUN" -e 'local x = pg.ones { 2, 3 }; print((x + x):sum():item())' 2>&1)
printf '%s' "$said" | grep -qE "^pg: add +\[2,3\] f32 +[0-9.]+ us$" || complain "PG_TRACE: $said"
printf '%s' "$said" | grep -qx 12 || complain "PG_TRACE changed the output: $said"

# ---- start-up: 30 ms on a quiet machine; a loaded one gets 5 times that ----
i=0
while [ $i -lt 20 ]; do
    from=$(date +%s%N)
    "$PGRUN" -e 'print(1)' >/dev/null
    echo $(( ($(date +%s%N) - from) / 1000 ))
    i=$((i + 1))
done | sort -n >times
median=$(sed -n 10p times)
echo "pgrun -e 'print(1)': median $median us of 20"
[ "$median" -lt 150000 ] || complain "start-up takes $median us"
exit $failed
