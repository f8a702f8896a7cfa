-- test_cases_help.lua: the pages of lua/pg/help say what is so: their Lua runs, and every name, verb, option, topic
-- and variable that they tell of is there.  (tests/journey/plain_script.sh trains the script of scripts.md.)
local check = require "tests.check"
local fs = require "pg.fs"
local is_true = check.is_true
local tests = {}
pg.step.block() -- lives as long as the process

local pages = {}
for _, path in ipairs(fs.glob "lua/pg/help/*.md") do pages[path:match "([%w_]+)%.md$"] = fs.read(path) end

-- f(text, page) for each match of a pattern in the pages.
local function each(pattern, f)
  local n = 0
  for page, text in pairs(pages) do
    for found in text:gmatch(pattern) do
      f(found, page)
      n = n + 1
    end
  end
  is_true(n > 0, "the pages hold nothing like " .. pattern)
end

-- What a page prints as Lua, with `locals` as its globals.
local function run(code, page, locals)
  local chunk = assert(loadstring(code, "@" .. page .. ".md"))
  return setfenv(chunk, setmetatable(locals or {}, { __index = _G }))()
end

function tests.test_every_block_compiles()
  each("```lua\n(.-)```", function(code, page) assert(loadstring(code, "@" .. page .. ".md")) end)
end

function tests.test_tensors_and_gradients()
  local lines = {}
  local function print_line(...) lines[#lines + 1] = { ... } end
  local blocks = {}
  for code in pages.tensors:gmatch "```lua\n(.-)```" do blocks[#blocks + 1] = code end
  run(blocks[1] .. "\nassert(w.grad)", "tensors", { print = print_line })
  is_true(type(lines[1][1]) == "number" and lines[1][2].is_tensor)
  local x = pg.tensor { 2, 3 }
  x.requires_grad = true
  run(blocks[2] .. "\nreturn cube", "tensors")(x):sum():backward()
  check.close(x.grad, { 12, 27 }, check.f32)
end

function tests.test_modules()
  local model = run(pages.modules:match "```lua\n(.-)```" .. "\nreturn model", "modules")
  check.equal(model(pg.zeros { 2, 64 }).shape, { 2, 256 })
end

function tests.test_the_recipe_of_the_page_trains()
  local text = (os.getenv "SCRATCH" or "build") .. "/book.txt"
  fs.write(text, ("the cat sat on the mat. "):rep(400))
  local recipe = run(pages.recipe:match "```lua\n(.-)```", "recipe")
  recipe.data.text = text
  local folder = (os.getenv "SCRATCH" or "build") .. "/help-run"
  fs.remove(folder)
  local args = { "--model.blocks=1", "--model.width=32", "--model.context=32", "--data.batch=4",
                 "--optim.rate.peak=3e-4", "--optim.rate.warmup=1", "--steps=2", "--run=" .. folder }
  local code = require("pg.recipe").run(recipe, { path = "recipe.md", text = "", args = args })
  is_true(code == nil or code == 0 or code == true, tostring(code))
  for name in pages.runs:gmatch "%f[%w]([%w_]+%.[%l]+)`" do
    local saved = name:find "safetensors" or name:find "manifest"
    is_true(fs.exists(folder .. (saved and "/checkpoints/step-00000002/" or "/") .. name), name)
  end
  check.equal(#fs.glob(folder .. "/events.out.tfevents.*"), 1)
  local line = pg.json.decode((fs.read(folder .. "/metrics.jsonl"):match "[^\n]+"))
  local row = pages.runs:match "| `metrics.jsonl` | an object a step: ([^|]+), val_loss"
  for name in row:gmatch "[%w_]+" do
    is_true(line[name] ~= nil or name:find "^mfu_" ~= nil, "runs.md tells of " .. name .. ", no line has it")
  end
  fs.remove(folder)
end

function tests.test_names_that_start_with_pg()
  local unknown = {}
  each("pg(%.[%a_][%w_.]*)", function(path, page)
    local value = pg
    for name in path:gmatch "[%w_]+" do value = type(value) == "table" and value[name] or nil end
    if value == nil and not path:find "^%.md" then unknown[#unknown + 1] = ("%s.md: pg%s"):format(page, path) end
  end)
  check.equal(unknown, {})
  for name in pages.modules:match "Layers: (.-)%(":gmatch "[%a]+" do
    is_true(pg.nn[name] ~= nil, "modules.md: pg.nn." .. name)
  end
  for name in pages.modules:match "pg%.rate%.([%a_ |]+)":gmatch "[%a_]+" do
    is_true(pg.rate[name] ~= nil, "modules.md: pg.rate." .. name)
  end
end

-- Methods as the pages call them: axes, tensors, loaders.
function tests.test_methods()
  local axis = pg.mesh.ready().dp
  for name in pages.ranks:gmatch "`:([%a_]+)%(" do
    is_true(axis[name] ~= nil, "ranks.md: an axis has no " .. name)
  end
  each("[`%s]t:([%a_]+)", function(name, page)
    is_true(pg.Tensor[name] ~= nil, page .. ".md: a tensor has no " .. name)
  end)
end

function tests.test_verbs_and_topics()
  each("`pgrun ([%l]+)", function(verb, page)
    is_true(fs.exists("lua/pg/cmd/" .. verb .. ".lua"), page .. ".md: pgrun " .. verb)
  end)
  each("`help ([%l]+)`", function(topic, page) is_true(pages[topic] ~= nil, page .. ".md: help " .. topic) end)
  local repl = require "pg.repl"
  each('`help "([%w_.]+)"', function(name, page)
    local text, known = repl.describe(name)
    is_true(known and #text > 40, page .. ".md: help " .. name .. ": " .. text)
    is_true(not text:find "^a table with", page .. ".md: help " .. name .. ": " .. text)
  end)
end

-- Every option stands in options.c, in a recipe's fields or in the loop; every variable is read somewhere.
function tests.test_options_and_variables()
  if not fs.exists "runtime" then check.skip "what make dist makes has no C sources" end
  local source = {}
  for _, pattern in ipairs { "runtime/*/*.c", "kernels/*.c", "lua/pg/*.lua", "lua/pg/*/*.lua" } do
    for _, path in ipairs(fs.glob(pattern)) do source[#source + 1] = fs.read(path) end
  end
  source = table.concat(source, "\n")
  each("[`%s]%-%-([%l]+)", function(name, page)
    local there = source:find('"--' .. name, 1, true) or source:find("%f[%w_]" .. name .. "%s*=")
    is_true(there ~= nil, page .. ".md: --" .. name)
  end)
  each("`([%u_]+)[=`]", function(name, page)
    if page == "environment" then is_true(source:find(name, 1, true) ~= nil, "nothing reads " .. name) end
  end)
  for _, call in ipairs { "getenv", "value_of" } do -- value_of: in ranks.c
    for name in source:gmatch(call .. '[ %(]*"(PG[%u_]+)"') do
      is_true(pages.environment:find(name, 1, true) ~= nil, "environment.md does not tell of " .. name)
    end
  end
end

check.run(tests)
