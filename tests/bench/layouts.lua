-- layouts.lua: LLaMA at the widths of 7B with 4 blocks on real text: every layout against one card, by the bounds of
-- tests/agreement.lua: a table of losses, differences, tokens/s and peak memory.  Exit code 0: all agree.
--   pgrun tests/bench/layouts.lua        all layouts that the GPUs here allow; without any, small ones on the CPU
--   pgrun tests/bench/layouts.lua --cards=4 --precision=fp32 --only=zero --text=FILE --out=FOLDER
-- --only: layouts whose name holds it; --text: by default the demo's; --out: recipes, runs, logs and layouts.md (by
-- default in build/).  --shape=7b|tiny, --device=cuda|cpu, --steps=20, --batch=16 (sequences a step), --limit=240
-- (seconds a run).
-- Each run is `pgrun -n N OUT/NAME.lua`, a recipe to look at.
local agreement = require "tests.agreement"
local fs = pg.fs

-- batch: sequences in a step, a multiple of 8 cards x micro; a step of 16384 tokens at 7B's widths.
local shapes = {
  ["7b"] = { model = { blocks = 4, width = 4096, heads = 32, ffn = 11008, vocab = 259, context = 1024 },
             batch = 16, micro = 2, precision = "bf16", steps = 20, warmup = 2000 },
  tiny = { model = { blocks = 4, width = 64, heads = 8, vocab = 259, context = 32 },
           batch = 16, micro = 2, precision = "fp32", steps = 20, warmup = 10 },
}

-- Name, layout, other fields of the recipe.  The cards are the product of the axes.
local layouts = {
  { "dp2 zero 0", { dp = 2 } },
  { "dp2 zero 1", { dp = 2, zero = 1 } },
  { "dp2 zero 2", { dp = 2, zero = 2 } },
  { "dp2 zero 3", { dp = 2, zero = 3 } },
  { "dp2 zero 3 recompute block", { dp = 2, zero = 3 }, { recompute = "block" } },
  { "tp2", { tp = 2 } },
  { "tp2 sequence false", { tp = 2, sequence = false } },
  { "tp2 recompute norms", { tp = 2 }, { recompute = "norms" } },
  { "pp2 gpipe", { pp = 2, schedule = "gpipe" } },
  { "pp2 1f1b", { pp = 2 } },
  { "pp2 interleaved", { pp = 2, schedule = "interleaved" } },
  { "pp2 zb-h1", { pp = 2, schedule = "zb-h1" } },
  { "pp2 1f1b recompute block", { pp = 2 }, { recompute = "block" } },
  { "dp4 zero 3", { dp = 4, zero = 3 } },
  { "tp4", { tp = 4 } },
  { "pp4 1f1b", { pp = 4 } },
  { "pp4 zb-h1", { pp = 4, schedule = "zb-h1" } },
  { "dp2 tp2 zero 1", { dp = 2, tp = 2, zero = 1 } },
  { "dp2 tp2 zero 3", { dp = 2, tp = 2, zero = 3 } },
  { "dp2 pp2 zero 1", { dp = 2, pp = 2, zero = 1 } },
  { "dp2 pp2 zero 3 recompute block", { dp = 2, pp = 2, zero = 3 }, { recompute = "block" } },
  { "pp2 tp2 interleaved", { pp = 2, tp = 2, schedule = "interleaved" } },
  { "pp2 tp2 zb-h1", { pp = 2, tp = 2, schedule = "zb-h1" } },
  { "dp8 zero 3", { dp = 8, zero = 3 } },
  { "tp8", { tp = 8 } },
  { "dp4 tp2 zero 1", { dp = 4, tp = 2, zero = 1 } },
  { "dp2 pp4 zero 1", { dp = 2, pp = 4, zero = 1 } },
  { "pp2 tp4", { pp = 2, tp = 4 } },
  { "dp2 pp2 tp2", { dp = 2, pp = 2, tp = 2 } },
  { "dp2 pp2 tp2 zero 1 interleaved", { dp = 2, pp = 2, tp = 2, zero = 1, schedule = "interleaved" } },
  { "dp2 pp2 tp2 zero 3 zb-h1", { dp = 2, pp = 2, tp = 2, zero = 3, schedule = "zb-h1" } },
}

