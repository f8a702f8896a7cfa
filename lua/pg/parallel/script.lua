-- parallel/script.lua: pg.parallel: a model in any layout, for a loop of one's own.
--   local run = pg.parallel(llama{ blocks = 4 }, { dp = 2, pp = 2, tp = 2, zero = 1 }, { micro = 4 })
--   local optim = pg.optim.adamw(run:parameters(), { rate = 1e-3 })
--   for step, batch in data:steps(300) do
--     local loss = run:gradients(batch)
--     optim:step()
--   end
-- All ranks run the same lines; each does its part.
local c = require "pg.c"
local engine = require "pg.parallel.engine"
local own_rows = require "pg.nn.rows"
local layout = require "pg.parallel.layout"
local measured = require "pg.parallel.measured"
local mesh = require "pg.mesh"
local scope = require "pg.scope"
local step = require "pg.step"
local tape = require "pg.tape"

local script = {}
local Run = { is_module = true } -- pg.generate takes it for a model
Run.__index = Run

-- What was laid out before would not know of another layout.
local function check_mesh(l)
  for _, axis in ipairs { "pp", "dp", "tp" } do
    if mesh.dp and mesh[axis].size ~= l[axis] then
      c.fail("parallel: the ranks are laid out already, as pp %d x dp %d x tp %d; call pg.parallel before pg.data, "
             .. "pg.build and pg.mesh.ready", mesh.pp.size, mesh.dp.size, mesh.tp.size)
    end
  end
end

