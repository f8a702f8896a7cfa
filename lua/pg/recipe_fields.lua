-- recipe_fields.lua: which fields a recipe has, of what kind, and how a text from the command line becomes
-- the value of one.  recipe.lua reads recipes by it.
-- A field is { kind, default, doc } as in describe.lua, with kinds of our own besides: "seed" (64 bits), "ranks" (an
-- integer or "rest"), "schedule" (a name or a function), "model", "optim"; or
-- { fields = {...}, doc = } for a group of fields.
local buckets = require "pg.buckets"
local c = require "pg.c"
local describe = require "pg.describe"
local schedule = require "pg.parallel.schedule"

local fields = {}

fields.top = {
  model     = { "model", nil, "what is trained: a description such as llama{...}, or a function that makes one" },
  layout    = { doc = "ranks along each axis", fields = {
    dp       = { "ranks", "rest", "data parallel; \"rest\": what the other axes leave" },
    pp       = { "integer", 1, "pipeline stages", low = 1 },
    tp       = { "integer", 1, "tensor parallel", low = 1 },
    zero     = { "integer", 0, "what dp ranks share out: 0 nothing, 1 moments, 2 gradients too, 3 weights too",
                 low = 0, high = 3 },
    bucket   = { "number", buckets.SIZE, "MiB of gradients that travel over dp as one message: small blocks together, "
                 .. "a large one in parts; 0: each tensor for itself", low = 0 },
    schedule = { "schedule", "1f1b", "order of a pipeline's micro-batches: a name or a function" },
    chunks   = { "integer", nil, "runs of blocks on each stage; default: 2 where interleaved, else 1", low = 1 },
    blocks   = { "table", nil, "blocks of each chunk; default: as even as their parameters allow", low = 1 },
    sequence = { "boolean", nil, "rows between blocks cut over tp; default: where tp > 1" },
    tp_chunks = { "integer", nil, "pieces in which they travel while products run; default: as the device likes",
                  low = 1 } } },
  precision = { { "fp32", "tf32", "bf16" }, "fp32", "of weights and activations; bf16 has masters; tf32: fp32 whose "
                .. "products a GPU may take in tf32" },
  data      = { doc = "what it learns from", fields = {
    tokens   = { "string", nil, "token files (a glob)" },
    text     = { "string", nil, "a text file, read as bytes; default: pg.demo_text()" },
    random   = { "boolean", false, "tokens drawn at random instead, for timing" },
    context  = { "integer", nil, "tokens in a sequence; default: the model's context", low = 1 },
    batch    = { "integer", nil, "sequences in a global step", low = 1 },
    held_out = { "number", 0, "last share of the data, kept for evaluation", low = 0, below = 1 },
    seed     = { "seed", nil, "of the order; default: the recipe's seed" },
    vocab    = { "integer", nil, "ids are below it; default: the model's vocabulary", low = 1 },
    dtype    = { { "u8", "u16", "i32" }, nil, "of token files without a header" },
    pad      = { "integer", nil, "an id whose targets do not count", low = 0 } } },
  micro     = { "integer", nil, "sequences in a micro-batch; default: a rank's share of the batch", low = 1 },
  recompute = { { "none", "norms", "block" }, "none", "what backward computes again instead of keeping it" },
  deterministic = { "boolean", false, "the same bits in every run, also where that costs time" },
  graphs    = { "boolean", false, "on a GPU a step's gradients are recorded once and launched as a whole" },
  optim     = { "optim", nil, "{ \"adamw\" or \"sgd\", its settings }" },
  steps     = { "integer", nil, "optimiser steps", low = 1 },
  seed      = { "seed", "0", "of initial values, dropout and the order of data" },
  save      = { doc = "checkpoints", optional = true, fields = {
    every    = { "integer", 0, "steps between two; 0: none on the way", low = 0 },
    keep     = { "integer", 3, "the newest so many stay", low = 1 },
    at_end   = { "boolean", true, "one after the last step" },
    on_error = { { "stop", "go on" }, "stop", "after a save that failed" } } },
  eval      = { doc = "loss on held-out data", optional = true, fields = {
    every    = { "integer", 0, "steps between two; 0: only after the last step", low = 0 },
    tokens   = { "string", nil, "token files of their own; default: what data.held_out keeps" },
    batches  = { "integer", nil, "at most so many global batches", low = 1 } } },
  sample    = { doc = "text that the model writes", optional = true, fields = {
    every    = { "integer", 0, "steps between two; 0: only after the last step", low = 0 },
    prompt   = { "string", "\n", "what it goes on from" },
    tokens   = { "integer", 200, "how much", low = 0, high = 2^30 },
    temperature = { "number", 0.8, "0: always the likeliest", low = 0 } } },
  log       = { doc = "lines", fields = {
    every    = { "integer", nil, "steps between two; default: about 30 lines a run, and one a minute", low = 1 },
    timeline = { "integer", nil, "a step whose pipeline is timed, into timeline-STEP.json and .svg", low = 1 } } },
  live      = { doc = "changes while it trains", fields = {
    watch    = { "boolean", true, "its file and modules are looked at, and offered to the run when one is saved" } } },
  loss      = { "function", nil, "function(model, batch) -> loss; default: model:loss(batch)" },
  on_step   = { "function", nil, "function(state), called after every step on every rank" },
}

