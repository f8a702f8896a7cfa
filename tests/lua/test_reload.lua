-- test_reload.lua: pg.reload: new functions wherever the old ones are called from, state kept, hooks once.
local check = require "tests.check"
local fs = require "pg.fs"
local equal = check.equal
local tests = {}

local scratch = (os.getenv "SCRATCH" or "build/tests/by-hand") .. "/reload"
fs.mkdir(scratch)
package.path = scratch .. "/?.lua;" .. package.path

local function put(name, text) fs.write(scratch .. "/" .. name .. ".lua", text) end

-- A module of that text, loaded afresh.
local function load_first(name, text)
  package.loaded[name] = nil
  put(name, text)
  return require(name)
end

local RULE = [[
local M = { state = { calls = 0 }, rates = { 1, 2 } }
local function scale() return %d end
function M.rate(x)
  M.state.calls = M.state.calls + 1
  return x * scale()
end
function M.later() return function() return scale() end end
return M
]]

function tests.test_upvalues_locals_tables()
  local m = load_first("rule", RULE:format(2))
  local rate = m.rate                     -- a local of a running function
  local caller = function(x) return rate(x) end -- an upvalue
  local hooks = { rate }                  -- a table
  local state, rates = m.state, m.rates
  equal({ rate(1), caller(1), hooks[1](1) }, { 2, 2, 2 })
  put("rule", RULE:format(3))
  local again = pg.reload "rule"
  check.is_true(again == m and require "rule" == m)
  equal({ rate(1), caller(1), hooks[1](1), m.rate(1) }, { 3, 3, 3, 3 })
  check.is_true(m.state == state and m.rates == rates)
  equal(state.calls, 7)
end

function tests.test_compiled_loop()
  local m = load_first("loop", "return { f = function() return 1 end }")
  local f, sum = m.f, 0
  for i = 1, 20000 do
    sum = sum + f()
    if i == 10000 then
      put("loop", "return { f = function() return 100 end }")
      pg.reload "loop"
    end
  end
  equal(sum, 10000 + 100 * 10000)
end

-- The same where the function is called from compiled code that does not reload itself.
function tests.test_compiled_caller()
  local m = load_first("leaf", "return { f = function() return 1 end }")
  local f = m.f
  local function many()
    local sum = 0
    for _ = 1, 1000 do sum = sum + f() end
    return sum
  end
  for _ = 1, 50 do many() end
  put("leaf", "return { f = function() return 2 end }")
  pg.reload "leaf"
  equal(many(), 2000)
  put("leaf", "return { f = function() return 3 end }")
  pg.reload "leaf" -- twice
  equal(many(), 3000)
end

function tests.test_old_closure_calls_new_helper()
  local m = load_first("rule", RULE:format(2))
  local closure = m.later()
  put("rule", RULE:format(5))
  pg.reload "rule"
  equal(closure(), 5)
end

function tests.test_fields()
  local m = load_first("fields", "return { a = 1, b = { x = 1, y = 2 }, state = { n = 0 }, gone = true }")
  local b = m.b
  m.state.n = 9
  put("fields", "return { a = 2, b = { x = 3 }, state = { n = 1, fresh = 1 }, new = { 1 } }")
  pg.reload "fields"
  equal(m, { a = 2, b = { x = 3 }, state = { n = 9 }, new = { 1 } })
  check.is_true(m.b == b)
end

function tests.test_class()
  local text = [[
local nn = require "pg.nn"
local Twice = nn.class "Twice"
function Twice:init(o) self.factor = o.factor end
function Twice:forward(x) return x * self.factor + %d end
return { Twice = Twice }]]
  local m = load_first("layers", text:format(0))
  local layer = m.Twice { factor = 2 }
  equal(layer(pg.tensor { 1 }):totable(), { 2 })
  put("layers", text:format(10))
  pg.reload "layers"
  equal(layer(pg.tensor { 1 }):totable(), { 12 })
  equal(m.Twice { factor = 3 }(pg.tensor { 1 }):totable(), { 13 })
end

function tests.test_hooks_fire_once()
  local hooks = {}
  package.loaded.registry = hooks
  local text = 'local M = { state = { n = 0 } }\nfunction M.fire() M.state.n = M.state.n + %d end\n'
    .. 'table.insert(require "registry", M.fire)\nreturn M\n'
  local m = load_first("hooked", text:format(1))
  for _, f in ipairs(hooks) do f() end
  equal(m.state.n, 1)
  for round = 1, 2 do
    put("hooked", text:format(10 * round))
    pg.reload "hooked"
    equal(#hooks, 1)
  end
  for _, f in ipairs(hooks) do f() end
  equal(m.state.n, 21)
  package.loaded.registry = nil
end

function tests.test_coroutines()
  local m = load_first("co", "return { f = function() return 1 end }")
  local co = coroutine.wrap(function()
    local f = m.f
    while true do coroutine.yield(f()) end
  end)
  equal(co(), 1)
  local f = m.f
  put("co", "return { f = function() return 2 end }")
  coroutine.wrap(function() pg.reload "co" end)() -- from inside another one
  equal({ co(), f() }, { 2, 2 })
end

function tests.test_mistakes_change_nothing()
  local m = load_first("wrong", "return { f = function() return 1 end }")
  put("wrong", "return {\n f = = 2 }")
  local ok, message = pcall(pg.reload, "wrong")
  check.is_true(not ok and message:find("wrong.lua:2: unexpected symbol", 1, true) ~= nil, message)
  put("wrong", "local x = nil\nreturn { f = x.y }")
  ok, message = pcall(pg.reload, "wrong")
  check.is_true(not ok and message:find("wrong.lua:2: attempt to index local 'x'", 1, true) ~= nil, message)
  equal(m.f(), 1)
  check.throws(function() pg.reload("pg.nn") end, "reload: pg.nn is pgrun's own")
  check.throws(function() pg.reload("string") end, "reload: string is pgrun's own")
  check.throws(function() pg.reload("not_there") end, "reload: no module not_there has been loaded")
  check.throws(function() pg.reload({}) end, "reload: the name of a module is wanted, got table")
  fs.remove(scratch .. "/wrong.lua")
  check.throws(function() pg.reload("wrong") end, "reload: there is no file for module wrong any more")
end

-- A module that is a function.
function tests.test_function_module()
  local f = load_first("single", "return function() return 1 end")
  put("single", "return function() return 2 end")
  local new = pg.reload "single"
  equal({ f(), new(), require "single" () }, { 2, 2, 2 })
end

check.run(tests)
