-- agreement.lua: what two layouts of the same training may differ by (DESIGN's "Same training in every layout"), and
-- by how much the records of two metrics.jsonl do.
--   pgrun tests/agreement.lua RUN REFERENCE [fp32|bf16]      folders of runs; exit code 0: they agree
local json = require "pg.json"

local agreement = {}

-- bound(key, step) -> relative, by precision.  fp32: on GPUs with tf32 off, as pgrun has it.
agreement.bounds = {}
function agreement.bounds.fp32(key, step)
  if key == "grad_norm" then return step <= 10 and 1e-5 or 2e-4 end
  return step == 1 and 1e-6 or 1e-5
end
function agreement.bounds.bf16(key, step)
  if key == "grad_norm" then return 2e-2 end
  return step == 1 and 1e-3 or 5e-3
end
agreement.steps = { fp32 = 100, bf16 = 20 } -- as far as they reach

--- agreement.records(folder) -> the objects of its metrics.jsonl.
function agreement.records(folder)
  local records = {}
  for line in pg.fs.read(folder .. "/metrics.jsonl"):gmatch "[^\n]+" do records[#records + 1] = json.decode(line) end
  return records
end

-- { value =, bound =, step = } of the step in [from, to] whose difference is nearest to its bound, or furthest beyond.
local function worst(got, want, key, from, to, bound)
  local out = { value = 0, bound = bound(key, from), step = from, part = -1 }
  for step = from, to do
    local a, b = got[step][key], want[step][key]
    local value = math.abs(a - b) / math.abs(b)
    local part = value / bound(key, step)
    if part ~= part then part = math.huge end -- a number that is none
    if part > out.part then out = { value = value, bound = bound(key, step), step = step, part = part } end
  end
  return out
end

--- agreement.compare(got, want, precision) -> { first =, later =, norm = (each { value, bound, step }), fault = }.
-- Records of the same training; fault: nil, or how they disagree.
function agreement.compare(got, want, precision)
  local bound, n = agreement.bounds[precision], #want
  if #got ~= n then return { fault = ("%d steps, not %d"):format(#got, n) } end
  for step = 1, n do
    if got[step].tokens ~= want[step].tokens then return { fault = ("step %d: tokens differ"):format(step) } end
  end
  local out = { first = worst(got, want, "loss", 1, 1, bound), later = worst(got, want, "loss", 1, n, bound),
                norm = worst(got, want, "grad_norm", 1, n, bound) }
  for _, key in ipairs { "first", "later", "norm" } do
    local w = out[key]
    if w.part > 1 and not out.fault then
      out.fault = ("step %d: the %s differs by %.3g, bound %.3g"):format(
        w.step, key == "norm" and "gradient norm" or "loss", w.value, w.bound)
    end
  end
  return out
end

local function command_line(run, reference, precision)
  local result = agreement.compare(agreement.records(run), agreement.records(reference), precision or "fp32")
  if result.fault then
    print(("%s and %s disagree: %s"):format(run, reference, result.fault))
    os.exit(1)
  end
  print(("%s agrees with %s: loss within %.2g at step 1 and %.2g later, gradient norm within %.2g"):format(
    run, reference, result.first.value, result.later.value, result.norm.value))
end

if ... == "tests.agreement" then return agreement end
command_line(arg[1] or error("usage: pgrun tests/agreement.lua RUN REFERENCE [fp32|bf16]", 0), arg[2], arg[3])