local function fail(format, ...) error("layouts: " .. format:format(...), 0) end

local function quoted(text) return "'" .. text:gsub("'", "'\\''") .. "'" end

local function capture(command)
  local pipe = assert(io.popen(command))
  local text = pipe:read "*a"
  pipe:close()
  return text
end

local function cards_of(layout) return (layout.dp or 1) * (layout.pp or 1) * (layout.tp or 1) end

-- ---- options ----

local PGRUN = os.getenv "PGRUN"
if not PGRUN or PGRUN == "" then PGRUN = capture "readlink /proc/$PPID/exe":gsub("\n", "") end
local o = { shape = "", device = "", cards = 0, steps = 0, batch = 0, precision = "", only = "", text = "", out = "",
            limit = 240 }

local function read_options()
  for _, word in ipairs(arg) do
    local key, value = word:match "^%-%-(%w+)=(.*)$"
    if not key or o[key] == nil then fail("%s is no option; the head of tests/bench/layouts.lua lists them", word) end
    if type(o[key]) == "number" then
      value = tonumber(value)
      if not value or value < 1 or value % 1 ~= 0 then fail("%s: a whole number from 1", word) end
    end
    o[key] = value
  end
  local gpus = select(2, capture(quoted(PGRUN) .. " --version"):gsub("\nGPU %d", ""))
  if o.device == "" then o.device = gpus > 0 and "cuda" or "cpu" end
  if o.shape == "" then o.shape = o.device == "cuda" and "7b" or "tiny" end
  local shape = shapes[o.shape] or fail("--shape=%s is neither 7b nor tiny", o.shape)
  if o.cards == 0 then o.cards = o.device == "cuda" and gpus or 2 end
  if o.device == "cuda" and o.cards > gpus and os.getenv "PG_SHARE_GPU" ~= "1" then
    fail("--cards=%d, and %d GPUs answer (with PG_SHARE_GPU=1 ranks share them: for what agrees, not for speed)",
         o.cards, gpus)
  end
  if o.precision == "" then o.precision = shape.precision end
  if o.steps == 0 then o.steps = shape.steps end
  if o.batch == 0 then o.batch = shape.batch end
  local reach = agreement.steps[o.precision] or fail("--precision=%s is neither bf16 nor fp32", o.precision)
  if o.steps > reach then fail("--steps=%d: the bounds of %s reach to step %d", o.steps, o.precision, reach) end
  if o.text == "" then o.text = require("pg.data.demo").path() end
  if not fs.exists(o.text) then fail("--text=%s: no such file", o.text) end
  if fs.exists(o.out .. "/layouts.md") then fail("--out=%s holds results already; take another folder", o.out) end
  if o.out == "" then o.out = "build/layouts-" .. os.date "%Y%m%d-%H%M%S" end
  return shape
end

-- ---- a run ----

