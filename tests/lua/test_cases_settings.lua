-- test_cases_settings.lua: values that make no sense, as a person at the prompt types them: each is refused at
-- the line of the script, none is read as something else in silence.
local check = require "tests.check"
local equal, is_true = check.equal, check.is_true
local tests = {}
pg.step.block() -- lives as long as the process

-- f raises at a line of this file, and says part.
local function refused(part, f, ...)
  local arguments, n = { ... }, select("#", ...)
  local message = check.throws(function() return (f(unpack(arguments, 1, n))) end, part)
  is_true(message:find "^tests/lua/test_cases_settings.lua:%d+: " ~= nil, message)
end

function tests.test_shapes()
  refused("a shape is a table of dims, such as { 2, 3 }; got nil", pg.empty)
  refused("a shape is a table of dims, such as { 2, 3 }; got number", pg.zeros, 3)
  refused('a dim is "3", not an integer', pg.ones, { "3" })
  refused("dim 1 is -1, below 0", pg.empty, { -1 })
  refused("a dim is nan", pg.empty, { 0 / 0 })
  refused("more than 2^56 elements", pg.empty, { 2^32, 2^32 })
  refused("more than 2^56 elements", pg.empty, { 0, 2^32, 2^32 })
  refused("more than 2^56 elements", pg.empty, { 2^32, 0, 2^32 })
  refused("out of memory", pg.empty, { 2^50 })
  refused("at most 8 dims, got 9", pg.empty, { 1, 1, 1, 1, 1, 1, 1, 1, 1 })
  refused("dtype f8 is unknown", pg.empty, { 1 }, "f8")
end

function tests.test_views()
  local x = pg.zeros { 4, 8 }
  equal(x:view({ -1, 2, 2 }).shape, { 8, 2, 2 })
  equal(x:view({ -1 }, 30).shape, { 2 })
  refused("[4,8] f32 does not divide into {-1,5}", x.view, x, { -1, 5 })
  refused("leaves two dims open", x.view, x, { -1, -1 })
  refused("does not divide into {0,-1}", x.view, x, { 0, -1 })
  refused("does not divide", x.view, x, { -1 }, 33)
  refused("view: the first element is 1.5, not an integer", x.view, x, { 8 }, 1.5)
  refused("elements 28 to 36", x.view, x, { 8 }, 28)
  refused("elements -8 to 0", x.view, x, { 8 }, -8)
  refused("a shape is a table", x.view, x)
end

function tests.test_numbers_in_and_out()
  local x = pg.zeros { 4, 8 }
  refused("write: [4,8] f32 wants a C array of 128 bytes", x.write, x, { 1, 2 })
  refused("wants a C array of 128 bytes", x.write, x, "too short")
  refused("wants a C array of 128 bytes", x.write, x, nil)
  equal(x:write(("\0\0\128\63"):rep(32)):at(3, 7), 1)
  refused("fill: value is a string", x.fill, x, "a")
  refused("fill: value is a nil", x.fill, x)
  refused("copy_from: a tensor is wanted, got table", x.copy_from, x, { 1 })
  refused("they must hold equally many numbers", x.copy_from, x, pg.ones { 3 })
  refused("to: a dtype is wanted", x.to, x)
  refused("dtype nope is unknown", x.to, x, "nope")
  refused("at: index is 0.5, not an integer", x.at, x, 0.5, 0)
  refused("at: index 1 is 4, outside [0,4)", x.at, x, 4, 0)
  refused("has 32 elements, not one", x.item, x)
  for dtype, wrong in pairs { i32 = 2^31, u8 = 256, i64 = 1.5 } do
    refused("fill: value is", pg.full, { 2 }, wrong, dtype)
    refused("tensor: element 1 is", pg.tensor, { wrong }, dtype)
  end
  refused("fill: value is -1, outside u8", pg.full, { 2 }, -1, "u8")
  equal(pg.full({ 1 }, 255, "u8"):item(), 255)
  equal(pg.full({ 1 }, -2^31, "i32"):item(), -2^31)
end

