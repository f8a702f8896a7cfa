# What a run writes and prints: metrics.jsonl as promised, TensorBoard events that parse, lines on a pipe, a live line
# on a terminal; and what it does when nobody reads, nothing can be written, or its files are taken away.
set -eu
. tests/journey.sh
text 13 it
cat > train.lua <<'LUA'
return {
  model = require "models.llama" { blocks = 1, width = 16, heads = 2, vocab = 259, context = 16 },
  data = { text = "text.txt", batch = 8, held_out = 0.1 }, steps = 6, eval = { every = 3 }, save = { every = 2 },
  optim = { "adamw", rate = pg.rate.cosine { peak = 1e-3, warmup = 2 } }, log = { every = 1 },
  on_step = function(state)
    local does = os.getenv "DOES"
    if does and state.step == 3 and pg.rank() == 0 then os.execute((does:gsub("RUN", state.run))) end
  end,
}
LUA

# ---- the files ----
"$PGRUN" train.lua --run=files > out
cat > files.lua <<'LUA'
local fs, json = pg.fs, pg.json
local records = {}
for line in fs.read "runs/files/metrics.jsonl":gmatch "([^\n]*)\n" do
  local r = json.decode(line)
  records[#records + 1] = r
  assert(line:find('"mfu_causal":null,"mfu_full":null', 1, true), line)
  local keys = {}
  for k in pairs(r) do keys[#keys + 1] = k end
  table.sort(keys)
  local due = #records % 3 == 0
  assert(table.concat(keys, " ") == "grad_norm loss memory_peak rate seconds step tokens tokens_per_s"
         .. (due and " val_loss" or ""), line)
  for key in pairs(r) do
    local digits = line:match('"' .. key .. '":([^,}]*)')
    assert(digits == ("%.9g"):format(tonumber(digits)) or not digits:find "[.e]", key .. ": " .. digits)
  end
end
assert(#records == 6)
-- TFRecord: length u64, its crc, data, crc of the data; an Event is step (field 2) and summary (field 5).
local text, at, scalars = fs.read(fs.glob "runs/files/events.out.tfevents.*"[1]), 1, {}
while at <= #text do
  local a, b, d = text:byte(at, at + 2)
  local data = text:sub(at + 12, at + 11 + a + 256 * b + 65536 * d)
  for _, tag in ipairs { "loss", "rate", "grad_norm", "tokens_per_s", "val_loss" } do
    if data:find("\n" .. string.char(#tag) .. tag, 1, true) then scalars[tag] = (scalars[tag] or 0) + 1 end
  end
  at = at + 16 + #data
end
assert(at == #text + 1, "the last record ends with the file")
for _, tag in ipairs { "loss", "rate", "grad_norm", "tokens_per_s" } do assert(scalars[tag] == 6, tag) end
assert(scalars.val_loss == 2)
LUA
"$PGRUN" files.lua

# ---- lines ----
test "$(grep -c '^step ./6  loss ' out)" = 6
test "$(tr -d '[:print:]\n' < out | wc -c)" = 0 # no escape codes on a pipe
if script -qec true /dev/null > /dev/null 2>&1; then
    for colour in 0 1; do
        env ${colour:+NO_COLOR=$colour} script -qc "exec '$PGRUN' train.lua --run=live$colour --log.every=100" /dev/null > live
        test "$(tr '\r' '\n' < live | grep -c '^step ./6  loss ')" = 6
        test "$(tr -d '[:print:]\n\r' < live | wc -c)" = 0
        tail -1 live | grep -q '^done at step 6 of 6'
    done
fi

# ---- nobody reads: the end is a checkpoint, none is lost ----
for ranks in 1 2; do
    test "$("$PGRUN" -n $ranks train.lua --run=head$ranks --steps=500 2> err | head -1 | cut -c1-16)" = 'train.lua: cpu, '
    set -- $("$PGRUN" -n $ranks train.lua --run=none$ranks --steps=500 2> err | true; echo ${PIPESTATUS[0]})
    test "$1" = 141
    grep -q 'lines are lost, stdout: Broken pipe' err
    test "$(wc -l < runs/none$ranks/metrics.jsonl)" = "$(ls runs/none$ranks/checkpoints | tail -1 | sed 's/step-0*//')"
done
"$PGRUN" train.lua --run=full > /dev/full 2> err
grep -q 'No space left' err
"$PGRUN" train.lua --run=closed <&- >&- 2>&-
cut -c1-2 runs/closed/metrics.jsonl | sort -u | grep -qx '{"' # no line of the output is in it

# ---- its files are taken away ----
cp text.txt kept
ends() { # CODE MESSAGE DOES
    cp kept text.txt
    rm -rf runs/away
    code=0
    DOES=$3 "$PGRUN" train.lua --run=away > out 2>&1 || code=$?
    test $code = $1 || { cat out; echo "exit code $code: $3"; exit 1; }
    grep -q -- "$2" out || { cat out; exit 1; }
}
ends 1 'metrics.jsonl has been removed' 'rm -r RUN'
test -s runs/away/checkpoints/step-00000006/manifest.json
ends 1 'save: checkpoint of step 4: .*Not a directory' 'rm -r RUN; touch RUN'
ends 1 'save: checkpoint of step 4: .*Not a directory' 'rm -r RUN/checkpoints; touch RUN/checkpoints'
ends 0 'done at step 6' 'mv train.lua away.lua'
mv away.lua train.lua
ends 0 'done at step 6' 'rm text.txt'
ends 135 'a data file was cut short while it was read' ': > text.txt'
cp kept text.txt
touch file
if "$PGRUN" train.lua --run=./file/run > out 2>&1; then exit 1; fi
grep -q 'run: no folder ./file/run: .*Not a directory; give a place that can be written' out
