-- ranks: 2
-- Timelines of two stages under every schedule; the files and lines that a recipe and a script get of them.
local c = require "pg.c"
local check = require "tests.check"
local fs = require "pg.fs"
local measured = require "pg.parallel.measured"
local timelines = require "tests.timelines"
local training = require "tests.training"
local rank = pg.rank()

for i, m in ipairs(timelines.all(2)) do
  -- a file brings back what it was made of
  if rank == 0 then
    local stem = ("%s/of-%d"):format(training.scratch, i)
    local text = measured.save(stem, m)
    assert(text:find(measured.title(m), 1, true) and text:find "\nmeasured   idle by stage: " and
           text:find "\nsimulated  idle by stage: " and text:find "\napart      [%d.]+ points", text)
    local read = measured.read(stem .. ".json")
    for s, list in ipairs(m.timeline) do
      assert(math.abs(read.timeline.idle[s] - m.timeline.idle[s]) < 1e-5)
      for k, step in ipairs(list) do
        local r = read.timeline[s][k]
        assert(r.kind == step.kind and r.micro == step.micro and r.chunk == step.chunk
               and math.abs(r.start - step.start) <= 1e-6 and math.abs(r.stop - step.stop) <= 1e-6)
      end
    end
    local drawing = fs.read(stem .. ".svg")
    local _, boxes = drawing:gsub("<title>", "")
    assert(boxes == 2 * (#m.timeline[1] + #m.timeline[2]), boxes)
    assert(drawing:find("measured: idle ", 1, true) and drawing:find("simulated: idle ", 1, true))
  end
end

-- ---- a recipe ----

local function recipe(log)
  return { layout = { pp = 2 }, micro = 1, steps = 3, log = log,
           model = require "models.llama" { blocks = 2, width = 32, heads = 2, vocab = 259, context = 32 } }
end
local want, plain = training.run(recipe { every = 1 }, "not-traced")
local got, folder = training.run(recipe { every = 1, timeline = 2 }, "traced")
for step = 1, 3 do
  for _, key in ipairs { "loss", "grad_norm" } do
    assert(got[step][key] == want[step][key], ("step %d: %s changes with a timeline"):format(step, key))
  end
end
assert(#fs.glob(plain .. "/timeline*") == 0 and #fs.glob(folder .. "/timeline*") == 2)
local m = measured.read(folder .. "/timeline-2.json")
assert(m.step == 2 and m.stages == 2 and m.micro == 8 and m.schedule == "1f1b")
local lines = fs.read(folder .. "/log.txt")
assert(lines:find("timeline of 1f1b: 2 stages, 8 micro-batches, step 2 on", 1, true) and lines:find "\napart  ", lines)

training.fails("log.timeline is 4, and the last step is 3", recipe { timeline = 4 }, "too-late")

-- A disk that is full costs the file, not the training.
local write = fs.write
local function no_space(path, ...)
  if path:find "timeline%-1" then c.fail("%s: No space left on device", path) end
  return write(path, ...)
end
fs.write = no_space
local records, full = training.run(recipe { timeline = 1 }, "full")
fs.write = write
assert(#records == 3 and fs.read(full .. "/log.txt"):find "timeline: [^\n]*No space left on device; going on")
pg.barrier()

-- ---- a script ----

pg.mesh.dp, pg.mesh.pp, pg.mesh.tp = nil, nil, nil
local model = require "models.llama" { blocks = 2, width = 32, heads = 2, vocab = 259, context = 16 }
local run = pg.parallel(model, { pp = 2 }, { seed = 1, micro = 1 })
local ids = {}
for b = 1, 3 do
  ids[b] = {}
  for t = 1, 16 do ids[b][t] = (b * t) % 250 end
end
local batch = { tokens = pg.tensor(ids, "i32"), targets = pg.tensor(ids, "i32") }
local loss = run:gradients(batch)
local traced, said = training.heard(function()
  return run:gradients(batch, { timeline = training.scratch .. "/mine" })
end)
assert(traced == loss, "a timeline changes the loss")
pg.barrier()
m = measured.read(training.scratch .. "/mine.json")
assert(m.step == nil and m.micro == 3 and measured.title(m):find("1f1b: 2 stages, 3 micro-batches on", 1, true))
assert(#said == (rank == 0 and 1 or 0))
check.throws(function() run:gradients(batch, { timelines = "x" }) end, "did you mean timeline?")
pg.barrier()
