-- ranks: 4
-- limit: 240
-- Recipes that cannot be taken, offered while a run goes on, one kind after another: it goes on, its losses are those
-- of a run that was never asked, to the bit, and each reason is told.  SWAPS=500: so many (60).
local fs = require "pg.fs"
local swaps = require "tests.swaps"
local N = tonumber(os.getenv "SWAPS") or 60
local AT_ONCE = 8 -- between two steps

-- Endless code is given up early.
local getenv = os.getenv
function os.getenv(name) return name == "PGRUN_TRIAL_LIMIT" and "2" or getenv(name) end -- luacheck: ignore 122

-- Random numbers of every kind: dropout by name, dropout by call.
swaps.base {
  model = 'require "models.gpt2" { blocks = 1, width = 32, heads = 2, vocab = 259, context = 32, dropout = 0.1 }',
  more = [[micro = 1, loss = function(model, batch)
    return pg.mul(model:loss(batch), pg.mean(pg.dropout(pg.ones { 64 }, 0.1)))
  end,]] }

local function with(body) return swaps.text { more = "micro = 1,\n" .. body } end
local function loss(body)
  return with("loss = function(model, batch)\n" .. body .. "\nreturn (model:loss(batch))\nend,")
end

-- { name, text(number), what the reason must hold, live = true: it fails in its first step }
local kinds = {
  { "syntax", function() return "return {\n  steps = = 3 }" end, ":2: unexpected symbol near '='" },
  { "half a file", function() return swaps.text():sub(1, 90) end, "near '<eof>'" },
  { "nothing", function() return "" end, "it returns nothing; a recipe is a table" },
  { "error in the file on one rank", function(i)
    return ("if pg.rank() == %d then error 'not here' end\n"):format(i % 4) .. swaps.text()
  end, ":1: not here" },
  { "unknown field", function() return with "lose = 1," end, "unknown field lose, did you mean loss?" },
  { "wrong type", function() return swaps.text { steps = '"many"' } end, 'steps is "many"; it must be an integer' },
  { "layout", function() return with "layout = { tp = 2 }," end,
    "layout.dp was 4, is 2; it cannot change while a run goes on" },
  { "zero", function() return with "layout = { zero = 1 }," end, "--resume=RUN with the new recipe goes on so" },
  { "width", function() return swaps.text { model = swaps.model:gsub("width = 32", "width = 64") } end,
    "model.width was 32, is 64" },
  { "another model", function()
    return swaps.text { model = 'require "models.llama" { blocks = 1, width = 32, heads = 2, context = 32 }' }
  end, "model was gpt2, is llama" },
  { "parameters", function()
    return swaps.text { model = 'function() return require "models.llama" { blocks = 1, width = 32, heads = 2 } end' }
  end, "model: parameter model.embed_tokens.weight is new" },
  { "precision", function() return with 'precision = "bf16",' end, 'precision was "fp32", is "bf16"' },
  { "seed", function() return with "seed = 7," end, 'seed was "0", is "7"' },
  { "optimiser", function() return swaps.text { optim = '"sgd", rate = 1e-3' } end, 'optim was "adamw", is "sgd"' },
  { "steps behind", function() return swaps.text { steps = "1" } end, "steps is 1, and step" },
  { "micro", function() return swaps.text { more = "micro = 3," } end, "micro 3 does not divide a rank's 2 sequences" },
  { "data", function() return swaps.text { data = 'text = "/nowhere.txt", batch = 8' } end, "/nowhere.txt" },
  { "module", function() return 'require "nowhere"\n' .. swaps.text() end, "module 'nowhere' not found" },
  { "shape", function() return loss "local _ = pg.matmul(pg.zeros { 2, 3 }, pg.zeros { 2, 3 })" end,
    "inner sizes 3 and 2 differ" },
  { "loss of no tensor", function() return with "loss = function() return 3 end," end, "loss returned 3; it must" },
  { "rate", function() return swaps.text { optim = '"adamw", rate = function() return "high" end' } end,
    "rate: at step" },
  { "endless file", function() return "while true do pcall(function() while true do end end) end" end,
    ":1: stopped: it ran for more than" },
  { "endless loss on one rank", function(i)
    return loss(("while pg.rank() == %d do pcall(model.loss, model, batch) end"):format(i % 4))
  end, "stopped: it ran for more than" },
  { "leaves", function() return "os.exit(0)" end, "os.exit" },
  { "moving", function() return swaps.text() end, "changes while it is read" },
  { "first step, one rank", function(i)
    return loss(("if pg.zeros({ 1 }):item() == 0 and pg.rank() == %d then error 'late' end"):format(i % 4))
  end, "late", live = true },
  { "second micro-batch, one rank", function(i)
    return "local n = 0\n" .. loss(([[local zero = pg.zeros({ 1 }):item()
    n = n + 1
    if n + zero == 2 and pg.rank() == %d then local _ = batch.nothing.here end]]):format(i % 4))
  end, "attempt to index", live = true },
  { "gradient, one rank", function(i)
    return ([[local bad = pg.op { name = "bad", forward = function(_, x) return x:clone() end,
      grad = function(_, dy) if pg.rank() == %d then error "no gradient" end return dy end }
      ]]):format(i % 4) .. loss "local _ = pg.zeros({ 1 }):item()\nif true then return bad((model:loss(batch))) end"
  end, "no gradient", live = true },
  { "rate of the first step, one rank", function(i)
    return swaps.text { optim = ([["adamw", rate = function(state)
      state.mine = 1
      if state.tokens == state.step * 256 and pg.rank() == %d then error "with its tokens" end
      return 1 end]]):format(i % 4) }
  end, "with its tokens", live = true },
}

