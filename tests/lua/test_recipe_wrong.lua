-- test_recipe_wrong.lua: what a person can get wrong in a recipe, on its command line or inside its functions.  Each
-- is refused in one line that names the field, or the option, and what it must be; lua/pg is not in it.
local check = require "tests.check"
local fs = require "pg.fs"
local recipe = require "pg.recipe"
local training = require "tests.training"
local gpt2, llama = require "models.gpt2", require "models.llama"
local tests = {}

require("pg.step").block() -- one for the process; made here so that no test counts it
local INF, NAN = math.huge, 0 / 0
local shape = { blocks = 1, width = 16, heads = 2, vocab = 259, context = 16 }

local function with(base, key, value)
  local out = {}
  for k, v in pairs(base) do out[k] = v end
  out[key] = value
  return out
end

-- Raises with `want` in it, in one line without a word of ours.
local function refused(want, f, what)
  local message = check.throws(f, want)
  check.is_true(not message:find("\n", 1, true) and not message:find("lua/pg/", 1, true), what .. ": " .. message)
end

local function resolve(changes, ...)
  return recipe.resolve(training.recipe(changes), (recipe.arguments { ... }), { path = "x.lua" })
end

local runs = 0
local function run(changes, args)
  runs = runs + 1
  fs.remove(training.scratch .. "/wrong-" .. runs)
  changes = with(changes or {}, "model", changes and changes.model or llama(shape))
  return training.run(changes, "wrong-" .. runs, args)
end

function tests.test_fields_of_a_wrong_kind()
  local kinds = {
    model = "model is %s; it must be a description", layout = "a table of fields", data = "a table of fields",
    precision = "must be one of fp32, tf32, bf16", micro = "must be an integer", steps = "must be an integer",
    recompute = "must be one of none, norms, block", optim = "a table such as", seed = "must be a 64-bit integer",
    save = "a table of fields", eval = "a table of fields", sample = "a table of fields",
    log = "a table of fields",    loss = "must be a function", on_step = "must be a function",
  }
  for field, want in pairs(kinds) do
    for _, value in ipairs { true, 1.5, NAN, INF } do
      refused((want:gsub("%%s", tostring(value))), function() resolve { [field] = value } end, field)
    end
  end
  for _, value in ipairs { {}, function() end } do
    local want = "steps is a " .. type(value) .. "; it must be an integer"
    refused(want, function() resolve { steps = value } end, "steps")
  end
end

-- Values of fields in the file: { path, value, what the message says }.
local in_file = {
  { "steps", 0, "steps is 0; it must be at least 1" }, { "steps", -1, "at least 1" },
  { "steps", 2^60, "an integer of at most 2^53" }, { "micro", 0, "at least 1" }, { "micro", INF, "an integer" },
  { "seed", "0x10", "64-bit" }, { "seed", 2^63, "64-bit" }, { "seed", NAN, "64-bit" },
  { "data.batch", 0, "at least 1" }, { "data.batch", 2.5, "an integer" }, { "data.context", -1, "at least 1" },
  { "data.vocab", 0, "at least 1" }, { "data.pad", -1, "at least 0" }, { "data.held_out", NAN, "a finite number" },
  { "data.held_out", 1, "at least 0 and below 1" }, { "data.held_out", -0.1, "at least 0" },
  { "data.dtype", "u64", "one of u8, u16, i32" }, { "data.bach", 1, "did you mean batch?" },
  { "save", { every = -1 }, "save.every is -1; it must be at least 0" }, { "save", { keep = 0 }, "at least 1" },
  { "save", { on_error = "ignore" }, "one of stop, go on" }, { "save", { evry = 1 }, "did you mean every?" },
  { "eval", { batches = 0 }, "eval.batches is 0; it must be at least 1" }, { "log", { every = 0 }, "at least 1" },
  { "sample", { temperature = -1 }, "at least 0" }, { "sample", { temperature = INF }, "a finite number" },
  { "sample", { tokens = 1e15 }, "at most 1073741824" }, { "sample", { prompt = 3 }, "a string" },
  { "optim.clip", NAN, "optim.clip is nan; it must be a finite number" }, { "optim.clip", -1, "at least 0" },
  { "optim.betas", { 0.9, 1.5 }, "{ 0.9, 1.5 }; it must be numbers, each at least 0 and below 1" },
  { "optim.betas", { NAN, 0.9 }, "it must be numbers" }, { "optim.betas", 3, "a table" },
  { "optim.eps", -1, "at least 0" }, { "optim.rate", NAN, "a finite number" }, { "optim.rate", -1, "at least 0" },
  { "optim.rate", pg.rate.cosine { peak = INF }, "optim.rate.peak is inf; it must be a finite number" },
  { "optim.rate", pg.rate.cosine { peak = 1, warmup = -1 }, "warmup is -1; it must be at least 0" },
  { "optim.rate", pg.rate.cosine { peak = 1, warmup = 1.5 }, "an integer" },
  { "optim.rate", pg.rate.cosine { peak = 1, floor = 3 }, "at least 0 and at most 1" },
  { "optim.rate", pg.rate.wsd { peak = 1, decay = 5 }, "at least 0 and at most 1" },
  { "optim.momentum", 0.9, "unknown field optim.momentum" },
  { "model.blocks", 0, "model.blocks is 0; it must be at least 1" }, { "model.blocks", 1e9, "at most 100000" },
  { "model.width", -16, "at least 1" }, { "model.vocab", 0, "at least 1" }, { "model.heads", "2", "an integer" },
  { "model.tied", 1, "a boolean" }, { "model.eps", -1, "at least 0" }, { "model.std", NAN, "a finite number" },
  { "model.kv_heads", 0, "at least 1" }, { "model.context", 0, "at least 1" }, { "model.ffn", -8, "at least 1" },
}

