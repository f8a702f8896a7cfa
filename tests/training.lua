-- training.lua: what the tests of the loop share: a small text, a small recipe, its metrics.
local c = require "pg.c"
local agreement = require "tests.agreement"
local checkpoint = require "pg.checkpoint"
local fs = require "pg.fs"
local json = require "pg.json"
local C, ffi = c.C, c.ffi

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

local BLOCK = 0.05 -- MiB: about a block of these models, so that a layout has several segments to share out

--- training.recipe(changes) -> a recipe of 29,000 parameters; changes replace its fields.
function training.recipe(changes)
  local r = {
    model = require "models.llama" { blocks = 1, width = 32, heads = 2, vocab = 259, context = 32 },
    data  = { text = training.text(500), batch = 8 },
    optim = { "adamw", clip = 1.0, rate = pg.rate.cosine { peak = 1e-3, warmup = 3 } },
    steps = 6, log = { every = 1000 },
  }
  for k, v in pairs(changes or {}) do r[k] = v end
  if r.layout ~= nil and type(r.layout) ~= "table" then return r end
  local layout = { bucket = BLOCK }
  for k, v in pairs(r.layout or {}) do layout[k] = v end
  r.layout = layout
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

--- training.fails(text, changes, name): such a run raises on all ranks, with this text.  Within agree.try, since no
-- rank ends by it: the others would wait for rank 0 to.
function training.fails(text, changes, name)
  require("tests.check").throws(function()
    local ok, message = require("pg.agree").try(training.run, changes, name)
    if not ok then error(message, 0) end
  end, text)
end

training.records = agreement.records

--- training.column(records, key) -> the values of one key.
function training.column(records, key)
  local out = {}
  for i, r in ipairs(records) do out[i] = r[key] end
  return out
end

