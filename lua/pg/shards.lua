-- shards.lua: one safetensors file of whole tensors that all ranks write together, and read their parts of.
-- A part is a fragment (fragments.lua) with its numbers: dtype, as in the file; flat, a tensor whose element 0 is
-- element `base` of the segment; master beside it, where flat and master together stand for f32 numbers.
-- Saving: rank 0 writes the header, the others join the file, each writes its parts where they belong, so that no
-- rank ever holds more than its own and a buffer.  All calls are collective, and what fails on one rank is raised
-- on all.
local c = require "pg.c"
local agree = require "pg.agree"
local fs = require "pg.fs"
local json = require "pg.json"
local mesh = require "pg.mesh"
local Tensor = require "pg.tensor"
local C, ffi = c.C, c.ffi

local shards = {}
local CHUNK = 2^24 -- numbers with masters that are f32 at a time: 64 MiB

local dims = ffi.new "int64_t[8]"

local function text_of(shape) return "[" .. table.concat(shape, ",") .. "]" end

--- shards.open(path) -> a file to read.
function shards.open(path)
  local slot = ffi.new "pg_safetensors *[1]"
  c.check(C.pg_safetensors_open(slot, path))
  return ffi.gc(slot[0], C.pg_safetensors_close)
end

--- shards.close(file)
function shards.close(file) C.pg_safetensors_close(ffi.gc(file, nil)) end

-- ---- what all ranks hold ----

