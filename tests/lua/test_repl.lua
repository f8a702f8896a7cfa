-- test_repl.lua: the prompt's Lua half: printing, completion, help, and lines fed without a terminal.
local check = require "tests.check"
local repl = require "pg.repl"
local equal = check.equal
local function holds(text, part, plain) check.is_true(text:find(part, 1, plain) ~= nil) end
local tests = {}

function tests.test_show()
  equal(repl.show(3), "3")
  equal(repl.show "text", "text")
  equal(repl.show {}, "{}")
  equal(repl.show { 1, "two", { 3 }, x = {}, ["a b"] = true }, '{1, "two", {...}, ["a b"] = true, x = {}}')
  equal(repl.show(setmetatable({}, { __tostring = function() return "mine" end })), "mine")
  local long = {}
  for i = 1, 100 do long[i] = i end
  holds(repl.show(long), "... 68 more", true)
end

function tests.test_complete()
  equal(repl.complete "string.re", { "string.rep", "string.reverse" })
  holds(table.concat(repl.complete "p", " "), "%f[%w]pg%f[%W]")
  equal(repl.complete "nothing.of.this", {})
  local class = { method = function() end, field = 1 }
  class.__index = class
  _G.thing = setmetatable({ own = 1, _hidden = 2 }, class)
  equal(repl.complete "thing.", { "thing.field", "thing.method", "thing.own" })
  equal(repl.complete "thing._", { "thing.__index", "thing._hidden" })
  equal(repl.complete "thing:", { "thing:method" })
  _G.thing = nil
end

function tests.test_help()
  local text = repl.describe(repl.show)
  holds(text, "show(value) -> text", true)
  holds(text, "lua/pg/repl.lua:", true)
  local _, known = repl.describe "no_such_topic"
  equal(known, false)
end

-- Run lines as the prompt would; returns what they left in the table `out` and whether all went well.
local function feed(lines)
  local native, i = { terminal = false }, 0
  function native.read()
    i = i + 1
    return lines[i]
  end
  function native.guard(f) return pcall(f) end
  function native.ended() return false end
  _G.out = {}
  local well = repl.run(native)
  local out = _G.out
  _G.out, _G.help = nil, nil
  return out, well
end

function tests.test_lines()
  local compiled = jit.status()
  local out, well = feed { "for i = 1, 2 do", "out[i] = i * 10", "end", "out.x = [[a", "b]]", "out.y = 1 -- end" }
  equal(out, { 10, 20, x = "a\nb", y = 1 })
  equal(well, true)
  equal(jit.status(), compiled)
  out, well = feed { "x = = 1", "error 'no'", "out.after = true" }
  equal(out, { after = true })
  equal(well, false)
end

function tests.test_lines_are_interpreted()
  local out = feed { "out.compiled = jit.status()" }
  equal(out.compiled, false)
end

check.run(tests)
