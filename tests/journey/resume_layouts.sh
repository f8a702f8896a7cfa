# limit: 110
# A training that changes its layout at every resume has the losses of the one that never stopped; so has one that
# begins in bf16, within what bf16 allows; and its checkpoints generate on one process.
set -u
. tests/journey.sh
seq 3000 >text.txt
cat >r.lua <<'LUA'
return {
  model = require "models.llama" { blocks = 4, width = 32, heads = 4, kv_heads = 2, vocab = 259, context = 32, tied = true },
  data = { text = "text.txt", batch = 8 }, micro = 1, steps = 2, save = { every = 0, keep = 100 },
  optim = { "adamw", clip = 1, decay = 0.1, rate = 1e-3 },
}
LUA
# train RUN RANKS STEPS OPTIONS...
train() {
    local run=$1 ranks=$2 steps=$3
    shift 3
    "$PGRUN" -n "$ranks" r.lua --run="$run" --steps="$steps" "$@" >said 2>&1 ||
        { complain "$run, $ranks ranks, $*:"; sed 's/^/    /' said; }
}
# near RUN TOLERANCE: its losses are those of the run "whole", relative to them
near() {
    "$PGRUN" -e '
        local json, fs = require "pg.json", require "pg.fs"
        local function losses(run)
          local list = {}
          for line in fs.read("runs/" .. run .. "/metrics.jsonl"):gmatch "[^\n]+" do
            list[#list + 1] = json.decode(line).loss
          end
          return list
        end
        local got, want = losses "'"$1"'", losses "whole"
        assert(#got == 14 and #want == 14, #got .. " steps")
        for i = 1, 14 do
          local off = math.abs(got[i] - want[i]) / want[i]
          assert(off <= '"$2"', ("step %d: loss %.9g, not %.9g"):format(i, got[i], want[i]))
        end' || complain "$1"
}
train whole 1 14
train moved 4 2 --layout.tp=2 --layout.zero=1
train moved 4 4 --resume --layout.zero=3
train moved 4 6 --resume --layout.pp=2 --layout.tp=2
train moved 2 8 --resume --layout.zero=2
train moved 1 10 --resume
train moved 4 12 --resume --layout.tp=4
train moved 4 14 --resume --layout.pp=2 --layout.zero=1
near moved 1e-5
train half 2 5 --precision=bf16 --layout.tp=2
train half 4 9 --resume --precision=bf16 --layout.pp=2 --layout.zero=3
train half 2 14 --resume --layout.zero=1
near half 5e-3
"$PGRUN" generate moved "1 2 3 " --tokens=8 --temperature=0 >said 2>&1 && grep -q '^1 2 3 ' said ||
    { complain "generate:"; cat said; }
exit $failed
