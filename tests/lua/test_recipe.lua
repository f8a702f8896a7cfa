-- test_recipe.lua: recipes are checked, and the command line reaches into them.
local check = require "tests.check"
local fields = require "pg.recipe_fields"
local recipe = require "pg.recipe"
local training = require "tests.training"
local llama = require "models.llama"
local tests = {}

-- A recipe as resolved from changes and arguments.
local function resolve(changes, ...)
  return recipe.resolve(training.recipe(changes), (recipe.arguments { ... }), { path = "models/x.lua" })
end

local function refused(text, changes, ...)
  local args = { ... }
  return check.throws(function() resolve(changes, unpack(args)) end, text)
end

function tests.test_defaults_are_filled_in()
  local r = resolve {}
  check.equal(r.layout.dp, 1)
  check.equal(r.micro, 8)
  check.equal(r.seed, "0")
  check.equal(r.data.seed, "0")
  check.equal(r.recompute, "none")
  check.equal(r.save, nil)
  check.equal(r.optim.clip, 1)
end

function tests.test_any_field_from_the_command_line()
  local r = resolve({}, "--model.blocks=4", "--optim.rate.peak=1e-4", "--steps=20", "--layout.dp=1",
                    "--model.tied=true", "--save.every=5", "--optim.betas=0.8,0.9", "--data.held_out=0.25",
                    "--recompute=block")
  check.equal(r.model.blocks, 4)
  check.equal(r.optim.rate.peak, 1e-4)
  check.equal(r.steps, 20)
  check.equal(r.layout.dp, 1)
  check.equal(r.model.tied, true)
  check.equal(r.save.every, 5)
  check.equal(r.save.keep, 3)
  check.equal(r.optim.betas, { 0.8, 0.9 })
  check.equal(r.data.held_out, 0.25)
  check.equal(r.recompute, "block")
  check.equal(require("pg.describe").name(r.model), "llama")
end

function tests.test_random_tokens_may_be_chosen_and_not()
  local text = training.recipe().data.text
  check.equal(resolve({}, "--data.random=false").data.text, text)
  check.equal(resolve({}, "--data.random=true").data.text, nil)
end

function tests.test_the_table_that_was_given_stays_as_it_was()
  local given = training.recipe()
  recipe.resolve(given, (recipe.arguments { "--model.blocks=4", "--data.batch=16" }), { path = "x.lua" })
  check.equal(given.model.blocks, 1)
  check.equal(given.data.batch, 8)
end

function tests.test_a_seed_keeps_its_64_bits()
  check.equal(resolve({}, "--seed=10151188881778163").seed, "10151188881778163")
  check.equal(resolve({ seed = 9007199254740993LL }).seed, "9007199254740993")
  check.equal(resolve({ seed = 7 }).data.seed, "7")
  refused("seed is 1.5", { seed = 1.5 })
  refused("must be a 64-bit integer", { seed = 2^60 })
  refused("--seed=99999999999999999999:", {}, "--seed=99999999999999999999")
end

function tests.test_text_and_tokens_of_the_command_line_replace_one_another()
  local r = resolve({}, "--data.tokens=a.bin")
  check.equal(r.data.tokens, "a.bin")
  check.equal(r.data.text, nil)
end

function tests.test_unknown_fields_name_the_nearest()
  refused("unknown field stepz, did you mean steps?", { stepz = 3 })
  refused("models/x.lua: unknown field data.bach, did you mean batch?", { data = { bach = 3 } })
  refused("--optim.rate.peek=1: unknown field optim.rate.peek, did you mean peak?", {}, "--optim.rate.peek=1")
  refused("unknown field optim.momentum", { optim = { "adamw", momentum = 0.9 } })
end

function tests.test_wrong_kinds_are_refused_with_the_option()
  refused('--steps=ten: steps is "ten"; it must be an integer', {}, "--steps=ten")
  refused("--steps=1.5: ", {}, "--steps=1.5")
  refused("must be a boolean", {}, "--model.tied=yes")
  refused("must be one of none, norms, block", {}, "--recompute=all")
  refused("data is 3; it must be a table of fields", { data = 3 })
  refused("must be a description", { model = 3 })
  refused('its first entry must be "adamw" or "sgd"', { optim = { "adam" } })
  refused("steps is 0; it must be at least 1", {}, "--steps=0")
  refused("holds fields of its own", {}, "--data=file.txt")