function tests.test_tables()
  refused("got nil", pg.tensor)
  refused("element 1 is string, not a number", pg.tensor, "abc")
  refused("element 2 is boolean, not a number", pg.tensor, { 1, true })
  refused("rows of 2 and 1 elements", pg.tensor, { { 1, 2 }, { 3 } })
  refused("a row with a hole", pg.tensor, { 1, nil, nil, nil, 5 })
  refused("a name in it, at x", pg.tensor, { 1, x = 2 })
  refused("it is a tensor already", pg.tensor, pg.ones { 2 })
  local itself = {}
  itself[1] = itself
  refused("at most 8 dims; the table is deeper", pg.tensor, itself)
  equal(pg.tensor({}).shape, { 0 })
  equal(pg.tensor({ {}, {} }).shape, { 2, 0 })
end

function tests.test_random_numbers()
  refused("randn: unknown key sede, did you mean seed?", pg.randn, { 2 }, { sede = 3 })
  refused("rand: unknown key std", pg.rand, { 2 }, { std = 3 })
  refused("a key of random numbers is a text, got number", pg.randn, { 2 }, { key = 5 })
  refused("it must be f32, f64, bf16 or f16", pg.randn, { 2 }, { dtype = "i32" })
end

-- The log of a script and the logarithm have one name.
function tests.test_names_of_pg_stay_what_they_are()
  local before = { pg.log, pg.scope, pg.step, pg.data, pg.nn, pg.json, pg.rate, pg.mesh, pg.generate }
  local x = pg.ones { 3 }
  equal({ pg.log, pg.scope, pg.step, pg.data, pg.nn, pg.json, pg.rate, pg.mesh, pg.generate }, before)
  check.close(pg.log(pg.exp(x)), x, check.f32)
  check.close(pg.exp(x):log(), x, check.f32)
  equal(pg.log { step = 1, loss = 2 }, nil)
  refused("log: a table of values is wanted, got number", pg.log, 5)
end

function tests.test_scopes()
  refused("scope: a function is wanted", pg.scope)
  equal(pg.scope(setmetatable({}, { __call = function(_, a) return a end }), 7), 7)
end

function tests.test_layers()
  local nn = pg.nn
  refused("Linear: outputs is missing", nn.Linear, { inputs = 2 })
  refused("Linear: inputs is missing", nn.Linear, { outputs = 2 })
  refused("Linear.outputs is -1; it must be at least 1", nn.Linear, { inputs = 2, outputs = -1 })
  refused("Linear.inputs is 2.5, not an integer", nn.Linear, { inputs = 2.5, outputs = 1 })
  refused("Embedding: width is missing", nn.Embedding, { entries = 3 })
  refused("RMSNorm: width is missing", nn.RMSNorm, {})
  refused("LayerNorm: width is missing", nn.LayerNorm, {})
  refused("Dropout: p is 1, outside [0,1)", nn.Dropout, { p = 1, name = "d" })
  refused("Dropout: p is nil", nn.Dropout, { name = "d" })
  refused("build: nil is neither a description nor a module", pg.build, nil)
end

function tests.test_optimisers()
  local model = pg.build(pg.nn.Linear { inputs = 2, outputs = 2 })
  local function with(o)
    local optim = pg.optim.adamw(model:parameters(), o)
    model(pg.ones { 1, 2 }):sum():backward()
    optim:step()
  end
  refused("parameters are wanted, as model:parameters() gives them; got nil", pg.optim.adamw, nil, { rate = 1 })
  refused("the model has no parameters", pg.optim.adamw, {}, { rate = 1 })
  refused("two numbers are wanted", with, { betas = { 0.9 } })
  refused("two numbers are wanted", with, { betas = { 0.9, "x" } })
  refused("each at least 0 and below 1", with, { betas = { 0.9, 1 } })
  refused("optim.decay is -1; it must be 0 or more", with, { decay = -1 })
  refused("adamw.clip is -1; it must be at least 0", with, { clip = -1 })
  refused("adamw.rate is -1; it must be at least 0", with, { rate = -1 })
  refused("adamw.rate is inf; it must be a finite number", with, { rate = math.huge })
  refused("rate: at step 1 it is -1, not a number of 0 or more", with, { rate = function() return -1 end })
  refused("did you mean rate?", with, { rat = 1 })
end

check.run(tests)
