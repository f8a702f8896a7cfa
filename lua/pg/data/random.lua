-- data/random.lua: tokens drawn at random, for timing: a loss stays at log(vocabulary), speed is that of real text.
local c = require "pg.c"
local fs = require "pg.fs"
local C, ffi = c.C, c.ffi

local random = {}
local COUNT = 2^22 -- tokens: 1024 sequences of 4096
local PIECE = 2^16

-- A linear congruential generator (Knuth's MMIX constants); its upper bits are good enough to time with.
local function fill(ids, vocab, state)
  for i = 0, PIECE - 1 do
    state = state * 6364136223846793005ULL + 1442695040888963407ULL
    ids[i] = tonumber(bit.rshift(state, 33)) % vocab
  end
  return state
end

--- random.file(vocab) -> the path of a new token file; the caller removes it once it is open.
function random.file(vocab)
  local path = os.tmpname()
  local slot = ffi.new "pg_tokens *[1]"
  c.check(C.pg_tokens_create(slot, path, vocab))
  local file = ffi.gc(slot[0], C.pg_tokens_close)
  local ids, state = ffi.new("int32_t[?]", PIECE), 1ULL
  local ok, why = pcall(function()
    for _ = 1, COUNT / PIECE do
      state = fill(ids, vocab, state)
      c.check(C.pg_tokens_append(file, ids, PIECE))
    end
    c.check(C.pg_tokens_finish(file))
  end)
  C.pg_tokens_close(ffi.gc(file, nil))
  if not ok then
    fs.remove(path)
    error(why, 0)
  end
  return path
end

return random