end

function tests.test_inside_a_function_only_the_file_can_write()
  local optim = { "adamw", rate = function() return 1e-3 end }
  refused("optim.rate is a function, whose inside only the file can change", { optim = optim }, "--optim.rate.peak=1")
  check.equal(resolve({ optim = optim }, "--optim.rate=0.5").optim.rate, 0.5)
  refused("model is a function", { model = function() return llama {} end }, "--model.blocks=3")
end

function tests.test_what_is_missing_is_said()
  local function without(key)
    local r = training.recipe()
    r[key] = nil
    return function() recipe.resolve(r, nil, { path = "x.lua" }) end
  end
  check.throws(without "steps", "steps is missing")
  check.throws(without "model", "model is missing")
  refused("data.batch is missing", { data = { text = "x" } })
end

function tests.test_what_is_not_possible_here_is_refused_with_a_way_out()
  refused("layout: pp 1 x tp 2 = 2, which does not divide the ranks: 1 was started; use -n 2", {}, "--layout.tp=2")
  refused("layout.zero is 4; it must be at least 0 and at most 3", {}, "--layout.zero=4")
  refused('precision is "fp8"; it must be one of fp32, tf32, bf16', {}, "--precision=fp8")
  refused("pp 1 x dp 4 x tp 1 = 4 ranks, but 1 was started; use -n 4", {}, "--layout.dp=4")
  refused("micro 3 does not divide a rank's 8 sequences", {}, "--micro=3")
  refused("eval has nothing to look at", { eval = {} })
end

function tests.test_a_mistake_points_at_its_line()
  local text = "return {\n  model = x, -- steps = 3\n  optim = { 'adamw',\n    clip = -1 },\n  steps = 'x',\n}\n"
  local info = { path = "models/x.lua", text = text }
  local function fail(path) return function() recipe.fail(info, path, "is wrong") end end
  check.throws(fail "steps", "models/x.lua:5: is wrong")
  check.throws(fail "optim.clip", "models/x.lua:4: is wrong")
  check.throws(fail "eval", "models/x.lua: is wrong")
end

function tests.test_arguments()
  local overrides, options = recipe.arguments { "--steps=3", "--run=a", "--resume" }
  check.equal(#overrides, 1)
  check.equal(options, { run = "a", resume = "" })
  check.equal(select(2, recipe.arguments { "--resume=b" }).resume, "b")
  check.throws(function() recipe.arguments { "steps=3" } end, "fields are set as")
  check.throws(function() recipe.arguments { "--steps" } end, "fields are set as")
  local function misread(part, ...)
    local words = { ... }
    check.throws(function() recipe.arguments(words) end, part)
  end
  misread("--steps 1: a field and its value are one word: --steps=1", "--seed=2", "--steps", "1")
  misread("--resume first: a field and its value are one word: --resume=first", "--resume", "first")
  misread("--optim.clip -1: a field and its value are one word: --optim.clip=-1", "--optim.clip", "-1")
  local script = require("pg.host").script
  for _, words in ipairs { { "--device", "cpu" }, { "-n", "2" }, { "--memory", "4G" } } do
    local option = table.concat(words, " ")
    misread(("%s: an option of pgrun stands before the file: pgrun %s %s"):format(option, option, script),
            unpack(words))
  end
  for _, option in ipairs { "--device=cpu", "-n2", "-i", "--no-jit", "--help", "--node-rank=1" } do
    misread(("%s: an option of pgrun stands before the file: pgrun %s %s"):format(option, option, script), option, "x")
  end
  check.throws(function() recipe.arguments { "--run=" } end, "a name is missing")
end

function tests.test_every_field_says_what_it_is()
  for name, entry in pairs(fields.top) do
    check.is_true(type(entry.doc or entry[3]) == "string", name)
    for inner, field in pairs(entry.fields or {}) do check.is_true(type(field[3]) == "string", name .. "." .. inner) end
  end
end

check.run(tests)
