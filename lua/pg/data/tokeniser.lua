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
  local n = #text
  local ids = ffi.new("int32_t[?]", math.max(n, 1))
  local from = ffi.cast("const uint8_t *", text)
  for i = 0, n - 1 do ids[i] = from[i] end
  return ids, n
end

--- bytes:decode(ids, n) -> text.  ids: an int32 array (0-based, with n) or a Lua list; BOS, EOS and PAD
-- vanish; other ids are an error.
function Bytes:decode(ids, n)
  local list = type(ids) == "table"
  n = n or (list and #ids or c.fail "decode: a C array needs its length")
  local out, used = ffi.new("uint8_t[?]", math.max(n, 1)), 0
  for i = 0, n - 1 do
    local id = tonumber(list and ids[i + 1] or ids[i])
    if id >= 0 and id < 256 then
      out[used] = id
      used = used + 1
    elseif id < 0 or id >= self.vocab then
      c.fail("decode: id %d at place %d is outside the vocabulary [0,%d)", id, i, self.vocab)
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