-- What is looked at before which step, the kinds in turn.
local function plan()
  local offers, wants, step, here = {}, {}, 4, 0
  for i = 1, N do
    local kind = kinds[(i - 1) % #kinds + 1]
    offers[step] = offers[step] or {}
    table.insert(offers[step], kind[2](i))
    wants[i], here = kind, here + 1
    if kind.live or here == AT_ONCE then step, here = step + 1, 0 end
  end
  return offers, wants, step + 2
end

-- A file whose text differs at every look.
local read, looks = fs.read, 0
function fs.read(path)
  if not path:find "moving" then return read(path) end
  looks = looks + 1
  return read(path) .. ("-- %d\n"):format(looks)
end

local offers, wants, steps = plan()
swaps.steps = tostring(steps)
for _, list in pairs(offers) do -- they know the number of steps only now
  for k, text in ipairs(list) do list[k] = text:gsub("steps = 12,", ("steps = %d,"):format(steps)) end
end
local at = 0
local function path(text)
  at = at + 1
  local name = ("%s/%s%d.lua"):format(swaps.scratch, wants[at][1] == "moving" and "moving" or "broken", at)
  fs.write(name, text)
  return name
end

local want = swaps.run("alone", swaps.text())
local began = swaps.time()
local got, answers = swaps.run("asked", swaps.text(), { offers = offers, path = path })
local seconds = swaps.time() - began
swaps.same(got, want)
if pg.rank() == 0 then
  assert(#answers == N, ("%d answers to %d offers"):format(#answers, N))
  for i, a in ipairs(answers) do
    local kind = wants[i]
    local good = a.kind == "E" and a.text:find(kind[3], 1, true)
    assert(good, ("%s: expected %q, got %s %s"):format(kind[1], kind[3], a.kind, a.text))
  end
  local journal = require("pg.live.journal").read(swaps.scratch .. "/asked")
  assert(#journal == N)
  for i, entry in ipairs(journal) do
    assert(not entry.accepted and entry.hash and entry.text and entry.step > 1, wants[i][1])
  end
  print(("%d offers in %.1f s, %d steps"):format(N, seconds, #got))
end
pg.barrier()