--- training.heard(f) -> what f returns, the lines of the log meanwhile, which are not printed.
function training.heard(f)
  local log = require "pg.log"
  local lines, text = {}, log.text
  log.text = function(format, ...) lines[#lines + 1] = format:format(...) end
  local ok, result = pcall(f)
  log.text = text
  if not ok then error(result, 0) end
  return result, lines
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
-- o: batch, sequences of a step; deep: so many blocks for several stages, and heads for several ranks; layout.
local cases = {}
local function text(o, more)
  more = more or {}
  more.text, more.batch = training.text(500), o.batch
  return more
end
local function llama(o)
  if o.deep then
    return require "models.llama" { blocks = o.deep, width = 32, heads = 4, kv_heads = 2, vocab = 259, context = 32 }
  end
end
--- training.gpt2(o) -> a small model with a tied head and dropout in every place.  o.deep: as in `cases`.
function training.gpt2(o)
  o = o or {}
  return require "models.gpt2" { blocks = o.deep or 2, width = 32, heads = o.deep and 4 or 2, vocab = 259,
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
cases.dropout = { 100, function(o) return { data = text(o), model = training.gpt2(o) } end }
cases.dropout_micro = { 12, function(o)
  return { data = text(o), model = training.gpt2(o), micro = 1, recompute = "block" }
end }
cases.own_loss = { 12, function(o)
  return { data = text(o), model = training.gpt2(o), micro = 1, loss = function(model, batch)
    return pg.cross_entropy(model(batch.tokens), batch.targets, { step = batch.step })
  end }
end }

-- A plain script; in a layout of more than dp through pg.parallel.
local function script(o, steps)
  local model, run = not o.layout and pg.build(training.gpt2(o), { seed = 3 }), nil
  if o.layout then run = pg.parallel(training.gpt2(o), o.layout, { seed = 3 }) end
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

--- training.weights(folder) -> { name = list of numbers } of a run's newest checkpoint; nil where it has none.
function training.weights(folder)
  local newest = checkpoint.list(folder)[1]
  if not newest then return nil end
  local slot, out = ffi.new "pg_safetensors *[1]", {}
  c.check(C.pg_safetensors_open(slot, newest .. "/model.safetensors"))
  local file, dtype, n, dims = slot[0], ffi.new "int[1]", ffi.new "int[1]", ffi.new "int64_t[8]"
  for i = 0, tonumber(C.pg_safetensors_count(file)) - 1 do
    c.check(C.pg_safetensors_info(file, i, dtype, n, dims))
    local count = 1
    for k = 0, n[0] - 1 do count = count * tonumber(dims[k]) end
    local t = pg.empty({ count }, "f32")
    c.check(C.pg_safetensors_read(file, i, 0, t.raw))
    out[ffi.string(C.pg_safetensors_name(file, i))] = t:totable()
    t:release()
  end
  C.pg_safetensors_close(file)
  return out
end

--- training.case(name, folder, o) -> records of that case, and its last weights (nil of a script).  o: as in `cases`;
-- o.more: further changes of the recipe.
function training.case(name, folder, o)
  local case = cases[name]
  if not case.script then
    local changes = case[2](o)
    changes.save = {}
    for key, value in pairs(o.more or {}) do changes[key] = value end
    changes.steps, changes.layout = changes.steps or case[1], o.layout
    local records, at = training.run(changes, folder)
    return records, training.weights(at)
  end
  local records, lines = case.script(o, case[1]), {}
  for i, r in ipairs(records) do lines[i] = json.encode(r) end
  if pg.rank() == 0 then
    fs.mkdir(training.scratch .. "/" .. folder)
    fs.write(training.scratch .. "/" .. folder .. "/metrics.jsonl", table.concat(lines, "\n") .. "\n")
  end
  return records
end

-- A table of plain values as Lua text.
local function literal(value)
  if type(value) ~= "table" then return type(value) == "string" and ("%q"):format(value) or tostring(value) end
  local parts = {}
  for k, v in pairs(value) do parts[#parts + 1] = ("[%s]=%s"):format(literal(k), literal(v)) end
  return "{" .. table.concat(parts, ",") .. "}"
end

--- training.start(ranks, file, log) -> whether a script ended well, run by as many processes of their own.
function training.start(ranks, file, log)
  local alone = "env -u RANK -u WORLD_SIZE -u LOCAL_RANK -u LOCAL_WORLD_SIZE -u PG_SHM_FD"
  local pgrun = os.getenv "PGRUN" or "build/pgrun"
  return os.execute(("%s %s -n %d %s >%s 2>&1"):format(alone, pgrun, ranks, file, log)) == 0
end

local started = 0

--- training.outcome(name, ranks, o) -> records, weights, folder of a case, run by as many processes of their own.
-- o: as training.case takes it, of plain values, such as { batch = 12, deep = 4, layout = { pp = 2, tp = 2 },
-- more = { micro = 1, recompute = "block" } }.  For one rank leave layout out.
function training.outcome(name, ranks, o)
  started = started + 1
  local folder = ("outcome-%d-%s"):format(started, name)
  local file = ("%s/%s.lua"):format(training.scratch, folder)
  fs.write(file, ([[require("tests.training").case("%s", "%s", %s)]]):format(name, folder, literal(o)))
  if not training.start(ranks, file, file .. ".log") then
    error(("%s %s failed:\n%s"):format(name, literal(o), fs.read(file .. ".log")), 0)
  end
  local at = training.scratch .. "/" .. folder
  return training.records(at), training.weights(at), at
end

--- training.forget(folder): the run may be made again.  All ranks call it.
function training.forget(folder)
  pg.barrier()
  if pg.rank() == 0 then fs.remove(training.scratch .. "/" .. folder) end
  pg.barrier()
end

-- The same case in a single process, started by rank 0.
local function single(name, o)
  local at = require("pg.agree").text(function()
    return (select(3, training.outcome(name, 1, { batch = o.batch, deep = o.deep, more = o.more })))
  end)
  return training.records(at), training.weights(at)
end

-- Of DESIGN.md 3: relative to the single process, by step.
local WEIGHTS = 1e-5 -- after the last step
--- training.bound(key, step) -> what a number of metrics.jsonl may differ by.
training.bound = agreement.bounds.fp32

--- training.same_weights(name, got, want): raises where weights differ, by the norm of the error over all of them.
function training.same_weights(name, got, want)
  local difference, size, worst, where = 0, 0, -1, nil
  for key, numbers in pairs(want) do
    local own = assert(got[key], ("%s: the checkpoint has no %s"):format(name, key))
    assert(#own == #numbers, ("%s: %s has %d numbers, not %d"):format(name, key, #own, #numbers))
    local e = 0
    for i, x in ipairs(numbers) do e, size = e + (own[i] - x) ^ 2, size + x ^ 2 end
    difference = difference + e
    if e > worst or e ~= e then worst, where = e, key end
  end
  for key in pairs(got) do assert(want[key], ("%s: the checkpoint has a %s of its own"):format(name, key)) end
  local e = math.sqrt(difference / size)
  if e > WEIGHTS or e ~= e then
    error(("%s: the last weights differ by %.3g of their norm, most in %s"):format(name, e, where))
  end
end

--- training.agree(name, got, want, bound): records of the same training in two layouts: raises at the first step that
-- differs.  bound(key, step): relative; by default what DESIGN.md promises of fp32.
function training.agree(name, got, want, bound)
  bound = bound or training.bound
  assert(#got == #want, ("%s: %d steps, in a single process %d"):format(name, #got, #want))
  for step = 1, #want do
    for _, key in ipairs { "loss", "grad_norm", "val_loss" } do
      local a, b = got[step][key], want[step][key]
      assert((a == nil) == (b == nil), ("%s, step %d: %s is missing"):format(name, step, key))
      local near = not a or math.abs(a - b) <= bound(key, step) * math.abs(b)
      if not near then -- or not a number
        error(("%s, step %d: %s is %.9g, in a single process %.9g"):format(name, step, key, a, b))
      end
    end
    assert(got[step].tokens == want[step].tokens, name .. ": tokens differ")
  end
end

--- training.compare{ layout =, batch =, cases =, deep =, more = }: cases (all) in this layout against the same in a
-- single process.  layout: fields of a recipe's layout (plain data parallel); batch (12, which 1, 2, 3 and 4 ranks
-- divide): sequences of a step; deep (4 where there is a layout): blocks; more: changes of the recipe, plain values.
function training.compare(o)
  o = o or {}
  local names = o.cases
  if not names then
    names = {}
    for name in pairs(cases) do names[#names + 1] = name end
    table.sort(names) -- all ranks in one order
  end
  for _, name in ipairs(names) do
    local case = { batch = o.batch or 12, deep = o.deep or o.layout and 4, layout = o.layout, more = o.more }
    local want, weights = single(name, case)
    local got, own = training.case(name, "layout-" .. name, case)
    training.agree(name, got, want)
    if weights then training.same_weights(name, own, weights) end
    training.forget("layout-" .. name)
  end
end

return training
