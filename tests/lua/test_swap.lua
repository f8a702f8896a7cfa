-- test_swap.lua: another recipe for a training that goes on, on one rank: which fields may change, that a trial leaves
-- nothing, what becomes of data and model, the limits of code that is tried, files that are saved.
local allowed = require "pg.live.allowed"
local budget = require "pg.live.budget"
local check = require "tests.check"
local elementwise = require "pg.ops.elementwise"
local fs = require "pg.fs"
local random = require "pg.random"
local recipe = require "pg.recipe"
local scope = require "pg.scope"
local swaps = require "tests.swaps"
local tape = require "pg.tape"
local training = require "tests.training"
local equal = check.equal
local tests = {}

local names = 0
-- A training in which texts are offered: { [step] = { text, ... } } -> records, answers, trainer.
local function run(offers, o)
  names = names + 1
  o = o or {}
  o.offers = offers
  return swaps.run("swap-" .. names, o.text or swaps.text(), o)
end

local function taken(answer, step)
  check.is_true(answer ~= nil and answer.kind == "K", answer and answer.text)
  swaps.holds(answer.text, ("from step %d on; the run stood still for"):format(step))
end

-- ---- fields ----

local function resolved(text)
  local given = assert(loadstring(text))()
  return recipe.resolve(given, {}, { path = "a.lua", text = text, given = {} })
end

-- The reason why a recipe with `new` in it does not follow on one with `old`, or nil.
local function refused(old, new)
  swaps.base {}
  local info = { path = "a.lua", text = swaps.text { more = new }, given = {} }
  local a, b = resolved(swaps.text { more = old }), resolved(info.text)
  local ok, message = pcall(allowed.check, a, b, info)
  return not ok and message or nil, info.field
end

function tests.test_what_may_change()
  for _, more in ipairs { "loss = function() end,", "on_step = print,", "micro = 2,", 'recompute = "block",',
    "eval = {}, data = { text = 'x', batch = 4, held_out = 0.5 },", "save = {}, sample = {},",
    "live = { watch = false }," } do
    equal(refused("", more), nil)
  end
end

function tests.test_what_may_not()
  local function reason(old, new, text, field)
    local message, of = refused(old, new)
    check.is_true(message ~= nil, "taken: " .. new)
    swaps.holds(message, text)
    equal(of, field)
  end
  reason("", "\nseed = 3,", 'a.lua:7: seed was "0", is "3"; it cannot change while a run goes on: that is', "seed")
  reason("", 'precision = "bf16",', "--resume=RUN with the new recipe goes on so", "precision")
  reason("", "layout = { sequence = false },", "layout.sequence was not set, is false", "layout.sequence")
  reason("", "layout = { schedule = 'gpipe' },", 'layout.schedule was "1f1b", is "gpipe"', "layout.schedule")
  reason("", "deterministic = true,", "deterministic was", "deterministic")
  reason("layout = { schedule = function() return 1 end },", "layout = { schedule = function() return 2 end },",
         "layout.schedule was a function, is a function", "layout.schedule")
  local mine = "layout = { schedule = function() return 1 end },"
  equal(refused(mine, "\n\n" .. mine), nil)
end

-- ---- trials ----


