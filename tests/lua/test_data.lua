-- test_data.lua: tokeniser, streams, the order of samples, loaders.
local check = require "tests.check"
local fs = require "pg.fs"
local loader = require "pg.data.loader"
local stream = require "pg.data.stream"
local tokeniser = require("pg.data.tokeniser").bytes
local equal, is_true, throws = check.equal, check.is_true, check.throws
local tests = {}
pg.step.block() -- lives as long as the process

local folder = os.tmpname()
os.remove(folder)
fs.mkdir(folder)

local function file(name, text)
  local path = folder .. "/" .. name
  fs.write(path, text)
  return path
end

-- n tokens 0, 1, 2, ... as bytes.
local function counting(n)
  local bytes = {}
  for i = 1, n do bytes[i] = string.char((i - 1) % 256) end
  return table.concat(bytes)
end

-- An axis as seen by one of `size` ranks, for dealing without starting any.
local function axis(rank, size)
  return { rank = rank, size = size, sum_numbers = function(_, x) return x end }
end

function tests.test_every_byte_comes_back()
  math.randomseed(7)
  for _ = 1, 300 do
    local bytes = {}
    for i = 1, math.random(0, 40) do bytes[i] = string.char(math.random(0, 255)) end
    local text = table.concat(bytes)
    local ids, n = tokeniser:encode(text)
    equal(n, #text)
    equal(tokeniser:decode(ids, n), text)
  end
  local odd = "\239\187\191BOM\r\nCRLF\rCR\0NUL \240\159\153\130  \t \255\254"
  local ids, n = tokeniser:encode(odd)
  equal(tokeniser:decode(ids, n), odd)
  for id = 0, 255 do equal(tokeniser:decode { id }, string.char(id)) end
  equal(tokeniser:decode { 256, 72, 257, 105, 258 }, "Hi")
  throws(function() tokeniser:decode { 259 } end, "id 259 at place 0 is outside the vocabulary [0,259)")
end

function tests.test_time_grows_with_size() -- C32: one huge word
  local function seconds(n)
    local text = ("a"):rep(n)
    local start = pg.time()
    local ids, count = tokeniser:encode(text)
    equal(count, n)
    equal(#tokeniser:decode(ids, count), n)
    return pg.time() - start
  end
  seconds(1e6)
  local small, large = seconds(2e6), seconds(2e7)
  is_true(large < 15 * small + 0.5, ("%g s for 2 MB, %g s for 20 MB"):format(small, large))
end

function tests.test_shortest_file() -- C30
  local one = stream.open(file("65.bin", counting(65)), { dtype = 6, vocab = 259, context = 64 })
  equal(one.samples, 1)
  for _, n in ipairs { 1, 64 } do
    throws(function() stream.open(file(n .. ".bin", counting(n)), { dtype = 6, vocab = 259, context = 64 }) end,
           ("needs 65 tokens, it has %d"):format(n))
  end
  throws(function() stream.open(file("0.bin", ""), { dtype = 6, vocab = 259, context = 64 }) end, "0.bin")
  throws(function() stream.open(folder .. "/none.bin", { dtype = 6, vocab = 259, context = 64 }) end, "none.bin")
end

-- The samples that the ranks see in `steps` steps, by the first token's place.
local function dealt(size, batch, steps, o)
  local seen = {}
  for rank = 0, size - 1 do
    local train = stream.open(o.path, { dtype = 6, vocab = 259, context = o.context })
    local l = loader.new(train, { batch = batch, seed = o.seed, axis = axis(rank, size), micro = o.micro })
    if o.position then l:seek(o.position) end
    for s = 1, steps do
      local step = l:next_step()
      for m = 1, step.micro do
        local b = l:micro(m)
        local tokens, T = b.tokens:totable(), b.tokens.shape[2]
        for r = 0, b.tokens.shape[1] - 1 do
          seen[((s - 1) * batch) + b.sample0 + r + 1] = tokens[r * T + 1]
        end
      end
    end
  end
  return seen
end

local function sorted(list, first, last)
  local part = { unpack(list, first, last) }
  table.sort(part)
  return part
end

function tests.test_order_of_epochs() -- C27
  local path = file("order.bin", counting(16 * 4 + 1))
  local o = { path = path, context = 4, seed = 3 }
  local all = {}
  for i = 0, 15 do all[i + 1] = i * 4 end
  local seen = dealt(2, 8, 6, o)
  for epoch = 0, 2 do equal(sorted(seen, epoch * 16 + 1, epoch * 16 + 16), all) end
  local first, second = { unpack(seen, 1, 16) }, { unpack(seen, 17, 32) }
  is_true(table.concat(first, " ") ~= table.concat(second, " "), "two epochs in the same order")
  equal(dealt(2, 8, 6, o), seen)
  is_true(table.concat(dealt(2, 8, 2, { path = path, context = 4, seed = 4 }), " ") ~= table.concat(first, " "))
end

function tests.test_order_is_the_same_for_all_layouts() -- C28, C29
  local path = file("ten.bin", counting(10 * 4 + 1))
  local o = { path = path, context = 4, seed = 11 }
  local one = dealt(1, 4, 8, o)
  equal(dealt(2, 4, 8, o), one)
  equal(dealt(4, 4, 8, o), one)
  equal(dealt(2, 4, 8, { path = path, context = 4, seed = 11, micro = 1 }), one)
  equal(dealt(1, 2, 16, o), one)
  -- stop at an epoch's end (10 samples of batch 2) and go on with other ranks and batches
  local rest = dealt(2, 4, 3, { path = path, context = 4, seed = 11, position = 10 })
  equal(rest, { unpack(one, 11, 22) })
end

function tests.test_batch_is_shifted_by_one()
  local path = file("shift.bin", counting(9))
  local train = stream.open(path, { dtype = 6, vocab = 259, context = 4 })
  local l = loader.new(train, { batch = 2, axis = axis(0, 1) })
  l:next_step()
  local b = l:micro(1)
  local tokens, targets = b.tokens:totable(), b.targets:totable()
  for i = 1, #tokens do equal(targets[i], tokens[i] + 1) end
  equal(b.tokens.shape, { 2, 4 })
  equal(pg.step.get "INV_TOKENS", 1 / 8)
end

function tests.test_padding_does_not_count() -- C02
  local ids = counting(8) .. "\1\1\1"
  local train = stream.open(file("pad.bin", ids), { dtype = 6, vocab = 259, context = 5 })
  local l = loader.new(train, { batch = 2, axis = axis(0, 1), pad = 1 })
  local step = l:next_step()
  equal(step.valid, 6)
  local ignored = 0
  for _, id in ipairs(l:micro(1).targets:totable()) do if id == -100 then ignored = ignored + 1 end end
  equal(ignored, 4)
end

function tests.test_shares_that_do_not_divide()
  local train = stream.open(file("div.bin", counting(100)), { dtype = 6, vocab = 259, context = 4 })
  throws(function() loader.new(train, { batch = 5, axis = axis(0, 2) }) end,
         "does not divide over dp = 2 ranks; nearest: 4 or 6")
  throws(function() loader.new(train, { batch = 6, micro = 4, axis = axis(0, 1) }) end, "micro 4 does not divide")
  throws(function() loader.new(train, { batch = 2.5, axis = axis(0, 1) }) end, "not an integer")
end

function tests.test_held_out_and_each()
  local path = file("held.bin", counting(200))
  local set = pg.data.open { tokens = path, dtype = "u8", context = 4, vocab = 259, held_out = 0.25 }
  equal(set.train.tokens, 150)
  equal(set.held_out.tokens, 50)
  for size = 1, 4 do -- C28: every held-out sample once, whatever the ranks
    local seen = {}
    for rank = 0, size - 1 do
      for b in set:each(5, axis(rank, size)) do
        local tokens = b.tokens:totable()
        for r = 1, b.tokens.shape[1] do seen[#seen + 1] = tokens[(r - 1) * 4 + 1] end
      end
    end
    local want = {}
    for i = 0, 11 do want[i + 1] = 150 + i * 4 end
    equal(sorted(seen, 1, #seen), want)
  end
end

function tests.test_vocabulary_is_checked() -- C12
  local train = stream.open(file("vocab.bin", "\1\2\3\200\4\5\6\7\8"), { dtype = 6, vocab = 100, context = 4 })
  local message = throws(function()
    local l = loader.new(train, { batch = 2, axis = axis(0, 1) })
    l:next_step()
  end, "vocab.bin")
  is_true(message:find("id 200; ids go from 0 to 99", 1, true) ~= nil, message)
  throws(function() pg.data.open { text = folder .. "/vocab.bin", context = 4, vocab = 100 } end, "259")
end

function tests.test_plain_loop()
  local path = file("plain.txt", ("the cat sat on the mat. "):rep(40))
  local data = pg.data.text(path, { context = 16, batch = 4 })
  local count = 0
  for step, batch in data:steps(5) do
    count = count + 1
    equal(step, count)
    equal(batch.tokens.shape, { 4, 16 })
  end
  equal(count, 5)
  throws(function() pg.data.text(path, { contxt = 16 }) end, "did you mean context")
  throws(function() pg.data.text(path, { context = 16, batch = 0 }) end, "at least 1")
end

function tests.teardownClass() fs.remove(folder) end

check.run(tests)
