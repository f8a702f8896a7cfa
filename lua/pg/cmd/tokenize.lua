-- cmd/tokenize.lua: pgrun tokenize FILE... -o OUT.bin
-- Each file is a document: BOS, its ids, EOS.  Empty files are skipped and counted.  The output is a token
-- file in llm.c's format, written aside and renamed.
local c = require "pg.c"
local tokeniser = require "pg.data.tokeniser"
local C, ffi = c.C, c.ffi

local CHUNK = 2^20 -- bytes read at a time

local USAGE = "usage: pgrun tokenize FILE... -o OUT.bin [--tokenizer=bytes]\n"

local function usage(why)
  io.stderr:write("pgrun tokenize: ", why, "\n", USAGE)
  os.exit(2, true)
end

-- "./a//b" -> "a/b": two ways to write one path.
local function plain(path) return (path:gsub("/+", "/"):gsub("^%./", ""):gsub("/%./", "/")) end

local function arguments(args)
  local files, out, name = {}, nil, "bytes"
  local i = 1
  while i <= #args do
    local a = args[i]
    if a == "--help" or a == "-h" then io.stdout:write(USAGE) os.exit(0, true)
    elseif a == "-o" or a == "--output" then i = i + 1 out = args[i] or usage "-o needs a file name"
    elseif a:match "^%-%-tokenizer=" then name = a:match "=(.*)$"
    elseif a:match "^%-%-output=" then out = a:match "=(.*)$"
    elseif a:match "^%-." then usage(("unknown option %s"):format(a))
    else files[#files + 1] = a end
    i = i + 1
  end
  if #files == 0 then usage "no files named" end
  if not out then usage "no output named; add -o OUT.bin" end
  for _, path in ipairs(files) do
    if plain(path) == plain(out) then usage(("%s would be written over itself; name another output"):format(path)) end
  end
  return files, out, tokeniser.get(name)
end

local one = ffi.new "int32_t[1]"
local function mark(shard, id)
  one[0] = id
  c.check(C.pg_tokens_append(shard, one, 1))
end

-- Append one document; returns how many ids it has (0: it was empty).
local function document(shard, path, t)
  local file, why = io.open(path, "rb")
  if not file then c.fail("tokenize: %s", why) end
  local total = 0
  while true do
    local text, problem = file:read(CHUNK)
    if problem then c.fail("tokenize: %s: %s", path, problem) end
    if not text then break end
    if total == 0 then mark(shard, t.bos) end
    local ids, n = t:encode(text)
    c.check(C.pg_tokens_append(shard, ids, n))
    total = total + n
  end
  file:close()
  if total > 0 then mark(shard, t.eos) end
  return total
end

local function main(args)
  local files, out, t = arguments(args)
  local slot = ffi.new "pg_tokens *[1]"
  c.check(C.pg_tokens_create(slot, out, t.vocab))
  local shard = ffi.gc(slot[0], C.pg_tokens_close)
  local total, empty = 0, 0
  for _, path in ipairs(files) do
    local n = document(shard, path, t)
    if n == 0 then empty = empty + 1 end
    total = total + n + (n > 0 and 2 or 0)
  end
  if total == 0 then
    c.fail("tokenize: nothing but empty files (%d); %s was not written", #files, out)
  end
  c.check(C.pg_tokens_finish(shard))
  C.pg_tokens_close(ffi.gc(shard, nil))
  local full = #files - empty
  print(("%s: %d tokens of %d file%s%s, vocabulary %d (%s)"):format(out, total, full, full > 1 and "s" or "",
        empty > 0 and (" (%d empty, skipped)"):format(empty) or "", t.vocab, t.name))
end

main({ ... })
