-- fs.lua: folders and whole files, over runtime/file/fs.c.  Errors are raised with path and reason.
local c = require "pg.c"
local C, ffi = c.C, c.ffi
local fs = {}

local size, mtime, is_dir = ffi.new "int64_t[1]", ffi.new "double[1]", ffi.new "int[1]"
local hash = ffi.new "uint64_t[1]"

-- A text that C keeps until its next call; NULL means that the reason waits.
local function text(pointer, bytes)
  if pointer == nil then c.check(C.PG_EIO) end
  return ffi.string(pointer, bytes)
end

local function lines(joined)
  local list = {}
  for line in joined:gmatch "[^\n]+" do list[#list + 1] = line end
  return list
end

--- fs.exists(path) -> boolean: a file or folder is there and can be seen.
function fs.exists(path) return C.pg_fs_stat(path, nil, nil, nil) == C.PG_OK end

--- fs.is_dir(path) -> boolean: a folder is there.
function fs.is_dir(path)
  return C.pg_fs_stat(path, nil, nil, is_dir) == C.PG_OK and is_dir[0] == 1
end

--- fs.size(path) -> bytes.
function fs.size(path)
  c.check(C.pg_fs_stat(path, size, nil, nil))
  return tonumber(size[0])
end

--- fs.mtime(path) -> seconds since 1970, with a fraction.
function fs.mtime(path)
  c.check(C.pg_fs_stat(path, nil, mtime, nil))
  return mtime[0]
end

--- fs.mkdir(path): with its parents; fine if it is there.
function fs.mkdir(path) c.check(C.pg_fs_mkdir(path)) end

--- fs.rename(from, to): replaces `to`; the change is on disk when it returns.
function fs.rename(from, to) c.check(C.pg_fs_rename(from, to)) end

--- fs.remove(path): a file or a whole folder; fine if it is not there.
function fs.remove(path) c.check(C.pg_fs_remove(path)) end

--- fs.sync(path): wait until a file or folder is on disk.
function fs.sync(path) c.check(C.pg_fs_sync(path)) end

--- fs.list(folder) -> the names in it, sorted by bytes.
function fs.list(folder) return lines(text(C.pg_fs_list(folder))) end

--- fs.glob(pattern) -> the paths that match, sorted by bytes; {} where none does.
function fs.glob(pattern) return lines(text(C.pg_fs_glob(pattern))) end

--- fs.read(path) -> the whole content.
function fs.read(path)
  local pointer = C.pg_fs_read(path, size)
  return text(pointer, pointer ~= nil and size[0] or 0)
end

--- fs.write(path, content): the old file or the new one is there afterwards, never a part.
function fs.write(path, content) c.check(C.pg_fs_write(path, content, #content)) end

--- fs.hash(path) -> xxHash64 of the content, as 16 hex digits.
function fs.hash(path)
  c.check(C.pg_fs_hash(path, hash))
  return bit.tohex(hash[0])
end

--- fs.hostname() -> the name of this machine.
function fs.hostname() return ffi.string(C.pg_fs_hostname()) end

return fs