local function entry_of(by_name, list, name, dtype, whole)
  local e = by_name[name]
  if not e then
    e = { name = name, dtype = dtype, whole = whole, written = 0 }
    by_name[name], list[#list + 1] = e, e
  elseif e.dtype ~= dtype or text_of(e.whole) ~= text_of(whole) then
    c.fail("%s is %s %s on one rank, %s %s on another", name, text_of(e.whole), e.dtype, text_of(whole), dtype)
  end
  return e
end

-- The tensors that the parts of all ranks are of -> { { name, dtype, whole, written }, ... }; written: how many
-- of its numbers the parts in `mine` of all ranks are.
local function catalogue(parts, mine)
  local own, index = json.array {}, {}
  for i, part in ipairs(parts) do
    own[i] = { part.name, part.dtype, json.array(part.whole), 0 }
    index[part.name] = own[i]
  end
  for _, part in ipairs(mine) do index[part.name][4] = index[part.name][4] + part.count end
  local by_name, list = {}, {}
  for _, text in ipairs(agree.texts(json.encode(own))) do
    for _, e in ipairs(json.decode(text)) do
      local entry = entry_of(by_name, list, e[1], e[2], e[3])
      entry.written = entry.written + e[4]
    end
  end
  return list
end

local function check_written(list)
  for _, e in ipairs(list) do
    local count = c.product(e.whole)
    if e.written ~= count then
      c.fail("%s %s has %d numbers, the ranks would write %d", e.name, text_of(e.whole), count, e.written)
    end
  end
end

-- ---- numbers ----

-- call(file, which, first, cols, stride, from, t) on the numbers of a part.
local function move_flat(call, file, which, part)
  local view = part.flat:view({ part.count }, part.at - part.base)
  local rc = call(file, which, part.first, part.cols, part.stride, part.from, view.raw)
  view:free()
  c.check(rc)
end

-- The same where values have masters: through f32 numbers, a stretch at a time.
local function move_joined(call, file, which, part, loads)
  for done = 0, part.count - 1, CHUNK do
    local n, at = math.min(CHUNK, part.count - done), part.at - part.base + done
    local t, value, master = Tensor.empty({ n }, "f32"), part.flat:view({ n }, at), part.master:view({ n }, at)
    local rc = loads and C.PG_OK or C.pg_master_join(t.raw, value.raw, master.raw)
    if rc >= 0 then rc = call(file, which, part.first, part.cols, part.stride, part.from + done, t.raw) end
    if rc >= 0 and loads then rc = C.pg_master_split(value.raw, master.raw, t.raw) end
    t:free()
    value:free()
    master:free()
    c.check(rc)
  end
end

local function move(call, file, which, part, loads)
  if part.count > 0 then (part.master and move_joined or move_flat)(call, file, which, part, loads) end
end

-- ---- saving ----

local function create(slot, path, list)
  c.check(C.pg_safetensors_create(slot, path))
  local file = slot[0]
  c.check(C.pg_safetensors_set_meta(file, "format", "pt"))
  for _, e in ipairs(list) do
    for i, d in ipairs(e.whole) do dims[i - 1] = d end
    c.check(C.pg_safetensors_declare(file, e.name, Tensor.codes[e.dtype], #e.whole, dims))
  end
  c.check(C.pg_safetensors_begin(file))
end

-- Where the others write.
local function share(file)
  local place = C.pg_safetensors_share(file)
  if place == nil then c.check(C.PG_EIO) end
  return ffi.string(place)
end

local function join(slot, place)
  local rc = C.pg_safetensors_join(slot, place)
  if rc >= 0 then return end
  local why = ffi.string(C.pg_errmsg())
  if fs.exists(place) then c.fail("%s", why) end
  c.fail("%s; every rank writes its part, so the run's folder must lie where all hosts see it, as --run=/SHARED/NAME",
         why)
end

-- The steps of a save that all ranks take together; slot keeps this rank's file.
local function save(slot, path, parts, mine)
  local first, place = mesh.rank() == 0, nil
  local list = catalogue(parts, mine)
  check_written(list)
  agree.together(function()
    if not first then return end
    create(slot, path, list)
    place = mesh.size() > 1 and share(slot[0]) or ""
  end)
  place = agree.tell(place)
  agree.together(function()
    if not first then join(slot, place) end
    for _, part in ipairs(mine) do move(C.pg_safetensors_write_block, slot[0], part.name, part) end
    if mesh.size() > 1 then c.check(C.pg_safetensors_sync(slot[0])) end
  end)
  agree.together(function()
    if first then c.check(C.pg_safetensors_finish(slot[0])) end
  end)
end

--- shards.save(path, parts, mine): the file of all tensors that `parts` (of all ranks) are of.  mine: those parts,
-- or shares of them, that this rank writes; every number is in one rank's.
function shards.save(path, parts, mine)
  local slot = ffi.new "pg_safetensors *[1]"
  local ok, why = pcall(save, slot, path, parts, mine)
  if slot[0] ~= nil then C.pg_safetensors_close(slot[0]) end
  if not ok then error(why, 0) end
end

-- ---- loading ----

local function stored_shape(file, i)
  local dtype, n, shape = ffi.new "int[1]", ffi.new "int[1]", {}
  c.check(C.pg_safetensors_info(file, i, dtype, n, dims))
  for k = 1, n[0] do shape[k] = tonumber(dims[k - 1]) end
  return text_of(shape)
end

local function load_parts(file, path, parts, list)
  for _, e in ipairs(list) do
    local i = C.pg_safetensors_find(file, e.name)
    if i < 0 then c.fail("resume: %s has no tensor %s", path, e.name) end
    local stored, own = stored_shape(file, i), text_of(e.whole)
    if stored ~= own then c.fail("resume: %s is %s in %s, %s in this model", e.name, stored, path, own) end
  end
  local count = tonumber(C.pg_safetensors_count(file))
  if count ~= #list then c.fail("resume: %s holds %d tensors, this model has %d", path, count, #list) end
  for _, part in ipairs(parts) do
    move(C.pg_safetensors_read_block, file, C.pg_safetensors_find(file, part.name), part, true)
  end
end

--- shards.load(path, parts): fill the parts of all ranks from a file.  It holds their tensors, in their shapes,
-- and no other; numbers are cast to the parts' dtypes.
function shards.load(path, parts)
  local list = catalogue(parts, {})
  agree.together(function()
    local file = shards.open(path)
    local ok, why = pcall(load_parts, file, path, parts, list)
    shards.close(file)
    if not ok then error(why, 0) end
  end)
end

return shards