--- fields.sources[path] -> what else data may come from, which a choice on the command line takes back.
fields.sources = { ["data.tokens"] = { "text", "random" }, ["data.text"] = { "tokens", "random" },
                   ["data.random"] = { "text", "tokens" } }

--- fields.optimiser(name) -> the schema of its settings, or nil.
function fields.optimiser(name)
  return (name == "adamw" or name == "sgd") and require("pg.optim." .. name).schema or nil
end

local function integer_or(word, value)
  return value == word or (describe.fits(value, "integer") and value >= 1)
end

--- fields.fault(value, entry) -> nil, or what the value of a field must be ("an integer", "at least 1").
function fields.fault(value, entry)
  local kind = entry[1]
  if kind == "seed" then return not pcall(c.int64, value, "seed") and "a 64-bit integer" or nil end
  if kind == "ranks" then return not integer_or("rest", value) and "a number of ranks, or \"rest\"" or nil end
  if kind == "schedule" then
    local fine = type(value) == "function" or describe.fits(value, schedule.names)
    return not fine and "one of " .. table.concat(schedule.names, ", ") .. ", or a function" or nil
  end
  if kind == "model" then
    local fine = describe.is(value) or type(value) == "function" or type(value) == "table" and value.is_module
    return not fine and "a description such as llama{ blocks = 4 }, or a function that returns one" or nil
  end
  if kind == "optim" then return type(value) ~= "table" and "a table such as { \"adamw\", rate = 1e-3 }" or nil end
  return describe.fault(value, entry)
end

--- fields.seed(value) -> its decimal digits: a seed of 64 bits as text, always written in one way.
function fields.seed(value)
  return (tostring(c.int64(value, "seed")):gsub("LL$", ""))
end

local function number(text)
  local value = tonumber(text)
  if value and value > -math.huge and value < math.huge then return value end
end

local read = {}
function read.integer(text) return text:match "^[-+]?%d" and number(text) end
read.number = number
function read.boolean(text) if text == "true" then return true elseif text == "false" then return false end end
function read.string(text) return text end
function read.seed(text) return text end
function read.schedule(text) return text end
function read.ranks(text) return number(text) or text end
function read.any(text)
  if text == "true" or text == "false" then return text == "true" end
  return number(text) or text
end
function read.table(text)
  local list = {}
  for part in (text .. ","):gmatch "([^,]*)," do list[#list + 1] = read.any(part) end
  return list
end

--- fields.parse(text, kind) -> the value that a text of the command line stands for, or nil where it
-- cannot be one (fields.fault tells what is wanted).  Lists are written 0.9,0.95.
function fields.parse(text, kind)
  if type(kind) == "table" then return text end
  return read[kind] and read[kind](text)
end

return fields