function tests.test_a_trial_leaves_nothing()
  swaps.base { steps = "6" }
  local seen, at = {}, 0
  local function look(trainer)
    seen[at] = { random.calls, elementwise.dropout_calls, scope.depth(), pg.memory().in_use, tape.enabled, tape.remake,
                 trainer.shown.mine, math.random(1e6) }
  end
  -- every kind of side effect, and then a mistake
  local text = swaps.text { more = 'recompute = "norms", ' .. [[
    loss = function(model, batch)
      pg.randn { 3 }
      local _ = pg.dropout(pg.ones { 8 }, 0.5), math.random(), print "printed in a trial"
      local big = pg.empty { 1024, 1024, 1024 }
      tape = require "pg.tape"
      tape.context.mine, tape.enabled = 1, tape.enabled
      local loss = pg.scale(model:loss(batch), 2)
      if big.count > 0 then loss:backward() error "after all" end
    end,]], optim = [["adamw", rate = function(state) state.mine = 1 state.loss = 0 return 1 end]] }
  math.randomseed(7)
  local want = {}
  for i = 1, 8 do want[i] = math.random(1e6) end
  math.randomseed(7)
  local _, answers, trainer = run({ [3] = { text, text }, [5] = { text } }, { before = function(step, trainer)
    at = step
    look(trainer)
  end })
  equal(#answers, 3)
  for _, a in ipairs(answers) do swaps.holds(a.text, "after all") end
  for step = 2, 6 do
    for k = 1, 7 do equal(seen[step][k], seen[2][k]) end
    equal(seen[step][8], want[step])
  end
  equal(trainer.state.step, 6)
end

-- What a file does before it returns (or returns nothing: a script that trains) is undone as well.
function tests.test_a_file_leaves_nothing()
  local model = 'require "models.gpt2" { blocks = 1, width = 32, heads = 2, vocab = 259, context = 32, dropout = 0.1 }'
  swaps.base { model = model, steps = "6", more = [[loss = function(model, batch)
    return pg.mul(model:loss(batch), pg.mean(pg.dropout(pg.ones { 64 }, 0.1)))
  end,]] }
  local want = run {}
  local script = ([[
    local model = pg.build(%s)
    local optim = pg.optim.adamw(model:parameters(), { rate = 1e-3 })
    local ids = pg.zeros({ 1, 32 }, "i32")
    for _ = 1, 2 do
      pg.mean(pg.dropout(model(ids), 0.5)):backward()
      optim:step()
    end]]):format(model)
  -- stopped in the middle of a step
  local stopped = 'require("pg.scope").open "step"\nrequire("pg.tape").enabled = false\nerror "in there"'
  local got, answers = run { [3] = { script, stopped }, [4] = { script .. "\n" .. swaps.text() } }
  swaps.holds(answers[1].text, "it returns nothing; a recipe is a table")
  swaps.holds(answers[2].text, "in there")
  taken(answers[3], 4)
  swaps.same(got, want)
end

function tests.test_a_number_ends_the_trial()
  swaps.base { steps = "5" }
  local want = training.column(run {}, "loss")
  local records, answers = run { [3] = { swaps.text { more = [[loss = function(model, batch)
    local loss = model:loss(batch)
    assert(loss:item() > 1)
    return loss
  end,]] } } }
  taken(answers[1], 3)
  equal(training.column(records, "loss"), want)
end

function tests.test_limits()
  jit.off()
  local compiled = jit.status()
  local ok, message = budget.run(loadstring("while true do pcall(function() while true do end end) end", "@mine.lua"))
  equal(ok, false)
  swaps.holds(message, "mine.lua:1: stopped: it ran for more than 50 million instructions (PGRUN_TRIAL_LIMIT)")
  local fine, value = budget.run(loadstring "local n = 0 for i = 1, 1e5 do n = n + i end return n")
  jit.on()
  equal(fine, true)
  equal(value, 5000050000)
  equal(debug.gethook(), nil)
  equal(compiled, false)
end

-- ---- data ----

function tests.test_the_place_in_the_data_stays()
  swaps.base { steps = "8" }
  local other = training.text(501)
  local records, answers, trainer = run {
    [3] = { swaps.text { data = swaps.data:gsub("batch = 8", "batch = 4") } },
    [5] = { swaps.text { data = swaps.data:gsub("batch = 8", "batch = 4, seed = 5"), more = "micro = 2," } },
    [7] = { swaps.text { data = ("text = %q, batch = 2"):format(other) } } }
  taken(answers[1], 3)
  taken(answers[2], 5)
  taken(answers[3], 7)
  equal(records[8].tokens, (2 * 8 + 4 * 4 + 2 * 2) * 32)
  equal(trainer.state.position, 2 * 2) -- of the new data
  equal(trainer.loader.accumulation, 1)
end

-- Half of the batch in half of the micro-batches from a step on: the same as by a loader of that kind from there on.
function tests.test_micro_batches_do_not_change_the_training()
  swaps.base { steps = "8" }
  local want = run {}
  local records, answers = run { [4] = { swaps.text { more = "micro = 2, recompute = 'block'," } } }
  taken(answers[1], 4)
  for step = 1, 8 do
    local near = math.abs(records[step].loss - want[step].loss) <= 1e-6 * want[step].loss
    check.is_true(near, ("step %d: %.9g, %.9g"):format(step, records[step].loss, want[step].loss))
  end
end

-- ---- models ----

local MODEL = [[(function()
  local Mine = pg.nn.class("Mine", pg.nn.LM)
  function Mine:init()
    self.vocab, self.context = 259, 32
    local width = %d
    self.embedding = self:add("embedding", pg.nn.Embedding { entries = 259, width = width })
    self.%s = self:add("head", pg.nn.Linear { inputs = width, outputs = 259 })
    self.calls = 0
  end
  function Mine:forward(ids)
    self.calls = self.calls + 1
    return self.%s(%s(self.embedding(ids)))
  end
  return function() return Mine {} end
end)()]]

function tests.test_code_of_the_model()
  local function model(f, width, field)
    return MODEL:format(width or 16, field or "head", field or "head", f)
  end
  swaps.base { steps = "8", model = model "pg.tanh" }
  local function switched(step) -- written to change at that step: it is called once a step, from the first on
    return MODEL:format(16, "head", "head",
                        ("(self.calls < %d and pg.tanh or pg.gelu)"):format(step))
  end
  local want = run(nil, { text = swaps.text { model = switched(4) } })
  local records, answers, trainer = run { [4] = { swaps.text { model = model("pg.gelu", 16, "last") } },
    [5] = { swaps.text { model = model("pg.gelu", 8) } }, [6] = { swaps.text { model = model "pg.nothing" } } }
  taken(answers[1], 4)
  swaps.holds(answers[2].text, "model: parameter embedding.weight was [259,16], is [259,8]; parameters cannot change")
  swaps.holds(answers[3].text, "attempt to call")
  swaps.same(records, want)
  equal(trainer.model.calls, 5) -- of its own: nothing of the trial
  equal(trainer.model.segments[1].params[1], trainer.model.embedding.weight)
end

-- ---- files ----

local STILL = 0.6 -- seconds in which a file that was saved has been looked at

-- What is saved while it trains, one after another: each waits until the journal has so many lines, the last two STILL
-- seconds longer.
local function saves(save, text, entries, stop)
  local since, stage = nil, 0
  local list = {
    { 0, function() save("rule_of_it", "return { rate = = 2 }\n") end },
    { 1, function() save("rule_of_it", "return { rate = function() return 2e-3 end }\n") end },
    { 2, function() save("watched", text) end },
    { 2, function() save("watched", text .. "-- more\n") end, true },
    { 3, stop, true },
  }
  return function()
    local now, next_one = swaps.time(), list[stage + 1]
    if not next_one or #entries() < next_one[1] then since = now return end
    since = since or now
    if now - since < (next_one[3] and STILL or 0) then return end
    stage, since = stage + 1, now
    next_one[2]()
  end
end

function tests.test_a_saved_file_is_offered_once()
  swaps.base { steps = "1000000" }
  local scratch = swaps.scratch
  local path = scratch .. "/watched.lua"
  package.path = scratch .. "/?.lua;" .. package.path
  local function save(name, text) fs.write(("%s/%s.lua"):format(scratch, name), text) end
  save("rule_of_it", "return { rate = function() return 1e-3 end }\n")
  local text = swaps.text { optim = '"adamw", rate = function(s) return require("rule_of_it").rate(s) end' }
  save("watched", text)
  require "rule_of_it"
  local function entries() return require("pg.live.journal").read(scratch .. "/watched") end
  local live, state = require "pg.live", nil
  local next_save = saves(save, text, entries, function() state.steps = state.step + 1 end)
  function live.boundary(trainer) -- luacheck: ignore 122
    state = trainer.state
    swaps.boundary(trainer)
    next_save()
  end
  local given = assert(loadstring(text, "@" .. path))()
  recipe.run(given, { path = path, text = text, args = { "--run=" .. scratch .. "/watched" } })
  live.boundary = swaps.boundary -- luacheck: ignore 122
  local journal = entries()
  equal(#journal, 3)
  swaps.holds(journal[1].reason, "rule_of_it.lua:1: unexpected symbol near '='")
  equal(journal[1].accepted, false)
  check.is_true(journal[2].accepted and next(journal[2].modules) ~= nil)
  check.is_true(journal[3].accepted)
  equal(training.records(scratch .. "/watched")[state.step].rate, 2e-3)
  package.loaded.rule_of_it = nil
end

pg.step.block()
check.run(tests)
