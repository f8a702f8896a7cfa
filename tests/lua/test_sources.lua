-- test_sources.lua: what a recipe consists of, whether it has changed, the same text for all, and the journal.
local check = require "tests.check"
local fs = require "pg.fs"
local journal = require "pg.live.journal"
local sources = require "pg.live.sources"
local equal = check.equal
local tests = {}

local scratch = (os.getenv "SCRATCH" or "build/tests/by-hand") .. "/sources"
fs.mkdir(scratch .. "/parts")
package.path = scratch .. "/?.lua;" .. package.path

local function put(name, text) fs.write(scratch .. "/" .. name, text) end
local function holds(text, part) check.is_true(tostring(text):find(part, 1, true) ~= nil, tostring(text)) end

local SCRIPT = [[
#!/usr/bin/env pgrun
local rule = require "parts.rule"
counter = (counter or 0) + 1
return { model = require "models.llama" { blocks = rule.blocks }, count = counter, rule = rule,
  json = require "pg.json" }
]]

local function prepare()
  put("recipe.lua", SCRIPT)
  put("parts/rule.lua", 'local deep = require "parts.deep"\nreturn { blocks = deep.blocks * 2 }\n')
  put("parts/deep.lua", "return { blocks = 1, name = ... }\n")
  return scratch .. "/recipe.lua"
end

function tests.test_files()
  local list = sources.collect(prepare())
  local names = {}
  for i, f in ipairs(list) do names[i] = f.name:gsub("^.*/sources/", "") end
  equal(names, { "recipe.lua", "parts/rule.lua", "parts/deep.lua", "models/llama.lua" })
  equal(list[3].module, "parts.deep")
end

function tests.test_load_beside_the_running()
  local path = prepare()
  local running = require "parts.rule"
  local list = sources.unpack(sources.pack(sources.collect(path)))
  put("parts/deep.lua", "return { blocks = 50 }\n") -- only the texts count
  local given, modules = sources.load(list)
  equal(given.model.blocks, 2)
  equal(given.count, 1)
  equal(_G.counter, nil)
  check.is_true(given.rule == modules["parts.rule"] and given.rule ~= running)
  check.is_true(given.json == require "pg.json")
  equal(modules["parts.deep"].name, "parts.deep")
  check.is_true(require "parts.rule" == running)
  sources.commit(modules)
  check.is_true(require "parts.rule" == given.rule)
  package.loaded["parts.rule"], package.loaded["parts.deep"] = nil, nil
end

function tests.test_mistakes()
  local path = prepare()
  put("parts/deep.lua", "return {\n  blocks = = 2 }\n")
  holds(select(2, pcall(sources.collect, path)), "parts/deep.lua:2: unexpected symbol near '='")
  put("parts/deep.lua", "local x\nreturn { blocks = x.y }\n")
  holds(select(2, pcall(sources.collect, path)), "parts/deep.lua:2: attempt to index local 'x'")
  put("parts/deep.lua", 'return require "parts.rule"\n')
  holds(select(2, pcall(sources.collect, path)), "requires itself")
  put("parts/deep.lua", 'return require "parts.nowhere"\n')
  holds(select(2, pcall(sources.collect, path)), "module 'parts.nowhere' not found")
  put("recipe.lua", "local x = 1\n")
  holds(select(2, pcall(sources.collect, path)), "recipe.lua: it returns nothing; a recipe is a table")
  holds(select(2, pcall(sources.collect, scratch .. "/none.lua")), "none.lua: no such file")
  local given, message = sources.load { { name = "a.lua", text = "return {}\nx y" } }
  equal(given, nil)
  holds(message, "a.lua:2: ")
  local offer, why, rank = sources.offer(path)
  equal(offer, nil)
  equal(rank, 0)
  holds(why, "returns nothing")
end

function tests.test_offer()
  local offer = sources.offer(prepare())
  equal(offer.recipe.model.blocks, 2)
  equal(#offer.hash, 16)
  equal(offer.text, SCRIPT)
  local again = sources.offer(scratch .. "/recipe.lua")
  equal(again.hash, offer.hash)
  put("parts/deep.lua", "return { blocks = 1, name = 2 }\n")
  check.is_true(sources.offer(scratch .. "/recipe.lua").hash ~= offer.hash)
end

function tests.test_changes()
  local watch = sources.watch(sources.collect(prepare()))
  equal(watch:changed(0), nil)
  put("parts/deep.lua", "return { blocks = 3 }\n")
  equal(watch:changed(1), nil) -- it may not be whole yet
  equal(watch:changed(1.1), nil)
  holds(watch:changed(1.3), "parts/deep.lua")
  equal(watch:changed(1.4), nil) -- once
  put("parts/deep.lua", "return { blocks = 3 }\n") -- saved again, the same
  equal(watch:changed(2), nil)
  equal(watch:changed(3), nil)
  put("recipe.lua", SCRIPT .. "--")
  equal(watch:changed(4), nil)
  put("recipe.lua", SCRIPT .. "-- more") -- still being written
  equal(watch:changed(4.5), nil)
  holds(watch:changed(5), "recipe.lua")
  fs.remove(scratch .. "/recipe.lua")
  equal(watch:changed(6), nil)
  equal(watch:changed(7), nil)
  put("recipe.lua", SCRIPT)
  equal(watch:changed(8), nil)
  holds(watch:changed(9), "recipe.lua")
end

function tests.test_torn_file()
  put("torn.lua", "one")
  local n = 0
  local text = sources.read(scratch .. "/torn.lua", function()
    n = n + 1
    if n < 3 then put("torn.lua", "version " .. n) end
  end)
  equal(text, "version 2")
  local ok, message = pcall(sources.read, scratch .. "/torn.lua", function()
    n = n + 1
    put("torn.lua", "version " .. n)
  end)
  equal(ok, false)
  holds(message, "changes while it is read")
end

function tests.test_journal()
  local folder = scratch .. "/run"
  fs.mkdir(folder)
  equal(journal.read(folder), {})
  journal.write(folder, { step = 3, accepted = true, hash = "ab", text = "return {}\n" })
  journal.write(folder, { step = 5, accepted = false, reason = "models/x.lua:12: no", rank = 1, text = "\255\n" })
  journal.write(folder, { step = 6, accepted = false, reason = "layout.tp may not change", field = "layout.tp" })
  local file = io.open(folder .. "/journal.jsonl", "a")
  file:write '{"step": 7, "acce'
  file:close()
  local entries = journal.read(folder)
  equal(#entries, 3)
  equal(entries[1].text, "return {}\n")
  equal(entries[2].place, "models/x.lua:12")
  equal(entries[2].text, "\\xff\n")
  equal(entries[3].place, nil)
  equal(entries[3].field, "layout.tp")
  check.is_true(not pcall(journal.write, folder, { stepp = 1 }))
end

check.run(tests)
