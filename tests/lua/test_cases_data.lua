-- test_cases_data.lua: token files too large for 32 bits, too short, torn or lying, and settings that make no
-- sense, through pg.data as a script meets them (CASES.md C13, C30, C32, C38).
local check = require "tests.check"
local fs = require "pg.fs"
local ffi = require "ffi"
local equal, is_true, throws = check.equal, check.is_true, check.throws
local tests = {}
pg.step.block() -- lives as long as the process

local folder = (os.getenv "SCRATCH" or "build") .. "/cases"
fs.mkdir(folder)
local function file(name, text)
  local path = folder .. "/" .. name
  fs.write(path, text)
  return path
end

-- A file of `bytes` bytes that takes no room but for what is written at `at` (0-based places).
local function sparse(name, bytes, at)
  local path = folder .. "/" .. name
  local f = assert(io.open(path, "wb"))
  for place, text in pairs(at) do
    assert(f:seek("set", place))
    assert(f:write(text))
  end
  assert(f:seek("set", bytes - 1))
  assert(f:write "\0")
  f:close()
  equal(fs.size(path), bytes)
  return path
end

local function u16(...)
  local out = {}
  for i, id in ipairs { ... } do out[i] = string.char(id % 256, math.floor(id / 256)) end
  return table.concat(out)
end

-- n ids of the stream's tokens from `start` on.
local function read(stream, start, n)
  local ids = ffi.new("int32_t[?]", n)
  stream:read(start, n, ids)
  local out = {}
  for i = 0, n - 1 do out[i + 1] = ids[i] end
  return out
end

function tests.test_ids_beyond_2_and_4_gib() -- C13
  for _, gib in ipairs { 3, 5 } do
    local bytes = gib * 2^30
    local path = sparse("large.bin", bytes, {
      [bytes - 8] = u16(501, 502, 503), [2^31 - 2] = u16(601, 602), [2^32 - 2] = gib > 4 and u16(701, 702) or nil })
    local set = pg.data.open { tokens = path, context = 4, vocab = 50257 }
    local total = bytes / 2
    equal(set.train.tokens, total)
    equal(set.train.samples, (total - 4) / 4)
    equal(read(set.train, total - 4, 4), { 501, 502, 503, 0 })
    equal(read(set.train, 2^30 - 2, 4), { 0, 601, 602, 0 })
    if gib > 4 then equal(read(set.train, 2^31 - 2, 4), { 0, 701, 702, 0 }) end
    throws(function() read(set.train, total - 3, 4) end, "tokens: read: needs 4 from")
    local seen = 0 -- a whole batch through the thread that reads ahead
    for _, batch in pg.data.tokens(path, { context = 4, batch = 8, vocab = 50257 }):steps(3) do
      seen = seen + batch.tokens.count
    end
    equal(seen, 96)
    fs.remove(path)
  end
end

