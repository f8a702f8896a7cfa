-- training.lua: what the tests of the loop share: a small text, a small recipe, its metrics.
local fs = require "pg.fs"
local json = require "pg.json"

local training = {}
training.scratch = os.getenv "SCRATCH" or "build/tests/by-hand" -- the runner gives one
fs.mkdir(training.scratch)

--- training.text(words) -> the file of a text with some order in it, the same on every machine.
function training.text(words)
  local path = ("%s/text-%d.txt"):format(training.scratch, words)
  local list, state = {}, 1
  for i = 1, words do
    state = (state * 1103515245 + 12345) % 2^31
    list[i] = ({ "red", "green", "blue", "black", "white" })[math.floor(state / 2^16) % 5 + 1]
  end
  if require("pg.host").rank == 0 then fs.write(path, table.concat(list, " ")) end
  if pg.ranks() > 1 then pg.barrier() end
  return path
end

--- training.recipe(changes) -> a recipe of 29,000 parameters; changes replace its fields.
function training.recipe(changes)
  local r = {
    model = require "models.llama" { blocks = 1, width = 32, heads = 2, vocab = 259, context = 32 },
    data  = { text = training.text(500), batch = 8 },
    optim = { "adamw", clip = 1.0, rate = pg.rate.cosine { peak = 1e-3, warmup = 3 } },
    steps = 6, log = { every = 1000 },
  }
  for k, v in pairs(changes or {}) do r[k] = v end
  return r
end