function tests.test_values_in_the_file()
  for _, case in ipairs(in_file) do
    local path, value, want = unpack(case)
    local top, inner = path:match "^(%w+)%.?([%w_]*)$"
    local changes = { [top] = value }
    if top == "model" then changes.model = llama(with(shape, inner, value))
    elseif inner ~= "" then changes[top] = with(training.recipe()[top], inner, value) end
    refused(want, function() resolve(changes) end, path)
  end
  refused("model.dropout is 1; it must be at least 0 and below 1", function()
    resolve { model = gpt2 { dropout = 1 } }
  end, "dropout")
end

-- Words of the command line: { word, what the message says }.
local words = {
  { "--optim.clip=nan", '--optim.clip=nan: optim.clip is "nan"; it must be a number' },
  { "--steps=1e999", "an integer" },
  { "--optim.rate.peak=1e999", "must be a number" }, { "--steps=", 'steps is ""' },
  { "--steps=0", "steps is 0; it must" },
  { "--steps=99999999999999999999", "at most 2^53" }, { "--seed=9223372036854775808", "a 64-bit integer" },
  { "--seed=0x10", "a 64-bit integer" }, { "--seed=1e3", "a 64-bit integer" }, { "--seed=", "a 64-bit integer" },
  { "--layout.dp=0", "a number of ranks" }, { "--layout.dp=nan", "a number of ranks" },
  { "--log.timeline=0", "at least 1" },
  { "--log.timeline=3", "log.timeline: a timeline shows the stages of a pipeline, and layout.pp is 1; set layout.pp" },
  { "--layout.schedule=gpip", "one of gpipe, 1f1b, interleaved, zb-h1, or a function" },
  { "--data.=3", "fields are set as" }, { "--.=3", "fields are set as" },
  { "--data..batch=3", "fields are set as" }, { "--optim=adamw", "such as --optim.betas=" },
  { "--save=true", "such as --save.at_end=" }, { "--model.blocks.x=3", "which has no fields" },
  { "--eval.every=1", "--eval.every=1: eval has nothing to look at" }, { "--Steps=5", "did you mean steps?" },
  { "--optim.betas.1=0.5", "optim.betas is not set" }, { "--on_step=x", "must be a function" },
  { "--data.text.x=1", "which has no fields" },
}

function tests.test_words_of_the_command_line()
  for _, case in ipairs(words) do refused(case[2], function() resolve({}, case[1]) end, case[1]) end
end

function tests.test_seeds_at_their_ends_are_taken()
  for _, seed in ipairs { "9223372036854775807", "-9223372036854775808", "-1" } do
    check.equal(resolve({}, "--seed=" .. seed).seed, seed)
  end
end