--- pg.parallel(what, layout, o) -> a run.  what: a description or a module not yet built; layout: dp ("rest"), pp, tp,
-- zero, bucket, schedule, chunks, blocks, sequence, tp_chunks, as in a recipe.  o: seed (0), dtype ("f32"), micro
-- (sequences of a micro-batch; all of a rank's), loss (function(model, batch) -> loss).  Call it before pg.data.
function script.new(what, fields, o)
  o = o or {}
  c.keys(fields or {}, { "dp", "pp", "tp", "zero", "bucket", "schedule", "chunks", "blocks", "sequence",
                        "tp_chunks" }, "parallel: layout")
  c.keys(o, { "seed", "dtype", "micro", "loss" }, "parallel")
  local l = layout.resolve(fields or {}, require("pg.host").ranks)
  layout.check_schedule(l, 1)
  check_mesh(l)
  local model, plan = layout.build(what, l, { seed = o.seed, dtype = o.dtype })
  local run = setmetatable({ model = model, micro = o.micro, vocab = model.vocab, context = model.context }, Run)
  run.engine = engine.new(model, model.segments, { plan = plan, schedule = l.schedule, loss = o.loss })
  run.plan = layout.lines(plan, l, model.segments)
  run.stopped = function(asked) return run.engine:asked(asked) end -- for pg.generate
  return run
end

--- run:parameters() -> those that this rank holds a part of, for an optimiser.
function Run:parameters() return self.model:parameters() end

--- run:describe() -> the plan: who holds what, as text.
function Run:describe() return table.concat(self.plan, "\n") end
Run.__tostring = Run.describe

-- ---- batches ----

-- Targets of a batch of one's own that count, over all of dp.  Its ranks may bring unequal numbers of sequences, but
-- where they sum gradients after each of a rank's `count` micro-batches, all must have as many of these.
local function count_valid(batch, count)
  local n, ignore = 0, batch.ignore or c.IGNORE
  for _, id in ipairs(batch.targets:totable()) do
    if id ~= ignore then n = n + 1 end
  end
  local told = mesh.dp:sum_numbers { n, count, count * count }
  if mesh.layout.zero >= 2 and told[2] ^ 2 ~= told[3] * mesh.dp.size then
    c.fail("run: this rank's batch makes %d micro-batches, that of another rank of dp more or fewer; layout.zero = %d "
           .. "sums gradients after each: give all ranks as many sequences, or leave micro out", count,
           mesh.layout.zero)
  end
  return told[1]
end

local function check_batch(batch)
  local fine = type(batch) == "table" and type(batch.tokens) == "table" and type(batch.targets) == "table"
  if not (fine and batch.tokens.is_tensor and #batch.tokens.shape == 2) then
    c.fail("run: a batch is a table with tokens and targets, tensors [sequences,tokens], as pg.data gives it")
  end
end

-- Sequences of a micro-batch, and how many there are.
local function micro_of(run, batch)
  local rows = batch.tokens.shape[1]
  local micro = c.within(run.micro or rows, "micro", 1)
  if rows % micro ~= 0 then
    c.fail("micro %d does not divide the %d sequences of a rank's batch; choose a divisor of %d", micro, rows, rows)
  end
  own_rows.check(micro, batch.tokens.shape[2])
  return micro, rows / micro
end

-- The i-th micro-batch, as views of the whole.
local function cut(batch, micro, i, sample0)
  local T, first = batch.tokens.shape[2], (i - 1) * micro
  tape.context = { training = true, step = step.block(), sample0 = sample0 + first }
  return { tokens = batch.tokens:view({ micro, T }, first * T), targets = batch.targets:view({ micro, T }, first * T),
           sample0 = sample0 + first, ignore = batch.ignore or c.IGNORE, step = step.block(), share = true }
end

--- run:gradients(batch, o) -> the mean loss over the valid targets of the global batch, a number, on every rank.  The
-- gradients are there for optim:step() afterwards.  batch: of pg.data (each rank has its share), or of your own:
-- tokens and targets [sequences,tokens], the same on all ranks of pp and tp.  o.timeline: "NAME": when the stages
-- worked is measured, into NAME.json and NAME.svg (pgrun help pipelines).
function Run:gradients(batch, o)
  check_batch(batch)
  c.keys(o or {}, { "timeline" }, "run:gradients")
  local name = o and o.timeline
  if name then measured.wanted(mesh.pp.size, "run:gradients: timeline") end
  local micro, count = micro_of(self, batch)
  if not batch.step then
    local valid = count_valid(batch, count)
    step.set { INV_TOKENS = valid > 0 and 1 / valid or 0 }
  end
  local sample0 = batch.sample0 or mesh.dp.rank * batch.tokens.shape[1]
  local before = tape.context
  local share = scope.run(self.engine.gradients, self.engine, count,
                          function(i) return cut(batch, micro, i, sample0) end, { trace = name ~= nil })
  tape.context = before
  local told = { bad = self.engine.bad, looked = engine.looks() }
  for _, s in ipairs(self.model.segments) do s.summed = told end -- optim:step() has nothing left to sum
  if name then measured.tell(self.engine, name) end
  return mesh.world:sum_numbers({ share })[1]
end

-- f(...) as one looks at a model: no gradients, no dropout.
local function look(f, ...)
  local before = tape.context
  tape.context = { training = false, sample0 = 0, step = step.block() }
  local ok, a, b = pcall(tape.no_grad, scope.run, f, ...)
  tape.context = before
  if not ok then error(a, 0) end
  return a, b
end

--- run:evaluate(batch) -> the mean loss over the valid targets of all ranks' batches, without gradients.
function Run:evaluate(batch)
  check_batch(batch)
  local sum, count = look(self.engine.evaluate, self.engine, { tokens = batch.tokens, targets = batch.targets,
                                                               ignore = batch.ignore or c.IGNORE, share = true })
  self.engine:settle()
  local told = mesh.world:sum_numbers { sum, count }
  return told[2] > 0 and told[1] / told[2] or 0
end

--- run(ids) -> the logits [1,V] behind the last of ids [1,T], on every rank.  pg.generate(run, "text") writes; all
-- ranks call it, rank 0 prints.
function Run:__call(ids)
  local logits = look(self.engine.logits, self.engine, ids)
  self.engine:settle()
  return logits
end

return script
