-- data/stream.lua: a run of tokens in mapped files, seen as samples of context + 1 tokens.
-- Sample i covers tokens [i * context, i * context + context]: inputs and targets shifted by one.  The order
-- of an epoch is a keyed permutation of its samples, computed from (seed, epoch) where it is needed: no index
-- file, nothing to rebuild.  A position counts samples over all epochs and ranks; epochs run into one another
-- and no tail is dropped, so a position means the same for every batch size and number of ranks.
local c = require "pg.c"
local C, ffi = c.C, c.ffi

local Stream = {}
Stream.__index = Stream
local stream = {}

-- The files are closed when the last stream on them is gone.
local function open(pattern, dtype, vocab)
  local slot = ffi.new "pg_tokens *[1]"
  c.check(C.pg_tokens_open(slot, pattern, dtype, vocab))
  return ffi.gc(slot[0], C.pg_tokens_close)
end

--- stream.new(files, first, count, context, name) -> samples over tokens [first, first + count).
function stream.new(files, first, count, context, name)
  if count < context + 1 then
    c.fail("%s: one sample of context %d needs %d tokens, it has %d; give more text or a smaller context",
           name, context, context + 1, count)
  end
  return setmetatable({ files = files, first = first, tokens = count, context = context, name = name,
                        samples = math.floor((count - 1) / context) }, Stream)
end

--- stream.open(pattern, o) -> train, held_out (nil where o.held_out is 0).  o: dtype (a pg_dtype or -1), vocab,
-- context, held_out (the last share of the tokens), name.
function stream.open(pattern, o)
  local files = open(pattern, o.dtype, o.vocab or 0)
  local total = tonumber(C.pg_tokens_count(files))
  local out = math.floor(total * (o.held_out or 0))
  local name = o.name or pattern
  local kept = out > 0 and name .. " (what data.held_out leaves)" or name
  local train = stream.new(files, 0, total - out, o.context, kept)
  if (o.held_out or 0) == 0 then return train end
  return train, stream.new(files, total - out, out, o.context, name .. " (data.held_out)")
end

--- s:start_of(i) -> the first token of sample i of the file order.
function Stream:start_of(i) return self.first + i * self.context end

--- s:order(seed) -> a function from a position to the first token of the sample that stands there.
function Stream:order(seed)
  local n, epoch, key = self.samples, -1, nil
  local digits = tostring(c.int64(seed, "data.seed")):gsub("LL$", "") -- a seed means the same in every form
  return function(position)
    local e = math.floor(position / n)
    if e ~= epoch then
      epoch = e
      key = c.hash(("order %s %d"):format(digits, e))
    end
    return self:start_of(tonumber(C.pg_permute_index(position - e * n, n, key)))
  end
end

--- s:read(start, n, dst): copy n ids to an int32 array.
function Stream:read(start, n, dst) c.check(C.pg_tokens_read(self.files, start, n, dst)) end

return stream