function tests.test_samples_beyond_32_bits() -- C13
  local bytes = 5 * 2^30
  local path = sparse("bytes.bin", bytes, { [bytes - 3] = "\7\8\9", [2^32] = "\1\2" })
  local set = pg.data.open { tokens = path, context = 1, dtype = "u8", vocab = 256, held_out = 2^-30 }
  equal(set.train.samples + set.held_out.tokens + 1, bytes)
  equal(read(set.train, set.train:start_of(2^32), 2), { 1, 2 })
  local order, seen, high = set.train:order(3), {}, 0
  for i = 0, 999 do
    local start = order(2^31 + i)
    is_true(start >= 0 and start < set.train.tokens - 1 and not seen[start])
    seen[start] = true
    if start > 2^32 then high = high + 1 end
  end
  is_true(high > 100 and high < 320, high .. " of 1000 samples lie in the last fifth")
  local tail = {}
  for b in set:each(4) do for _, id in ipairs(b.targets:totable()) do tail[#tail + 1] = id end end
  equal({ unpack(tail, #tail - 2) }, { 7, 8, 0 })
  fs.remove(path)
end

function tests.test_position_beyond_32_bits() -- C13, C38
  local path = file("small.bin", ("0123456789"):rep(10))
  local data = pg.data.tokens(path, { context = 4, batch = 2, dtype = "u8" })
  for _, position in ipairs { 2^31, 2^32 + 2, 2^52 } do
    data:seek(position)
    local step = data:next_step()
    equal(step.position, position + 2)
    equal(step.epoch, math.floor((position + 1) / 24))
  end
  throws(function() data:seek(2^60) end, "exact only up to 2^53")
  throws(function() data:seek(-1) end, "data position is -1; it must be at least 0")
  throws(function() data:seek(1.5) end, "not an integer")
end

-- pg.data.tokens of a file with n ids of the given width.
local function opening(bytes, dtype)
  local path = file("short.bin", ("\1\0\0\0"):rep(bytes):sub(1, bytes))
  return function() return pg.data.tokens(path, { context = 64, batch = 1, dtype = dtype }) end
end

function tests.test_the_shortest_files_of_every_width() -- C30
  for dtype, width in pairs { u8 = 1, u16 = 2, i32 = 4 } do
    throws(opening(0, dtype), "short.bin is empty")
    for _, n in ipairs { 1, 64 } do
      throws(opening(n * width, dtype), ("short.bin: one sample of context 64 needs 65 tokens, it has %d"):format(n))
    end
    for _, n in ipairs { 65, 128 } do equal(opening(n * width, dtype)().stream.samples, 1) end
    equal(opening(129 * width, dtype)().stream.samples, 2)
  end
  throws(opening(131, "u16"), "has 131 bytes; uint16 tokens need an even count")
  throws(opening(263, "i32"), "has 263 bytes; 32-bit tokens need a multiple of 4")
  local one = opening(65, "u8")() -- one sample, whatever the epoch
  for _ = 1, 5 do one:next_step() end
  equal(one.position, 5)
end

function tests.test_headers_that_lie() -- C30
  local function with(version, count, bytes)
    local header = ffi.new("int32_t[256]", 20240520, version, count)
    local body = ("\1\0"):rep(math.max(0, bytes - 1024) / 2)
    local path = file("header.bin", ffi.string(header, 1024):sub(1, bytes) .. body)
    return function() return pg.data.tokens(path, { context = 4, batch = 1 }) end
  end
  throws(with(1, 100, 1034), "header.bin has 1034 bytes; its header tells of 100 uint16 tokens, which need 1224")
  throws(with(1, -5, 1224), "header.bin has 1224 bytes")
  throws(with(1, 99, 1224), "header.bin has 1224 bytes")
  throws(with(9, 100, 1224), "version 9")
  throws(with(1, 100, 100), "header alone needs 1024")
  equal(with(1, 100, 1224)().stream.tokens, 100)
end

function tests.test_the_id_that_is_too_large_is_told_with_its_place() -- C12
  local path = file("ids.bin", u16(1, 2, 3, 259, 5, 6, 7, 8, 9))
  local function first(o)
    local ids
    for _, b in pg.data.tokens(path, o):steps(1) do ids = b.tokens:totable() end
    return ids
  end
  local message = throws(function() first { context = 4, batch = 2, vocab = 259 } end, "ids.bin")
  is_true(message:find("token 3 (byte 6) has id 259; ids go from 0 to 258", 1, true) ~= nil, message)
  equal(#first { context = 4, batch = 2, vocab = 260 }, 8)
end

function tests.test_a_seed_means_the_same_in_every_form() -- C38
  local path = file("order.txt", ("the cat sat on the mat. "):rep(40))
  local function order(seed)
    local out = {}
    for _, b in pg.data.text(path, { context = 4, batch = 8, seed = seed }):steps(4) do
      out[#out + 1] = table.concat(b.tokens:totable(), " ")
    end
    return table.concat(out, "\n")
  end
  local odd = order "10151188881778163"
  equal(order(10151188881778163LL), odd)
  is_true(order(10151188881778164LL) ~= odd)
  is_true(order "9007199254740993" ~= order "9007199254740992")
  equal(order(7), order "7")
  equal(order(7ULL), order(7))
  equal(order(nil), order(0))
  throws(function() order(10151188881778163) end,
         "data.seed is 10151188881778164: a Lua number is exact only below 2^53")
  throws(function() order(1.5) end, "data.seed is 1.5, not an integer")
  throws(function() order "x" end, 'data.seed is "x", not a 64-bit integer')
end

function tests.test_settings_that_make_no_sense()
  local path = file("plain.txt", ("the cat sat on the mat. "):rep(40))
  local function with(o, name)
    local settings = { context = 16, batch = 4 }
    for k, v in pairs(o) do settings[k] = v end
    return function() return pg.data.text(name or path, settings) end
  end
  throws(with({}, folder .. "/none.txt"), "none.txt: no such file")
  throws(with({}, folder), "is no regular file")
  throws(with({}, 5), "text is no file name but a number")
  throws(function() pg.data.text(path) end, "context is missing")
  throws(function() pg.data.text(path, { context = 4 }) end, "batch is missing")
  throws(with { context = 0 }, "data.context is 0; it must be at least 1")
  throws(with { context = "16" }, 'data.context is "16", not an integer')
  throws(with { context = 2^40 }, "needs 1099511627777 tokens, it has 960")
  throws(with { batch = 2^31 }, "choose a smaller batch")
  throws(with { held_out = 0 / 0 }, "data.held_out is")
  throws(with { held_out = 1 }, "data.held_out is 1, outside [0,1)")
  throws(with { held_out = 0.999 }, "it has 1;")
  throws(with { vocab = -1 }, "data.vocab is -1")
  throws(with { vocab = "x" }, 'data.vocab is "x", not an integer')
  throws(with { pad = "x" }, 'data.pad is "x", not an integer')
  throws(with { dtype = "u32", text = nil, tokens = path }, "data")
  local data = with {}()
  throws(function() data:steps() end, "how many steps?")
  throws(function() data:steps "3" end, 'data:steps is "3", not an integer')
  throws(function() data:steps(-1) end, "data:steps is -1")
  for _ in data:steps(0) do is_true(false) end
end

function tests.test_decode_takes_what_a_script_has()
  local t = pg.data.tokeniser.bytes
  equal(t:decode(pg.tensor({ 72, 105 }, "i32")), "Hi")
  equal(t:decode {}, "")
  throws(function() t:decode { 1.5 } end, "id 1.5 at place 0 is outside")
  throws(function() t:decode { 0 / 0 } end, "is outside")
  throws(function() t:decode { "x" } end, "x at place 0 is no id")
  throws(function() t:decode(nil) end, "a list of ids is wanted, got nil")
  throws(function() t:encode(nil) end, "a string is wanted, got nil")
end

function tests.teardownClass() fs.remove(folder) end

check.run(tests)
