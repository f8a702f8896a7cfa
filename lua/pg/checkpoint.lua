-- checkpoint.lua: a training put on disk whole or not at all, and taken up again.
-- runs/NAME/checkpoints/step-00000300/ holds model.safetensors (Hugging Face's names), optimizer.safetensors
-- (exp_avg.NAME, ...) and manifest.json (what is not a tensor).  All is written in a folder aside, each
-- file fsynced, the manifest last; then the folder is renamed.  A folder without a manifest that parses and
-- files that open is no checkpoint.  Ranks of dp hold the same numbers, so rank 0 writes them.
local c = require "pg.c"
local fs = require "pg.fs"
local json = require "pg.json"
local Tensor = require "pg.tensor"
local C, ffi = c.C, c.ffi

local checkpoint = {}
local VERSION = 1
local MODEL, OPTIMIZER, MANIFEST = "model.safetensors", "optimizer.safetensors", "manifest.json"

local function name_of(step) return ("step-%08d"):format(step) end

-- ---- what is there ----

--- checkpoint.list(run folder) -> folders of checkpoints, the newest first.
function checkpoint.list(folder)
  local found = {}
  local place = folder .. "/checkpoints"
  if not fs.is_dir(place) then return found end
  for _, name in ipairs(fs.list(place)) do
    if name:match "^step%-%d+$" then found[#found + 1] = place .. "/" .. name end
  end
  table.sort(found, function(a, b) return tonumber(a:match "%d+$") > tonumber(b:match "%d+$") end)
  return found
end

--- checkpoint.clean(run folder): remove what saves that died have left.
function checkpoint.clean(folder)
  for _, path in ipairs(fs.glob(folder .. "/checkpoints/.tmp-*")) do fs.remove(path) end
end

local function open(path)
  local slot = ffi.new "pg_safetensors *[1]"
  c.check(C.pg_safetensors_open(slot, path))
  return ffi.gc(slot[0], C.pg_safetensors_close)
end

local function close(file) C.pg_safetensors_close(ffi.gc(file, nil)) end

local whole = { "step", "position", "tokens", "epoch" }

--- checkpoint.read(folder) -> its manifest; raises where it is no whole checkpoint.  Keys that this
-- version does not know are left alone.
function checkpoint.read(folder)
  local m = json.read(folder .. "/" .. MANIFEST)
  if type(m) ~= "table" or type(m.version) ~= "number" then c.fail("%s/%s is no manifest", folder, MANIFEST) end
  if m.version > VERSION then
    c.fail("%s: its format is version %d, this pgrun reads up to %d; take a newer pgrun", folder, m.version, VERSION)
  end
  for _, key in ipairs(whole) do
    local value = m[key]
    if type(value) ~= "number" or value < 0 or value ~= math.floor(value) then
      c.fail("%s/%s: %s is %s, not a count", folder, MANIFEST, key, tostring(value))
    end
  end
  for _, file in ipairs { MODEL, OPTIMIZER } do close(open(folder .. "/" .. file)) end
  return m
end

--- checkpoint.newest(run folder, tell) -> folder, manifest of the newest valid checkpoint; each broken one
-- is told by tell(text) and passed over.  Raises where none is valid.
function checkpoint.newest(folder, tell)
  local list = checkpoint.list(folder)
  for _, path in ipairs(list) do
    local ok, m = pcall(checkpoint.read, path)
    if ok then return path, m end
    tell(("checkpoint %s is broken and passed over: %s"):format(path, m))
  end
  c.fail("no checkpoint under %s can be read (%d looked at)", folder .. "/checkpoints", #list)
end

-- ---- tensors ----

local dims = ffi.new "int64_t[8]"

local function release(pieces)
  for _, piece in ipairs(pieces) do piece.view:free() end
end

local function write_tensors(file, pieces)
  c.check(C.pg_safetensors_set_meta(file, "format", "pt"))
  for _, piece in ipairs(pieces) do
    local shape = piece.view.shape
    for i, d in ipairs(shape) do dims[i - 1] = d end
    c.check(C.pg_safetensors_declare(file, piece.name, Tensor.codes[piece.view.dtype], #shape, dims))
  end
  c.check(C.pg_safetensors_begin(file))
  for _, piece in ipairs(pieces) do c.check(C.pg_safetensors_write(file, piece.name, 0, piece.view.raw)) end
  c.check(C.pg_safetensors_finish(file))
end

-- Write pieces { name, view } to a file, and free the views.
local function save_pieces(path, pieces)
  local slot = ffi.new "pg_safetensors *[1]"
  local ok, why = pcall(function()
    c.check(C.pg_safetensors_create(slot, path))
    write_tensors(slot[0], pieces)
  end)
  if slot[0] ~= nil then C.pg_safetensors_close(slot[0]) end
  release(pieces)
  if not ok then error(why, 0) end
end

local function shape_text(file, i)
  local dtype, n, text = ffi.new "int[1]", ffi.new "int[1]", {}
  c.check(C.pg_safetensors_info(file, i, dtype, n, dims))
  for k = 1, n[0] do text[k] = tonumber(dims[k - 1]) end
  return table.concat(text, ",")
end

-- Fill pieces from a file; every one must be there, in its shape, and no other.
local function load_pieces(path, pieces)
  local file = open(path)
  local ok, why = pcall(function()
    for _, piece in ipairs(pieces) do
      local i = C.pg_safetensors_find(file, piece.name)
      if i < 0 then c.fail("resume: %s has no tensor %s", path, piece.name) end
      local stored, own = shape_text(file, i), table.concat(piece.view.shape, ",")
      if stored ~= own then c.fail("resume: %s is [%s] in %s, [%s] in this model", piece.name, stored, path, own) end
      c.check(C.pg_safetensors_read(file, i, 0, piece.view.raw))
    end
    local count = tonumber(C.pg_safetensors_count(file))
    if count ~= #pieces then c.fail("resume: %s holds %d tensors, this model has %d", path, count, #pieces) end
  end)
  close(file)
  release(pieces)
  if not ok then error(why, 0) end
end

local function weights(segments)
  local list = {}
  for _, s in ipairs(segments) do
    for _, piece in ipairs(s:pieces(s.value)) do list[#list + 1] = piece end
  end
  return list
end

-- ---- saving ----

local function prune(folder, keep)
  for i, path in ipairs(checkpoint.list(folder)) do
    if i > keep then fs.remove(path) end
  end
end

--- checkpoint.save(run folder, optim, manifest, keep) -> the checkpoint's folder.  On one rank.  Raises with
-- nothing changed where it fails; older ones beyond `keep` go only after the new one stands.
function checkpoint.save(folder, optim, manifest, keep)
  local place = folder .. "/checkpoints"
  local aside = ("%s/.tmp-%s"):format(place, name_of(manifest.step))
  local target = place .. "/" .. name_of(manifest.step)
  manifest.version = VERSION
  local ok, why = pcall(function()
    fs.remove(aside)
    fs.mkdir(aside)
    save_pieces(aside .. "/" .. MODEL, weights(optim.segments))
    save_pieces(aside .. "/" .. OPTIMIZER, optim:state_pieces())
    json.write(aside .. "/" .. MANIFEST, manifest, { indent = 2, replace = true })
    fs.sync(aside)
    if fs.exists(target) then fs.remove(target) end -- a broken one: resuming starts from the newest valid
    fs.rename(aside, target)
  end)
  if not ok then
    pcall(fs.remove, aside)
    c.fail("save: checkpoint of step %d: %s", manifest.step, why)
  end
  prune(folder, keep)
  return target
end

-- ---- going on ----

-- Fields of the model that change nothing that is stored.
local free = { dropout = true, std = true, context = true }

local function differ(path, was, is)
  if was == is or was == nil and is == nil then return end
  c.fail("resume: %s was %s in the checkpoint, is %s now; set it back, or start a new run without --resume", path,
         tostring(was), tostring(is))
end

--- checkpoint.fits(manifest, settings, data): raise, naming the field, where the training cannot go on under
-- these settings.  Steps, rates and batch may change.  data: samples and context of the training data.
function checkpoint.fits(m, settings, data)
  local was, is = m.settings or {}, settings
  if type(was.model) == "table" and type(is.model) == "table" then
    differ("model", was.model.name, is.model.name)
    local keys = {}
    for k in pairs(was.model) do keys[#keys + 1] = k end
    for k in pairs(is.model) do if was.model[k] == nil then keys[#keys + 1] = k end end
    table.sort(keys)
    for _, k in ipairs(keys) do
      if not free[k] then differ("model." .. k, was.model[k], is.model[k]) end
    end
  end
  if was.optim then differ("optim", was.optim.name, is.optim.name) end
  if m.seed then differ("seed", m.seed, is.seed) end
  local d = m.data or {}
  if d.seed then differ("data.seed", d.seed, is.data.seed) end
  if d.context then differ("data.context", d.context, data.context) end
  if d.samples and d.samples ~= data.samples then
    c.fail("resume: the data had %d samples, has %d now, so that place %d of their order means another sample; give "
           .. "the same data, or start a new run without --resume", d.samples, data.samples, m.position)
  end
end

--- checkpoint.load_model(folder, segments): the numbers of a model alone.
function checkpoint.load_model(folder, segments) load_pieces(folder .. "/" .. MODEL, weights(segments)) end

--- checkpoint.load(folder, manifest, optim): numbers of the model and of its optimiser, on every rank.
function checkpoint.load(folder, m, optim)
  checkpoint.load_model(folder, optim.segments)
  load_pieces(folder .. "/" .. OPTIMIZER, optim:state_pieces())
  optim:resume(m.optimizer and m.optimizer.steps or m.step)
end

return checkpoint
