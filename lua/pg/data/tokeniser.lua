-- data/tokeniser.lua: text to ids and back, behind one interface:
--   t.name, t.vocab, t.bos, t.eos, t.pad (ids or nil)
--   t:encode(text) -> an int32 array (C) and its length;  t:decode(ids, n) -> text
-- "bytes" is the byte-level tokeniser: ids 0..255 are the bytes themselves, then BOS, EOS, PAD.
local c = require "pg.c"
local ffi = c.ffi

local Bytes = { name = "bytes", vocab = 259, bos = 256, eos = 257, pad = 258 }
Bytes.__index = Bytes

--- bytes:encode(text) -> int32_t[n], n.  Every byte is kept, valid UTF-8 or not.
function Bytes:encode(text) -- luacheck: no self
  if type(text) ~= "string" then c.fail("encode: a string is wanted, got %s", type(text)) end
  local n = #text
  local ids = ffi.new("int32_t[?]", math.max(n, 1))
  local from = ffi.cast("const uint8_t *", text)
  for i = 0, n - 1 do ids[i] = from[i] end
  return ids, n
end

--- bytes:decode(ids, n) -> text.  ids: an int32 array (0-based, with n), a Lua list or a tensor; BOS, EOS
-- and PAD vanish; other ids are an error.
function Bytes:decode(ids, n)
  if type(ids) == "table" and ids.is_tensor then ids, n = ids:buffer() end
  local list = type(ids) == "table"
  if not list and type(ids) ~= "cdata" then c.fail("decode: a list of ids is wanted, got %s", type(ids)) end
  n = n or (list and #ids or c.fail "decode: a C array needs its length")
  local out, used = ffi.new("uint8_t[?]", math.max(n, 1)), 0
  for i = 0, n - 1 do
    local id = list and ids[i + 1] or ids[i]
    id = tonumber(id) or c.fail("decode: %s at place %d is no id", tostring(id), i)
    if id >= 0 and id < 256 and id % 1 == 0 then
      out[used] = id
      used = used + 1
    elseif not (id >= 0 and id < self.vocab and id % 1 == 0) then
      c.fail("decode: id %.17g at place %d is outside the vocabulary [0,%d)", id, i, self.vocab)
    end
  end
  return ffi.string(out, used)
end

local tokeniser = { bytes = setmetatable({}, Bytes) }

--- tokeniser.get(name) -> the tokeniser of that name.
function tokeniser.get(name)
  if name == nil or name == "bytes" then return tokeniser.bytes end
  c.fail('tokeniser "%s" is unknown (bytes)', tostring(name))
end

return tokeniser
