-- ranks: 2
-- What a stage holds under each schedule, stages of unequal widths, a loss of one's own, batches of one's own, text.
local engine = require "pg.parallel.engine"
local layout = require "pg.parallel.layout"
local tape = require "pg.tape"
local timelines = require "tests.timelines"
local c = require "pg.c"
local rank, nn = pg.rank(), pg.nn
local llama = require "models.llama"
local B, T, VOCAB = 2, 64, 64

local function near(got, want, what)
  local fine = math.abs(got - want) <= 1e-6 * math.max(1, math.abs(want))
  if not fine then error(("%s is %.9g, not %.9g"):format(what, got, want), 2) end -- or not a number
end

local function batches(n) return timelines.batches(n, B, T, VOCAB) end

-- ---- memory ----

local function new_engine(schedule)
  local l = layout.resolve({ pp = 2, schedule = schedule }, 2)
  layout.check_schedule(l, 1)
  local model, plan = layout.build(llama { blocks = 4, width = 64, heads = 4, vocab = VOCAB, context = T }, l, {})
  return engine.new(model, model.segments, { plan = plan, schedule = schedule })
end

-- Bytes that a step of so many micro-batches holds at most beyond what was there; nothing may be left.
local function held(e, micro)
  for _ = 1, 2 do -- once more: shapes are told only once
    c.collect()
    local before = pg.memory().in_use
    c.C.pg_mem_reset_peak()
    pg.scope(e.gradients, e, micro, batches(micro))
    e.peak = pg.memory().peak - before
    e.left = pg.memory().in_use - before
    for _, s in ipairs(e.segments) do s:fresh() end
  end
  assert(e.left == 0, ("rank %d: a step left %d bytes"):format(rank, e.left))
  pg.barrier()
  return e.peak
end

local all_first, one_by_one, late = new_engine "gpipe", new_engine "1f1b", new_engine "zb-h1"
-- As on a GPU, of which the host is far ahead: it never sees by itself that a message has gone.
local Wire = getmetatable(all_first.pipe.wire)
local sweep = Wire.sweep
function Wire:sweep(most) if most then return sweep(self, most) end end
local one, two, eight = held(all_first, 1), held(all_first, 2), held(all_first, 8)
local unit = (eight - two) / 6 -- of a micro-batch between its forward and its backward
assert(unit > 2^18 and math.abs(two - one - unit) < 0.1 * unit, "each micro-batch holds as much as another")
-- Two are alive on stage 0, one on stage 1; messages under way are a hundredth of a unit.
local kept = rank == 0 and two or one
local got = held(one_by_one, 8)
assert(got < kept + 0.2 * unit, ("rank %d: 1f1b holds %d bytes for 8 micro-batches, gpipe %d for %d"):format(
  rank, got, kept, 2 - rank))
got = held(late, 8) -- as many as 1f1b's first stage, here on both
assert(got < two + 0.2 * unit, ("rank %d: zb-h1 holds %d bytes, gpipe %d for 2"):format(rank, got, two))
Wire.sweep = sweep
-- evaluation holds no more for many batches than for a few
local function looked_at(n)
  c.C.pg_mem_reset_peak()
  local before, source = pg.memory().in_use, batches(n)
  tape.no_grad(function()
    for i = 1, n do pg.scope(function() one_by_one:evaluate(source(i)) end) end
  end)
  one_by_one:settle()
  pg.barrier()
  return pg.memory().peak - before
end
looked_at(1)
assert(looked_at(24) <= looked_at(6) + 0.2 * unit, "evaluation runs ahead without end")

-- ---- unequal widths ----

