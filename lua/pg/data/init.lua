-- data/init.lua: pg.data: text and token files as batches.
--   local data = pg.data.tokens("corpus.bin", { context = 128, batch = 32 })
--   for step, batch in data:steps(300) do ... end
local c = require "pg.c"
local fs = require "pg.fs"
local loader = require "pg.data.loader"
local random = require "pg.data.random"
local stream = require "pg.data.stream"
local tokeniser = require "pg.data.tokeniser"

local data = { tokeniser = tokeniser }
local dtypes = { u8 = c.C.PG_U8, u16 = -1, i32 = c.C.PG_I32 }

local known = { "tokens", "text", "random", "context", "vocab", "held_out", "dtype", "seed", "batch", "micro", "pad",
                "axis" }

local function dtype_code(name)
  if name == nil then return -1 end
  return dtypes[name] or c.fail("data.dtype is %s; one of u8, u16, i32", tostring(name))
end

-- Streams of a set: loaders and held-out batches made from them.
local Set = {}
Set.__index = Set

--- data.open{ tokens = glob | text = file | random = true, context =, vocab =, held_out =, dtype = } -> a set with
-- train, held_out (streams) and vocab.  tokens: files of llm.c or nanoGPT (dtype u8, u16 or i32 where they have no
-- header).
-- text: a file read as bytes, the ids of the byte-level tokeniser.  random: ids for timing.
function data.open(o)
  c.keys(o, known, "data")
  if (o.tokens and 1 or 0) + (o.text and 1 or 0) + (o.random and 1 or 0) ~= 1 then
    c.fail("data: give either tokens (files of ids), text (a file of text) or random = true (ids for timing)")
  end
  local path = o.tokens or o.text or "random tokens"
  if type(path) ~= "string" then
    c.fail("data: %s is no file name but a %s", o.text and "text" or "tokens", type(path))
  end
  local context = c.within(o.context or c.fail "data: context is missing; tokens in a sequence", "data.context", 1)
  local held = o.held_out or 0
  if type(held) ~= "number" or not (held >= 0 and held < 1) then
    c.fail("data.held_out is %s, outside [0,1)", tostring(held))
  end
  local bytes = tokeniser.bytes
  local vocab = o.vocab and c.within(o.vocab, "data.vocab", 1) or (o.text and bytes.vocab) or 0
  if o.text and vocab < bytes.vocab then
    c.fail("data.text gives ids of the byte-level tokeniser, %d of them; the model's vocabulary is %d; set vocab = %d",
           bytes.vocab, vocab, bytes.vocab)
  end
  local set = setmetatable({ vocab = vocab, tokeniser = o.text and bytes or nil }, Set)
  local asked = { dtype = o.text and dtypes.u8 or dtype_code(o.dtype), vocab = vocab, context = context,
                  held_out = held, name = path }
  if o.random then
    if vocab == 0 then c.fail "data.random: vocab is missing; ids are drawn below it" end
    path, asked.dtype = random.file(vocab), -1
  end
  local ok, train, out = pcall(stream.open, path, asked)
  if o.random then fs.remove(path) end -- it stays open
  if not ok then error(train, 0) end
  set.train, set.held_out = train, out
  return set
end

--- set:loader{ batch =, micro =, seed =, axis =, pad = } -> a loader over the training part.
function Set:loader(o) return loader.new(self.train, o) end

--- set:each(batch, axis, o) -> an iterator over the held-out part (see data/loader.lua).
function Set:each(batch, axis, o)
  return loader.each(self.held_out or c.fail "data: nothing is held out; set data.held_out = 0.1", batch, axis, o)
end

local function plain(kind)
  return function(path, o)
    o = o or {}
    local settings = {}
    for k, v in pairs(o) do settings[k] = v end
    settings[kind] = path
    local set = data.open(settings)
    local l = set:loader { batch = o.batch, micro = o.micro, seed = o.seed, axis = o.axis, pad = o.pad }
    l.set = set
    return l
  end
end

--- data.tokens(glob, { context =, batch =, vocab =, seed =, held_out =, dtype = }) -> a loader; data.text(file, ...).
data.tokens, data.text = plain "tokens", plain "text"

return data