-- A table of plain values as Lua text.
local function literal(value)
  if type(value) ~= "table" then return type(value) == "string" and ("%q"):format(value) or tostring(value) end
  local keys, parts = {}, {}
  for key in pairs(value) do keys[#keys + 1] = key end
  table.sort(keys)
  for i, key in ipairs(keys) do parts[i] = ("%s = %s"):format(key, literal(value[key])) end
  return "{ " .. table.concat(parts, ", ") .. " }"
end

-- Each rank leaves its peak beside the recipe, since stages of a pipeline differ.  The rate and its warm-up are those
-- that LLaMA-7B was trained with: ten or a hundred times as fast, so soon after the start, one card drifts apart from
-- itself by 1 % and by 4 % within 20 steps.
local RECIPE = [[
return {
  model = require "models.llama" %s,
  layout = %s,
  precision = %q, recompute = %q, micro = %d, steps = %d,
  data = { text = %q, batch = %d },
  optim = { "adamw", betas = { 0.9, 0.95 }, decay = 0.1, clip = 1.0,
            rate = pg.rate.cosine { peak = 3e-4, warmup = %d } },
  log = { every = 1 }, live = { watch = false },
  on_step = function(state)
    if state.step == state.steps then pg.fs.write(%q .. pg.rank(), ("%%d"):format(pg.memory().peak)) end
  end,
}
]]

--- run(shape, name, layout, more) -> { records =, peak = bytes, speed = tokens/s }, or nil and what happened.
local function run(shape, name, layout, more)
  local base, n = o.out .. "/" .. name:gsub(" ", "-"), cards_of(layout)
  fs.write(base .. ".lua", RECIPE:format(literal(shape.model), literal(layout), o.precision,
    more and more.recompute or "none", shape.micro, o.steps, o.text, o.batch, shape.warmup, base .. ".peak-"))
  local command = ("timeout --foreground -k 10 %d %s -n %d --device %s %s --run=%s >%s 2>&1"):format(o.limit,
    quoted(PGRUN), n, o.device, quoted(base .. ".lua"), quoted(base), quoted(base .. ".log"))
  local code = math.floor(os.execute(command) / 256)
  if code == 130 then os.exit(130) end
  if code ~= 0 then
    local last = capture("grep -v '^ *$' " .. quoted(base .. ".log") .. " | tail -4")
    return nil, code == 124 and ("not done in %d s"):format(o.limit) or last
  end
  local out = { records = agreement.records(base), peak = 0 }
  for rank = 0, n - 1 do out.peak = math.max(out.peak, tonumber(fs.read(base .. ".peak-" .. rank))) end
  local speeds = {}
  for i = 4, #out.records do speeds[#speeds + 1] = out.records[i].tokens_per_s end
  table.sort(speeds)
  out.speed = speeds[math.ceil(#speeds / 2)] or out.records[#out.records].tokens_per_s
  return out
end

-- ---- the table ----

local report, failed = {}, 0

local function line(format, ...)
  local text = format:format(...)
  report[#report + 1] = text
  print(text)
  io.stdout:flush()
  fs.write(o.out .. "/layouts.md", table.concat(report, "\n") .. "\n")
end

local function row(name, result, agreed, fault)
  if fault then failed = failed + 1 end
  if not result then
    line("| %s | | | | | | | | **FAIL**: %s |", name, (fault:gsub("%s*\n%s*", "; "):gsub("|", "/"):gsub("; $", "")))
    return
  end
  local function part(w) return w and ("%.2g"):format(w.value) or "" end
  local records = result.records
  line("| %s | %.6f | %.6f | %s | %s | %s | %.0f | %.0f | %s |", name, records[1].loss, records[#records].loss,
    part(agreed.first), part(agreed.later), part(agreed.norm), result.speed, result.peak / 2^20,
    fault and "**FAIL**: " .. fault or "pass")
end

local shape = read_options()
fs.mkdir(o.out)
local bound = agreement.bounds[o.precision]
line("LLaMA %s, %s, %d sequences of %d tokens a step in micro-batches of %d, on %s", literal(shape.model), o.precision,
  o.batch, shape.model.context, shape.micro, o.text)
line ""
line("Relative differences from one card; bounds: loss %g at step 1, %g through step %d; gradient norm %g through "
  .. "step 10, %g later.  Peak: of the rank with most.", bound("loss", 1), bound("loss", 2), o.steps,
  bound("grad_norm", 1), bound("grad_norm", 11))
line ""
line("| layout | loss, step 1 | step %d | differs, step 1 | through %d | gradient norm | tokens/s | peak MiB | |",
  o.steps, o.steps)
line "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
local alone, why = run(shape, "one card", {})
row("one card", alone, {}, not alone and why or nil)

local function against_one(name, layout, more)
  local result, fault = run(shape, name, layout, more)
  local agreed = result and agreement.compare(result.records, alone.records, o.precision)
  row(name, result, agreed, fault or agreed and agreed.fault)
end

if alone then against_one("one card again", {}) end -- what the training differs by of itself
local ran = 0
for _, layout in ipairs(alone and layouts or {}) do
  local name = layout[1]
  if cards_of(layout[2]) <= o.cards and name:find(o.only, 1, true) then
    against_one(unpack(layout))
    ran = ran + 1
  end
end
if ran == 0 and alone then
  failed = failed + 1
  print(("layouts: no layout for %d cards has a name with %q"):format(o.cards, o.only))
end
line ""
line("%d layouts against one card, %d failed", ran, failed)
os.exit(failed == 0 and 0 or 1)
