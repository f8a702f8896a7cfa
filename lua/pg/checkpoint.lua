-- checkpoint.lua: a training put on disk whole or not at all, and taken up again in any layout.
-- runs/NAME/checkpoints/step-00000300/ holds model.safetensors (Hugging Face's names, f32), optimizer.safetensors
-- (exp_avg.NAME, ..., in the moments' dtype) and manifest.json (what is not a tensor).  Tensors are those of the
-- whole model, whatever the ranks hold of them: shards.lua writes and reads them together.  All is written in a
-- folder aside, each file fsynced, the manifest, which holds the files' sizes and hashes and its own, last; then the
-- folder is renamed.  A folder without a manifest that parses and files that are as it says and open is no checkpoint.
local c = require "pg.c"
local agree = require "pg.agree"
local fragments = require "pg.fragments"
local fs = require "pg.fs"
local json = require "pg.json"
local mesh = require "pg.mesh"
local shards = require "pg.shards"
local show = require("pg.describe").show
local zero = require "pg.parallel.zero"
local Tensor = require "pg.tensor"
local C = c.C

local checkpoint = {}
local VERSION = 2 -- from 2 on a manifest tells its own hash
-- Bytes a second that files of checkpoints are written or read with at least, on a shared disk on a bad day: for so
-- long ranks that are through wait for those that are not.  (Hashing alone does 10e9.)
checkpoint.slowest = 50e6
local BLANK = ("0"):rep(16) -- stands for it while it is taken
local MODEL, OPTIMIZER, MANIFEST = "model.safetensors", "optimizer.safetensors", "manifest.json"
local FILES = { MODEL, OPTIMIZER }

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

local whole = { "step", "position", "tokens", "epoch" }
local tables = { "settings", "data", "optimizer", "settings.optim" }
local counts = { "optimizer.steps", "data.samples" } -- where they are told

-- Text of a manifest with this hash in it, and what stood there.
local function with_hash(text, hash)
  local was
  text = text:gsub('("manifest_xxh64"%s*:%s*")([^"]*)', function(key, value)
    was = value
    return key .. hash
  end, 1)
  return text, was
end

local function compare_own(path, text, version)
  local blank, told = with_hash(text, BLANK)
  if not told and version < 2 then return end
  if not told then c.fail("%s does not tell its own hash", path) end
  local hash = bit.tohex(c.hash(blank))
  if hash ~= told then c.fail("%s has hash %s, it says %s: it was changed since it was written", path, hash, told) end
end

local function is_count(x) return type(x) == "number" and x >= 0 and x <= 2^53 and x == math.floor(x) end

-- What path = "a" or "a.b" names; nil too where there is no a.
local function value_at(m, path)
  local value = m
  for key in path:gmatch "[^.]+" do value = value and value[key] end
  return value
end

-- Manifests of version 1 have no hash: what is used of them is of the kind that it must be.
local function check_kinds(m, path)
  local function wrong(key, value, wanted)
    c.fail("%s: %s is %s, not a %s", path, key, show(value), wanted)
  end
  for _, key in ipairs(whole) do
    if not is_count(m[key]) then wrong(key, m[key], "count") end
  end
  for _, key in ipairs(tables) do
    local value = value_at(m, key)
    if value ~= nil and type(value) ~= "table" then wrong(key, value, "table") end
  end
  for _, key in ipairs(counts) do
    local value = value_at(m, key)
    if value ~= nil and not is_count(value) then wrong(key, value, "count") end
  end
end

-- The manifest of a folder.  Keys that this version does not know are left alone.
local function manifest_of(folder)
  local path = folder .. "/" .. MANIFEST
  local text = fs.read(path)
  local m = json.decode(text, path)
  if type(m) ~= "table" or type(m.version) ~= "number" then c.fail("%s/%s is no manifest", folder, MANIFEST) end
  if m.version > VERSION then
    c.fail("%s: its format is version %d, this pgrun reads up to %d; take a newer pgrun", folder, m.version, VERSION)
  end
  compare_own(path, text, m.version)
  check_kinds(m, path)
  return m
end

-- What a manifest tells of the folder's files.
local function describe(folder)
  local files = {}
  for _, name in ipairs(FILES) do
    local path = folder .. "/" .. name
    files[name] = { bytes = fs.size(path), xxh64 = fs.hash(path) }
  end
  return files
end

-- Raise where a file is not what the manifest tells.  The first manifests tell nothing of files.
local function compare(folder, m)
  if m.files == nil then return end
  for _, name in ipairs(FILES) do
    local path, want = folder .. "/" .. name, type(m.files) == "table" and m.files[name]
    if type(want) ~= "table" or type(want.bytes) ~= "number" or type(want.xxh64) ~= "string" then
      c.fail("%s/%s does not tell size and hash of %s", folder, MANIFEST, name)
    end
    local bytes = fs.size(path)
    if bytes ~= want.bytes then c.fail("%s has %.0f bytes, the manifest says %.17g", name, bytes, want.bytes) end
    local hash = fs.hash(path)
    if hash ~= want.xxh64 then c.fail("%s has hash %s, the manifest says %s", name, hash, want.xxh64) end
  end
end

local function open_files(folder)
  for _, name in ipairs(FILES) do shards.close(shards.open(folder .. "/" .. name)) end
end

--- checkpoint.read(folder) -> its manifest; raises where that or a file's table of tensors cannot be read.  The
-- numbers are not looked at: see checkpoint.newest.
function checkpoint.read(folder)
  local m = manifest_of(folder)
  open_files(folder)
  return m
end

-- The same, where every byte of the files is as it was written.  Reads them whole.
local function read_whole(folder)
  local m = manifest_of(folder)
  compare(folder, m)
  open_files(folder)
  return m
end

--- checkpoint.reading(run folder) -> seconds that it may take to find its newest valid checkpoint and to load it.
function checkpoint.reading(folder)
  local bytes = 0
  for _, path in ipairs(checkpoint.list(folder)) do
    for _, name in ipairs(FILES) do
      local file = path .. "/" .. name
      bytes = bytes + (fs.exists(file) and fs.size(file) or 0)
    end
  end
  return bytes / checkpoint.slowest
end

--- checkpoint.newest(run folder, tell) -> folder, manifest of the newest valid checkpoint; each broken one, even by
-- a bit, is told by tell(text) and passed over.  Raises where none is valid.  Cost: reads what it returns once.
function checkpoint.newest(folder, tell)
  local list = checkpoint.list(folder)
  for _, path in ipairs(list) do
    local ok, m = pcall(read_whole, path)
    if ok then return path, m end
    if C.pg_interrupted() ~= 0 then error(m, 0) end
    tell(("checkpoint %s is broken and passed over: %s"):format(path, m))
  end
  c.fail("no checkpoint under %s can be read (%d looked at)", folder .. "/checkpoints", #list)
end

-- ---- tensors ----

-- The parts of a list of segments (shards.lua), and those that this rank saves.  dress(part, segment) adds their
-- numbers.
local function parts_of(segments, dress)
  local all, mine = {}, {}
  mesh.ready()
  local place = { pp = mesh.pp.rank, tp = mesh.tp.rank }
  for _, s in ipairs(segments) do
    local first, size = fragments.share(s, mesh.dp)
    for _, part in ipairs(fragments.of(s, place, s.first, s.size)) do
      dress(part, s)
      all[#all + 1] = part
      mine[#mine + 1] = part.writes and fragments.within(part, first, size) or nil
    end
  end
  return all, mine
end

-- The numbers of the model, those of half precision in f32.
local function weights(segments)
  return parts_of(segments, function(part, s)
    local half = s.dtype == "bf16" or s.dtype == "f16"
    part.dtype, part.flat, part.master, part.base = half and "f32" or s.dtype, s.own_value, s.master, s.first
  end)
end

-- The moments of an optimiser, each under MOMENT.PARAMETER.
local function moments(optim)
  local all, mine = {}, {}
  for _, moment in ipairs(optim.moments) do
    local held, saved = parts_of(optim.segments, function(part, s)
      local flat = optim.states[s][moment]
      part.name, part.dtype, part.flat, part.base = moment .. "." .. part.name, flat.dtype, flat, s.first
    end)
    for _, part in ipairs(held) do all[#all + 1] = part end
    for _, part in ipairs(saved) do mine[#mine + 1] = part end
  end
  return all, mine
end

-- ---- saving ----

local function prune(folder, keep)
  for i, path in ipairs(checkpoint.list(folder)) do
    if i > keep then fs.remove(path) end
  end
end

-- On rank 0: an empty folder aside.
local function begin(aside)
  fs.remove(aside)
  fs.mkdir(aside)
end

-- On rank 0, when the tensors of all ranks are on disk: the manifest, and the folder in its place.
local function finish(aside, target, manifest)
  manifest.files, manifest.manifest_xxh64 = describe(aside), BLANK
  local text = json.encode(manifest, { indent = 2, replace = true }) .. "\n"
  fs.write(aside .. "/" .. MANIFEST, (with_hash(text, bit.tohex(c.hash(text)))))
  fs.sync(aside)
  if fs.exists(target) then fs.remove(target) end -- a broken one: resuming starts from the newest valid
  fs.rename(aside, target)
end

local function on_first(f, ...)
  if mesh.rank() == 0 then return f(...) end
end

-- Bytes of the parts that this rank writes.
local function bytes_of(parts)
  local bytes = 0
  for _, part in ipairs(parts) do bytes = bytes + part.count * Tensor.sizes[part.dtype] end
  return bytes
end

local function save(folder, optim, manifest, keep)
  local place = folder .. "/checkpoints"
  local aside = ("%s/.tmp-%s"):format(place, name_of(manifest.step))
  local target = place .. "/" .. name_of(manifest.step)
  manifest.version = VERSION
  local ok, why = pcall(function()
    agree.together(on_first, begin, aside)
    shards.save(aside .. "/" .. MODEL, weights(optim.segments))
    shards.save(aside .. "/" .. OPTIMIZER, moments(optim))
    agree.together(on_first, finish, aside, target, manifest)
  end)
  if not ok then
    pcall(on_first, fs.remove, aside)
    c.fail("save: checkpoint of step %d: %s", manifest.step, why)
  end
  agree.together(on_first, prune, folder, keep)
  return target
end

--- checkpoint.save(run folder, optim, manifest, keep) -> the checkpoint's folder.  All ranks call it.  Raises on
-- all, with nothing changed, where it fails on one; older ones beyond `keep` go only after the new one stands.
function checkpoint.save(folder, optim, manifest, keep)
  local _, model = weights(optim.segments)
  local _, moved = moments(optim)
  local bytes = mesh.world:sum_numbers({ bytes_of(model) + bytes_of(moved) })[1]
  return mesh.patient(bytes / checkpoint.slowest, save, folder, optim, manifest, keep)
end

-- ---- going on ----

-- Fields of the model that change nothing that is stored.
local free = { dropout = true, std = true, context = true }

local function differ(path, was, is)
  if was == is or was == nil and is == nil then return end
  error(("%s was %s in the checkpoint, is %s now; set it back"):format(path, tostring(was), tostring(is)), 0)
end

local function fits(m, settings, data)
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
    error(("the data had %d samples, has %d now, so that place %d of their order means another sample; give the same "
           .. "data"):format(d.samples, data.samples, m.position), 0)
  end
end

--- checkpoint.fits(manifest, settings, data, run): raise, naming run and field, where the training cannot go on under
-- these settings.  Steps, rates and batch may change.  data: samples and context of the training data.
function checkpoint.fits(m, settings, data, run)
  local ok, why = pcall(fits, m, settings, data)
  if not ok then
    c.fail("resume from %s: %s, name another run with --resume=RUN, or start a new one without --resume", run, why)
  end
end

--- checkpoint.load_model(folder, segments): the numbers of a model alone, whatever layout wrote them.  All ranks
-- call it; each reads what it updates itself, the rest comes from its neighbours on dp.
function checkpoint.load_model(folder, segments)
  zero.ready(segments)
  shards.load(folder .. "/" .. MODEL, (weights(segments)))
  zero.gather_values(segments)
end

--- checkpoint.load(folder, manifest, optim): numbers of the model and of its optimiser, on every rank.
function checkpoint.load(folder, m, optim)
  checkpoint.load_model(folder, optim.segments)
  shards.load(folder .. "/" .. OPTIMIZER, (moments(optim)))
  optim:resume(m.optimizer and m.optimizer.steps or m.step)
end

return checkpoint
