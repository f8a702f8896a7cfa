-- training.lua: what the tests of the loop share: a small text, a small recipe, its metrics.
local fs = require "pg.fs"
local json = require "pg.json"

local training = {}
training.scratch = os.getenv "SCRATCH" or "."

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

return training