-- Blocks from 16 to 24 to 8 wide, cut where they differ.
local Step = nn.class "Step"
function Step:init(o) self.w = self:param("w", { o.to, o.from }, { init = { "normal", 0.3 } }) end
function Step:forward(x) return pg.gelu(pg.linear(x, self.w)) end
local Last = nn.class "Last"
function Last:init(o) self.w = self:param("w", { VOCAB, o.from }, { init = { "normal", 0.3 } }) end
function Last:forward(x) return pg.linear(x, self.w) end
local Odd = nn.class("Odd", nn.LM)
function Odd:init()
  self.vocab, self.context = VOCAB, T
  self.layers = self:add("", nn.Sequential { { "first", nn.Embedding { entries = VOCAB, width = 16, std = 0.3 } },
    { "a", Step { from = 16, to = 24 } }, { "b", Step { from = 24, to = 24 } }, { "c", Step { from = 24, to = 8 } },
    { "last", Last { from = 8 } } })
end

-- What one process computes: losses and one number a parameter (by name) of three steps.
local function plain(model, n, loss)
  local source, sum, norms = batches(n), 0, {}
  for i = 1, n do
    pg.scope(function()
      local value = loss(model, source(i))
      value:backward()
      sum = sum + value:item()
    end)
  end
  for _, s in ipairs(model.segments) do
    s:zero_unused()
    for _, piece in ipairs(s:pieces(s.grad)) do norms[piece.name] = (piece.view * piece.view):sum():item() end
  end
  return sum, norms
end

local function own_loss(model, batch)
  return pg.cross_entropy(pg.scale(model(batch.tokens), 0.5), batch.targets, { step = batch.step })
end
local function model_loss(model, batch) return model:loss(batch) end

for _, loss in ipairs { model_loss, own_loss } do
  for _, cut in ipairs { { 1, 2 }, { 2, 1 } } do
    pg.mesh.build { dp = 2 }
    local want, norms = plain(pg.build(Odd {}, { seed = 5 }), 3, loss)
    local l = layout.resolve({ pp = 2, blocks = cut }, 2)
    layout.check_schedule(l, 3)
    local model, plan = layout.build(Odd {}, l, { seed = 5 })
    local e = engine.new(model, model.segments, { plan = plan, schedule = "1f1b", loss = loss })
    local share = pg.scope(e.gradients, e, 3, batches(3))
    near(pg.mesh.world:sum_numbers({ share })[1], want, "the loss")
    local names = 0
    for _, s in ipairs(model.segments) do
      for _, piece in ipairs(s:pieces(s.grad)) do
        near((piece.view * piece.view):sum():item(), norms[piece.name], piece.name)
        names = names + 1
      end
    end
    assert(names == (rank == 0 and 1 + cut[1] or 1 + cut[2]), "a stage holds what it runs")
  end
end

-- ---- a run of one's own ----

pg.mesh.build { dp = 2 }
local description = llama { blocks = 2, width = 32, heads = 2, vocab = 259, context = 16, tied = true }
local single = pg.build(description, { seed = 9 })
local prompt = pg.tensor({ { 1, 2, 3, 4, 5, 6, 7, 8 }, { 8, 7, 6, 5, 4, 3, 2, 1 } }, "i32")
local targets = pg.tensor({ { 2, 3, 4, 5, 6, 7, 8, -100 }, { 7, 6, 5, -100, -100, 2, 1, 9 } }, "i32")
local batch = { tokens = prompt, targets = targets }
local whole = single:loss { tokens = prompt, targets = targets, share = true }
local text = pg.generate(single, "The ", { tokens = 12, seed = 1 })
pg.mesh.dp, pg.mesh.pp, pg.mesh.tp = nil, nil, nil -- as in a script that has not looked at them
local run = pg.parallel(description, { pp = 2 }, { seed = 9, micro = 1 })
near(run:gradients(batch), whole:item(), "the loss of a batch of one's own")
near(run:evaluate(batch), whole:item(), "the same without gradients")
local optim = pg.optim.adamw(run:parameters(), { rate = 1e-2 })
optim:step()
assert(run:gradients(batch) < whole:item(), "a step lowers the loss")
optim:step()
run = pg.parallel(description, { pp = 2 }, { seed = 9 })
assert(pg.generate(run, "The ", { tokens = 12, seed = 1 }) == text, "the same text on both ranks")
assert(run:describe():find "stage 0, rank 0: embedding, block 0\nstage 1, rank 1: block 1, head", run:describe())
pg.barrier()