--- training.run(changes, name, args) -> records of metrics.jsonl, the run's folder, the exit code.
function training.run(changes, name, args)
  local folder = training.scratch .. "/" .. name
  local all = { "--run=" .. folder }
  for _, a in ipairs(args or {}) do all[#all + 1] = a end
  local code = require("pg.recipe").run(training.recipe(changes), { path = "tests/training.lua", args = all })
  if pg.ranks() > 1 then pg.barrier() end
  return training.records(folder), folder, code
end

--- training.records(folder) -> the objects of its metrics.jsonl.
function training.records(folder)
  local records = {}
  for line in fs.read(folder .. "/metrics.jsonl"):gmatch "[^\n]+" do records[#records + 1] = json.decode(line) end
  return records
end

--- training.column(records, key) -> the values of one key.
function training.column(records, key)
  local out = {}
  for i, r in ipairs(records) do out[i] = r[key] end
  return out
end

-- ---- the same training in every layout ----

-- A token file where whole samples are padding, so that some ranks have nothing that counts.
local function padded()
  local path, ids = training.scratch .. "/padded.bin", {}
  for i = 0, 96 * 32 do ids[i + 1] = math.floor(i / 32) % 4 < 2 and 1 + i * i % 7 or 0 end
  if require("pg.host").rank == 0 then fs.write(path, string.char(unpack(ids))) end
  if pg.ranks() > 1 then pg.barrier() end
  return path
end

-- Cases by name: { steps of it, changes(o) of the recipe } or { steps, script = f(o, steps) -> records }.
-- o: batch, sequences of a step; deep: with blocks for several stages, heads for several ranks; layout.
local cases = {}
local function text(o, more)
  more = more or {}
  more.text, more.batch = training.text(500), o.batch
  return more
end
local function llama(o)
  if o.deep then
    return require "models.llama" { blocks = 4, width = 32, heads = 4, kv_heads = 2, vocab = 259, context = 32 }
  end
end
local function gpt2(o) -- a tied head, dropout in every place
  return require "models.gpt2" { blocks = o.deep and 4 or 2, width = 32, heads = o.deep and 4 or 2, vocab = 259,
                                 context = 32, dropout = 0.1 }
end
cases.plain = { 12, function(o) return { data = text(o), model = llama(o) } end }
cases.micro = { 100, function(o) return { data = text(o), model = llama(o), micro = 1 } end }
cases.recompute = { 12, function(o) return { data = text(o), model = llama(o), recompute = "block" } end }
cases.padded = { 12, function(o)
  return { data = { tokens = padded(), dtype = "u8", pad = 0, batch = o.batch }, model = llama(o) }
end }
cases.held_out = { 12, function(o)
  return { eval = { every = 4 }, micro = 1, data = text(o, { held_out = 0.3 }), model = llama(o) }
end }
cases.dropout = { 100, function(o) return { data = text(o), model = gpt2(o) } end }
cases.dropout_micro = { 12, function(o)
  return { data = text(o), model = gpt2(o), micro = 1, recompute = "block" }
end }
cases.own_loss = { 12, function(o)
  return { data = text(o), model = gpt2(o), micro = 2, loss = function(model, batch)
    return pg.cross_entropy(model(batch.tokens), batch.targets, { step = batch.step })
  end }
end }

-- A plain script; in a layout of more than dp through pg.parallel.
local function script(o, steps)
  local model, run = not o.layout and pg.build(gpt2(o), { seed = 3 }), nil
  if o.layout then run = pg.parallel(gpt2(o), o.layout, { seed = 3 }) end
  local optim = pg.optim.adamw((run or model):parameters(), { rate = 1e-3, clip = 1 })
  local data = pg.data.text(training.text(500), { context = 32, batch = o.batch, seed = 4 })
  local records, tokens = {}, 0
  for step, batch in data:steps(steps) do
    local loss
    if run then loss = run:gradients(batch)
    else
      loss = model:loss(batch)
      loss:backward()
      loss = loss:item()
    end
    tokens = tokens + o.batch * 32
    records[step] = { step = step, loss = loss, grad_norm = optim:step(), tokens = tokens }
  end
  return records
end
cases.script = { 100, script = script }

--- training.case(name, folder, o) -> records of that case.  o: as in `cases`; o.more: further changes of the recipe.
function training.case(name, folder, o)
  local case = cases[name]
  if not case.script then
    local changes = case[2](o)
    for key, value in pairs(o.more or {}) do changes[key] = value end
    changes.steps, changes.layout = changes.steps or case[1], o.layout
    return (training.run(changes, folder))
  end
  local records, lines = case.script(o, case[1]), {}
  for i, r in ipairs(records) do lines[i] = json.encode(r) end
  if pg.rank() == 0 then
    fs.mkdir(training.scratch .. "/" .. folder)
    fs.write(training.scratch .. "/" .. folder .. "/metrics.jsonl", table.concat(lines, "\n") .. "\n")
  end
  return records
end

-- The same case in a single process, started by rank 0.
local function single(name, o)
  local folder = "single-" .. name
  if pg.rank() == 0 then
    local alone = "env -u RANK -u WORLD_SIZE -u LOCAL_RANK -u LOCAL_WORLD_SIZE -u PG_SHM_FD"
    local code = ([[require("tests.training").case("%s", "%s", { batch = %d, deep = %s })]]):format(
      name, folder, o.batch, tostring(o.deep))
    local command = ("%s %s -e '%s'"):format(alone, os.getenv "PGRUN", code)
    assert(os.execute(command) == 0, name .. " in a single process failed")
  end
  pg.barrier()
  return training.records(training.scratch .. "/" .. folder)
end

-- Of DESIGN.md 3: relative to the single process, by step.
local function tolerance(key, step)
  if key == "grad_norm" then return step <= 10 and 1e-5 or 2e-4 end
  return step == 1 and 1e-6 or 1e-5
end

--- training.agree(name, got, want): records of the same training in two layouts: raises at the first step that differs.
function training.agree(name, got, want)
  assert(#got == #want, ("%s: %d steps, in a single process %d"):format(name, #got, #want))
  for step = 1, #want do
    for _, key in ipairs { "loss", "grad_norm", "val_loss" } do
      local a, b = got[step][key], want[step][key]
      assert((a == nil) == (b == nil), ("%s, step %d: %s is missing"):format(name, step, key))
      local near = not a or math.abs(a - b) <= tolerance(key, step) * math.abs(b)
      if not near then -- or not a number
        error(("%s, step %d: %s is %.9g, in a single process %.9g"):format(name, step, key, a, b))
      end
    end
    assert(got[step].tokens == want[step].tokens, name .. ": tokens differ")
  end
end

--- training.compare{ layout =, batch =, cases = }: cases (all) in this layout against the same in a single process.
-- layout: fields of a recipe's layout (plain data parallel); batch (12, which 1, 2, 3 and 4 ranks divide): sequences
-- of a step.
function training.compare(o)
  o = o or {}
  local names, batch = o.cases, o.batch or 12
  if not names then
    names = {}
    for name in pairs(cases) do names[#names + 1] = name end
    table.sort(names) -- all ranks in one order
  end
  for _, name in ipairs(names) do
    local case = { batch = batch, deep = o.layout ~= nil, layout = o.layout }
    local want = single(name, case)
    training.agree(name, training.case(name, "layout-" .. name, case), want)
  end
end

return training