function tests.test_tables_that_are_no_recipe()
  local function given(t) return function() recipe.resolve(t, nil, { path = "x.lua" }) end end
  refused("x.lua: it returns a description; a recipe is a table", given(llama(shape)), "description")
  refused("it returns a tensor", given(pg.zeros { 2 }), "tensor")
  refused("model is missing", given {}, "empty")
  refused("unknown field 1", given { 3 }, "list")
  local itself = training.recipe()
  itself.data.itself = itself
  refused("does it hold itself?", given(itself), "cycle")
end

-- Found when the model and the data are opened: { changes, words, what the message says }.
local opened = {
  { { model = llama(with(shape, "heads", 3)) }, {}, "5.33333 wide" },
  { { model = llama(with(shape, "kv_heads", 3)) }, {}, "kv_heads must divide heads" },
  { { model = function() return 3 end }, {}, "the function model returned 3" },
  { { model = llama(with(shape, "width", 2^31)) }, {}, "out of memory" },
  { {}, { "--data.text=" }, "tokens: no file is named" },
  { {}, { "--data.text=/nothing" }, "tokens: /nothing: no such file" },
  { {}, { "--data.text=/" }, "is no regular file" }, { {}, { "--data.text=/dev/null" }, "is no regular file" },
  { {}, { "--data.tokens=*.nothing" }, "*.nothing: no such file" },
  { {}, { "--data.held_out=0.999" }, "(what data.held_out leaves): one sample" },
  { {}, { "--data.held_out=1e-9" }, "(data.held_out): one sample of context 16 needs 17 tokens, it has 0" },
  { {}, { "--data.batch=1e12" }, "data.batch 1000000000000: " },
  { {}, { "--optim.betas=0.9" }, "optim.betas: two numbers are wanted" },
}

function tests.test_what_is_found_when_it_is_opened()
  for _, case in ipairs(opened) do
    refused(case[3], function() run(case[1], case[2]) end, case[3])
    local word = case[2][1]
    if word and not word:find "held_out" then refused(word .. ": ", function() run(case[1], case[2]) end, word) end
  end
  for name, content in pairs { empty = "", short = "three" } do
    local path = ("%s/%s.txt"):format(training.scratch, name)
    fs.write(path, content)
    refused("--data.text=" .. path .. ": ", function() run({}, { "--data.text=" .. path }) end, name)
  end
end

local function at_three(f)
  return function(state) return state.step < 3 and 1e-3 or f(state) end
end

function tests.test_mistakes_inside_functions()
  local function rate(f) return { optim = { "adamw", rate = at_three(f) } } end
  local function nothing() return nil end
  for _, case in ipairs {
    { rate(nothing), "rate: at step 3 it is nil" }, { rate(function() return "x" end), "it is x" },
    { rate(function() return NAN end), "it is nan" }, { rate(function() error "boom" end), "boom" },
    { { loss = nothing }, "loss returned nil; it must return a tensor of one number" },
    { { loss = function() return 3 end }, "loss returned 3" },
    { { loss = function(model, batch) return (model(batch.tokens)) end }, "loss returned [8,16,259] f32" },
    { { on_step = at_three(function() error "boom" end) }, "boom" },
  } do
    refused(case[2], function() run(case[1]) end, case[2])
  end
end

function tests.test_functions_change_nothing_of_the_training()
  local function spoil(state)
    state.step, state.steps, state.tokens, state.run = 100, 1, 0, "elsewhere"
    state.own = (state.own or 0) + 1
    return 1e-3
  end
  local kept
  local records = run { optim = { "adamw", rate = spoil }, on_step = function(state)
    spoil(state)
    kept = state.own
  end }
  check.equal(training.column(records, "step"), { 1, 2, 3, 4, 5, 6 })
  check.equal(records[6].tokens, 6 * 8 * 16)
  check.equal(kept, 12) -- what they keep there stays
end

function tests.test_names_of_runs()
  local place = require("pg.run").place
  local function named(name) return function() return place { run = name } end end
  refused(".. is no name for a run", named "..", "..")
  refused("is no name for a run", named ".", ".")
  refused("control character", named "a\1", "control")
  refused("holds other files; a run wants a folder of its own", named "/", "/")
  local folder = training.scratch .. "/begun"
  fs.mkdir(folder .. "/checkpoints")
  refused("has no checkpoint to go on from; choose another name", named(folder), "begun")
end

check.run(tests)
