-- test_graph_train.lua: recipes with graphs = true: to the bit the training without, whatever changes on the way; what
-- cannot be recorded trains as it is.  See test_graph.lua.
local check = require "tests.check"
local elementwise = require "pg.ops.elementwise"
local fs = require "pg.fs"
local graph = require "pg.graph"
local host = require "pg.host"
local swaps = require "tests.swaps"
local training = require "tests.training"
local equal, is_true = check.equal, check.is_true
local tests = {}

require("pg.step").block()
local RECORDS = require("pg.c").ffi.string(require("pg.c").C.pg_device()) == "cuda"

-- The graphs that a run makes, in a list.
local function watched(f)
  local made, new = {}, graph.new
  graph.new = function(...)
    made[#made + 1] = new(...)
    return made[#made]
  end
  local ok, a, b, d = pcall(f)
  graph.new = new
  if not ok then error(a, 0) end
  return made, a, b, d
end

local function run(name, changes)
  fs.remove(training.scratch .. "/" .. name)
  elementwise.dropout_calls = 0
  changes.save, changes.deterministic = changes.save or {}, true
  return training.run(changes, name)
end

-- Losses, norms and the last weights, to the bit.
local function same_run(changes, replays)
  local function copy(graphs)
    local o = { graphs = graphs }
    for k, v in pairs(changes) do o[k] = v end
    return o
  end
  local want, folder = run("graph-without", copy(false))
  local weights = training.weights(folder)
  local made, got, at = watched(function() return run("graph-with", copy(true)) end)
  swaps.same(got, want)
  equal(training.weights(at), weights)
  equal(#made, 2)
  if not RECORDS then return made end
  for _, g in ipairs(made) do is_true(g.replays >= replays and g.count == 0, g.name) end -- and freed
  return made
end

for _, precision in ipairs { "fp32", "bf16" } do
  tests["test_a_training_in_" .. precision .. "_has_the_same_bits"] = function()
    same_run({ model = training.gpt2(), precision = precision, micro = 4, steps = 10 }, 7)
  end
end

function tests.test_trainings_of_other_kinds()
  same_run({ model = training.gpt2(), micro = 2, steps = 6, recompute = "block" }, 3)
  same_run({ precision = "bf16", micro = 4, steps = 6, recompute = "norms",
             optim = { "sgd", momentum = 0.9, rate = 0.1 } }, 3)
  same_run({ data = { text = training.text(500), batch = 8, held_out = 0.2 }, steps = 7, eval = { every = 2 },
             sample = { every = 3, tokens = 4 } }, 4)
end

function tests.test_parameters_that_freeze_on_the_way()
  local built
  local function model()
    built = require("pg.describe").build(training.gpt2())
    return built
  end
  local function on_step(state)
    if state.step ~= 4 and state.step ~= 8 then return end
    for i, p in ipairs(built:parameters()) do
      if i % 2 == 0 then p.requires_grad = state.step == 8 end
    end
  end
  same_run({ model = model, on_step = on_step, micro = 4, steps = 12 }, 4)
end

function tests.test_a_loss_that_reads_a_number_trains_without_a_recording()
  local function loss(m, batch)
    local y = m:loss(batch)
    if y:item() > 1e9 then error "too large" end
    return y
  end
  local made, lines = training.heard(function() return same_run({ loss = loss, steps = 6 }, 0) end)
  if not RECORDS then return end
  local told = 0
  for _, line in ipairs(lines) do
    if line:find("a step's gradients runs as it is", 1, true) then told = told + 1 end
  end
  equal({ told, made[1].replays, made[2].replays }, { 1, 0, 3 })
end

function tests.test_a_swapped_recipe_is_recorded_anew()
  swaps.base { model = 'require "models.gpt2" { blocks = 2, width = 32, heads = 2, vocab = 259, context = 32, '
                       .. 'dropout = 0.1 }' }
  local with = "graphs = true, deterministic = true, micro = 4, "
  local other = "loss = function(model, batch) return pg.scale(model:loss(batch), 0.5) end, "
  local wrong = "loss = function(model, batch) local l = model:loss(batch) "
    .. "if l:item() < 1e9 then error 'no' end return l end, "
  local function made(graphs)
    local more = graphs and with or with:gsub("graphs = true, ", "")
    return swaps.run("graph-swap-" .. (graphs and "with" or "without"), swaps.text { steps = 16, more = more }, {
      offers = { [6] = { swaps.text { steps = 16, more = more .. other } },
                 [11] = { swaps.text { steps = 16, more = more .. wrong } } } })
  end
  fs.remove(training.scratch .. "/graph-swap-with")
  fs.remove(training.scratch .. "/graph-swap-without")
  local want = made(false)
  local _, got, answers = watched(function() return made(true) end)
  swaps.same(got, want)
  is_true(want[6].loss < 0.6 * want[5].loss)
  equal({ answers[1].kind, answers[1].step, answers[2].kind }, { "K", 6, "E" })
end

function tests.test_a_swap_may_begin_and_end_it()
  swaps.base {}
  local function text(graphs) return swaps.text { steps = 14, more = ("graphs = %s, micro = 4, "):format(graphs) } end
  for _, name in ipairs { "plain", "on", "off" } do fs.remove(training.scratch .. "/graph-" .. name) end
  local want = swaps.run("graph-plain", text(false))
  for name, first in pairs { on = false, off = true } do
    local made, got, answers = watched(function()
      return swaps.run("graph-" .. name, text(first), { offers = { [6] = { text(not first) } } })
    end)
    swaps.same(got, want)
    equal(answers[1].kind, "K")
    local replays = 0
    for _, g in ipairs(made) do replays = replays + g.replays end
    equal({ #made, replays }, { 2, RECORDS and (first and 3 + 2 or 7 + 7) or 0 }) -- of 5 steps, of 9
  end
end

function tests.test_a_line_at_its_prompt_may_change_the_code()
  swaps.base {}
  local loss = "loss = function(model, batch) return pg.scale(model:loss(batch), model.factor or 1) end, micro = 4, "
  local function made(name, more)
    fs.remove(training.scratch .. "/" .. name)
    return swaps.run(name, swaps.text { steps = 12, more = loss .. more }, { before = function(number, trainer)
      if number == 7 then table.insert(trainer.live.queue, { text = "Lmodel.factor = 0.5" }) end
    end })
  end
  local want = made("graph-line-without", "")
  local list, got = watched(function() return made("graph-line-with", "graphs = true, ") end)
  swaps.same(got, want)
  is_true(want[7].loss < 0.6 * want[6].loss)
  if RECORDS then equal(list[1].replays, 4 + 4) end
end

-- ---- where it cannot be ----

function tests.test_recipes_that_cannot_be_graphs_say_so()
  local ranks, getenv = host.ranks, os.getenv
  local function attempt(message)
    check.throws(function()
      require("pg.recipe").resolve(training.recipe { graphs = true }, {}, { path = "r.lua" })
    end, message)
  end
  host.ranks = 2
  local ok, message = pcall(attempt, "graphs = true goes with one rank, and there are 2")
  host.ranks = ranks
  if not ok then error(message, 0) end
  for _, name in ipairs { "PG_NAN", "PG_TRACE", "PG_PROFILE" } do
    os.getenv = function(n) return n == name and "1" or getenv(n) end -- luacheck: ignore
    ok, message = pcall(attempt, name .. "=1 looks at every one; unset it, or leave graphs out")
    os.getenv = getenv -- luacheck: ignore
    if not ok then error(message, 0) end
  end
end

check.run(tests)
