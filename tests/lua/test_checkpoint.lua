-- test_checkpoint.lua: a checkpoint is there whole or not at all, and going on from it changes nothing.
-- limit: 240
local check = require "tests.check"
local c = require "pg.c"
local checkpoint = require "pg.checkpoint"
local fs = require "pg.fs"
local json = require "pg.json"
local pieces = require "tests.pieces"
local training = require "tests.training"
local tests = {}

require("pg.step").block() -- one for the process; made here so that no test counts it

local EPOCH = 2 -- steps: 16 samples in batches of 8
local STEPS = 3 * EPOCH
local function recipe(changes)
  local r = { data = { text = training.text(100), batch = 8 }, save = { every = 1, keep = 10 }, steps = STEPS }
  for k, v in pairs(changes or {}) do r[k] = v end
  return r
end

local whole
-- The run that was never interrupted, with a checkpoint at every step.
local function uninterrupted()
  if not whole then
    local records, folder = training.run(recipe(), "whole")
    whole = { records = records, folder = folder }
  end
  return whole
end

-- A copy of it as it was after `step` steps, with metrics of a later step left over.
local function stopped(step, name)
  local folder = training.scratch .. "/" .. name
  fs.remove(folder)
  os.execute(("cp -r '%s' '%s'"):format(uninterrupted().folder, folder))
  for _, path in ipairs(checkpoint.list(folder)) do
    if tonumber(path:match "%d+$") > step then fs.remove(path) end
  end
  return folder
end

local function same_curve(got)
  for _, key in ipairs { "step", "loss", "rate", "grad_norm", "tokens" } do
    check.equal(training.column(got, key), training.column(uninterrupted().records, key), key)
  end
end

function tests.test_resumed_at_every_step_it_is_the_same_to_the_bit()
  for step = 1, STEPS - 1 do -- steps 2 and 4 end an epoch
    stopped(step, "resumed")
    same_curve((training.run(recipe(), "resumed", { "--resume" })))
  end
end

function tests.test_resumed_without_steps_left_it_does_nothing()
  stopped(STEPS, "resumed")
  local records, _, code = training.run(recipe(), "resumed", { "--resume" })
  check.equal(code, 0)
  same_curve(records)
end

function tests.test_the_newest_valid_one_is_taken()
  local folder = stopped(4, "broken")
  local newest = checkpoint.list(folder)
  fs.write(newest[1] .. "/model.safetensors", fs.read(newest[1] .. "/model.safetensors"):sub(1, -9)) -- torn
  fs.remove(newest[2] .. "/manifest.json")
  local told = {}
  local path, m = checkpoint.newest(folder, function(text) told[#told + 1] = text end)
  check.equal(path, newest[3])
  check.equal(m.step, 2)
  check.equal(#told, 2)
  check.is_true(told[1]:find("step-00000004 is broken", 1, true) ~= nil, told[1])
  same_curve((training.run(recipe(), "broken", { "--resume" })))
end

-- One bit of a file is another, at a byte counted from 1.
local function flip(path, at)
  local text = fs.read(path)
  fs.write(path, text:sub(1, at - 1) .. string.char(bit.bxor(text:byte(at), 1)) .. text:sub(at + 1))
end

-- Pass over the newest one for this reason.
local function passed_over(folder, reason)
  local list, told = checkpoint.list(folder), {}
  check.equal((checkpoint.newest(folder, function(text) told[#told + 1] = text end)), list[2])
  check.equal(#told, 1)
  local start = ("checkpoint %s is broken and passed over: "):format(list[1])
  check.equal(told[1]:sub(1, #start), start)
  check.is_true(told[1]:find(reason, #start + 1, true) ~= nil, told[1] .. "; expected: " .. reason)
end

function tests.test_a_file_that_was_damaged_is_found()
  for _, name in ipairs { "model.safetensors", "optimizer.safetensors" } do
    local folder = stopped(2, "damaged")
    local newest = checkpoint.list(folder)[1]
    local path, told = newest .. "/" .. name, json.read(newest .. "/manifest.json").files[name]
    local text = fs.read(path)
    check.equal(told, { bytes = #text, xxh64 = bit.tohex(c.hash(text)) })
    for _, at in ipairs { 1, 40, math.floor(#text / 2), #text } do -- length and text of the header, numbers
      flip(path, at)
      local now = bit.tohex(c.hash(fs.read(path)))
      passed_over(folder, ("%s has hash %s, the manifest says %s"):format(name, now, told.xxh64))
      flip(path, at)
    end
    check.equal((checkpoint.newest(folder, error)), newest)
    fs.write(path, text:sub(1, -2))
    passed_over(folder, ("%s has %d bytes, the manifest says %d"):format(name, #text - 1, #text))
    fs.write(path, text .. "x")
    passed_over(folder, ("%s has %d bytes, the manifest says %d"):format(name, #text + 1, #text))
    fs.remove(path)
    passed_over(folder, "No such file")
  end
  same_curve((training.run(recipe(), "damaged", { "--resume" })))
end

function tests.test_a_manifest_that_was_damaged_is_found()
  local folder = stopped(2, "manifest")
  local newest = checkpoint.list(folder)[1]
  local path = newest .. "/manifest.json"
  local text = fs.read(path)
  for at = 1, #text do
    flip(path, at)
    check.is_true(not pcall(checkpoint.read, newest), "a flip is not seen at byte " .. at)
    fs.write(path, text)
  end
  fs.write(path, (text:gsub('"tokens": 5', '"tokens": 6', 1)))
  passed_over(folder, "manifest.json has hash ")
  fs.write(path, (text:gsub('"manifest_xxh64"', '"something_else"', 1)))
  passed_over(folder, "manifest.json does not tell its own hash")
  fs.write(path, text)
  same_curve((training.run(recipe(), "manifest", { "--resume" })))
end

function tests.test_a_manifest_tells_of_all_files_or_of_none()
  local folder = stopped(2, "told")
  local newest = checkpoint.list(folder)[1]
  local path = newest .. "/manifest.json"
  local m = json.read(path)
  m.version, m.manifest_xxh64 = 1, nil -- whose manifests do not tell their own hash
  local model, optimizer = m.files["model.safetensors"], m.files["optimizer.safetensors"]
  local function says(files, reason)
    m.files = files
    json.write(path, m)
    if reason then passed_over(folder, reason) end
  end
  says("none", "does not tell size and hash of model")
  says({ ["model.safetensors"] = model }, "does not tell size and hash of optimizer")
  says({ ["model.safetensors"] = model, ["optimizer.safetensors"] = { bytes = optimizer.bytes } },
       "does not tell size and hash of optimizer")
  says(nil) -- as before there were hashes: numbers are not looked at
  local weights = newest .. "/model.safetensors"
  flip(weights, fs.size(weights))
  check.equal((checkpoint.newest(folder, error)), newest)
  flip(weights, fs.size(weights))
  same_curve((training.run(recipe(), "told", { "--resume" })))
end

-- A manifest without a hash may have been changed by hand: it is passed over where it could not be used.
function tests.test_a_manifest_holds_what_it_must()
  local folder = stopped(2, "kinds")
  local path = checkpoint.list(folder)[1] .. "/manifest.json"
  local m = json.read(path)
  m.version, m.manifest_xxh64 = 1, nil
  local function wrong(change, reason)
    local changed = json.decode(json.encode(m), path)
    change(changed)
    json.write(path, changed)
    passed_over(folder, "manifest.json: " .. reason)
  end
  wrong(function(t) t.step = nil end, "step is nil, not a count")
  wrong(function(t) t.step = 1e300 end, "step is 1e+300, not a count")
  wrong(function(t) t.tokens = 1.5 end, "tokens is 1.5, not a count")
  wrong(function(t) t.data = 1 end, "data is 1, not a table")
  wrong(function(t) t.data.samples = "many" end, 'data.samples is "many", not a count')
  wrong(function(t) t.settings = "none" end, 'settings is "none", not a table')
  wrong(function(t) t.settings.optim = 2 end, "settings.optim is 2, not a table")
  wrong(function(t) t.optimizer = -1 end, "optimizer is -1, not a table")
  wrong(function(t) t.optimizer.steps = -1 end, "optimizer.steps is -1, not a count")
  json.write(path, m)
  same_curve((training.run(recipe(), "kinds", { "--resume" })))
end

function tests.test_an_interrupt_is_no_damage()
  local folder = stopped(2, "interrupted")
  c.C.pg_interrupt(1)
  local told = {}
  local ok, why = pcall(checkpoint.newest, folder, function(text) told[#told + 1] = text end)
  c.C.pg_interrupt(0)
  check.equal({ ok, told }, { false, {} })
  check.equal(why:match "interrupted$", "interrupted")
end

function tests.test_only_the_newest_are_kept_and_leftovers_go()
  local _, folder = training.run(recipe { save = { every = 1, keep = 2 } }, "kept")
  local list = checkpoint.list(folder)
  check.equal(#list, 2)
  check.equal(list[1]:match "%d+$", "00000006")
  fs.mkdir(folder .. "/checkpoints/.tmp-step-00000007/x")
  checkpoint.clean(folder)
  check.equal(#fs.list(folder .. "/checkpoints"), 2)
end

-- A model and its optimiser, with numbers that depend on the seed.
local function trainee(seed)
  local model = pg.build(training.recipe().model, { seed = seed })
  return pg.optim.adamw(model:parameters(), { rate = 1e-3 }, { seed = seed })
end
local function manifest(step) return { step = step, position = 8 * step, tokens = 256 * step, epoch = 0 } end

function tests.test_a_save_that_fails_leaves_the_one_before()
  local folder = training.scratch .. "/full"
  fs.remove(folder)
  fs.mkdir(folder .. "/checkpoints")
  local optim = trainee(1)
  checkpoint.save(folder, optim, manifest(1), 1)
  local failed = 0
  for n = 1, 1000 do
    c.C.pg_fs_fail_after(n)
    local ok, why = pcall(checkpoint.save, folder, optim, manifest(2), 1)
    c.C.pg_fs_fail_after(0)
    if ok then break end
    failed = failed + 1
    check.is_true(why:find("save: checkpoint of step 2: ", 1, true) ~= nil, why)
    check.is_true(why:find("No space left on device", 1, true) ~= nil, why)
    local _, m = checkpoint.newest(folder, function(text) error(text) end)
    check.is_true(m.step == 1 or #checkpoint.list(folder) == 2, "nothing valid is lost")
    check.equal(#fs.glob(folder .. "/checkpoints/.tmp-*"), 0)
    if m.step == 2 then fs.remove(folder .. "/checkpoints/step-00000002") end -- all but the last fsync was done
  end
  check.is_true(failed >= 6, "only " .. failed .. " places failed")
  local _, m = checkpoint.newest(folder, error)
  check.equal(m.step, 2)
  check.equal(#checkpoint.list(folder), 1)
end

function tests.test_numbers_come_back_and_unknown_keys_are_left_alone()
  local folder = training.scratch .. "/back"
  fs.remove(folder)
  fs.mkdir(folder .. "/checkpoints")
  local one, two = trainee(1), trainee(2)
  one.segments[1].value:fill(0.5)
  local m = manifest(3)
  m.optimizer, m.hashes = { name = "adamw", steps = 3 }, { "later" }
  local path = checkpoint.save(folder, one, m, 1)
  checkpoint.load(path, checkpoint.read(path), two)
  for i, s in ipairs(one.segments) do
    for k, p in ipairs(s.params) do check.close(two.segments[i].params[k], p, 0) end
  end
  check.equal(two.steps, 3)
end

local function empty_run(name)
  local folder = training.scratch .. "/" .. name
  fs.remove(folder)
  fs.mkdir(folder .. "/checkpoints")
  return folder
end

-- The bytes of a file with these views, written whole and by one process.
local function file_of(views)
  local C, slot, path = c.C, c.ffi.new "pg_safetensors *[1]", training.scratch .. "/by-hand.safetensors"
  c.check(C.pg_safetensors_create(slot, path))
  c.check(C.pg_safetensors_set_meta(slot[0], "format", "pt"))
  for _, v in ipairs(views) do
    local dims = c.ffi.new("int64_t[8]", v.view.shape)
    c.check(C.pg_safetensors_declare(slot[0], v.name, require("pg.tensor").codes[v.view.dtype], #v.view.shape, dims))
  end
  c.check(C.pg_safetensors_begin(slot[0]))
  for _, v in ipairs(views) do
    c.check(C.pg_safetensors_write(slot[0], v.name, 0, v.view.raw))
    v.view:free()
  end
  c.check(C.pg_safetensors_finish(slot[0]))
  C.pg_safetensors_close(slot[0])
  return fs.read(path)
end

function tests.test_tensors_are_whole_in_their_dtype()
  for _, dtype in ipairs { "f32", "f64" } do
    local folder = empty_run "whole-tensors"
    local optim = pieces.trainee({}, 1, dtype)
    pieces.moments(optim)
    local path = checkpoint.save(folder, optim, manifest(1), 1)
    local weights = {}
    for _, s in ipairs(optim.segments) do
      for _, v in ipairs(s:pieces(s.value)) do weights[#weights + 1] = v end
    end
    check.is_true(fs.read(path .. "/model.safetensors") == file_of(weights), dtype)
    check.is_true(fs.read(path .. "/optimizer.safetensors") == file_of(pieces.states(optim)), dtype)
  end
end

-- An update from gradients that depend on the step alone.
local function update(optim)
  for _, s in ipairs(optim.segments) do
    for _, piece in ipairs(s:pieces(s.own_grad)) do
      c.check(c.C.pg_random_normal(piece.view.raw, 9, c.hash(piece.name .. optim.steps), 0, 1, 0, 0, 0))
      piece.view:free()
    end
    for _, p in ipairs(s.params) do p.grad_fresh = false end
  end
  optim:step()
end

local function numbers_of(optim)
  local list = {}
  for _, s in ipairs(optim.segments) do list[#list + 1] = s:read_numbers():totable() end
  for _, piece in ipairs(pieces.states(optim)) do
    list[#list + 1] = piece.view:totable()
    piece.view:free()
  end
  return list
end

function tests.test_half_precision_goes_on_to_the_bit()
  for _, kind in ipairs { { "bf16" }, { "bf16", "bf16" }, { "f16" }, { "f16", "bf16" } } do
    local folder = empty_run "half"
    local one, two = pieces.trainee({}, 1, kind[1], kind[2]), pieces.trainee({}, 2, kind[1], kind[2])
    for _ = 1, 3 do update(one) end
    local m = manifest(3)
    m.optimizer = { steps = 3 }
    local path = checkpoint.save(folder, one, m, 1)
    checkpoint.load(path, m, two)
    for _ = 1, 2 do
      check.close(numbers_of(two), numbers_of(one), 0)
      for i, s in ipairs(one.segments) do check.close(two.segments[i].value, s.value, 0) end
      update(one)
      update(two)
    end
  end
end

function tests.test_precision_may_change()
  local folder = empty_run "precision"
  local half, whole_numbers = pieces.trainee({}, 1, "bf16", "bf16"), pieces.trainee({}, 2)
  for _ = 1, 3 do update(half) end
  checkpoint.load(checkpoint.save(folder, half, manifest(1), 9), manifest(1), whole_numbers)
  check.close(numbers_of(whole_numbers), numbers_of(half), 0)
  local again = pieces.trainee({}, 3, "bf16", "bf16")
  checkpoint.load(checkpoint.save(folder, whole_numbers, manifest(2), 9), manifest(2), again)
  check.close(numbers_of(again), numbers_of(half), 0)
end

local function refused(text, changes, name, args)
  local all = { "--resume" }
  for _, a in ipairs(args or {}) do all[#all + 1] = a end
  check.throws(function() training.run(recipe(changes), name, all) end, text)
end

function tests.test_what_cannot_go_on_is_refused_by_name()
  stopped(2, "refused")
  local wide = require "models.llama" { blocks = 1, width = 64, heads = 2, context = 32 }
  refused("model.width was 32 in the checkpoint, is 64 now", { model = wide }, "refused")
  refused("model.vocab was 259 in the checkpoint, is 300 now", nil, "refused", { "--model.vocab=300" })
  refused("seed was 0 in the checkpoint, is 1 now", nil, "refused", { "--seed=1" })
  refused("optim was adamw in the checkpoint, is sgd now", { optim = { "sgd" } }, "refused")
  refused("data.context was 32 in the checkpoint, is 16 now", nil, "refused", { "--data.context=16" })
  refused("the data had 16 samples", { data = { text = training.text(500), batch = 8 } }, "refused")
  refused("has no checkpoint to go on from", nil, "nowhere")
end

function tests.test_batch_rate_and_steps_may_change()
  stopped(2, "changed")
  local records = training.run(recipe(), "changed", { "--resume", "--data.batch=4", "--optim.rate=1e-4", "--steps=9" })
  check.equal(training.column(records, "step"), { 1, 2, 3, 4, 5, 6, 7, 8, 9 })
  check.equal(records[3].rate, 1e-4)
  check.equal(records[9].tokens, (2 * 8 + 7 * 4) * 32)
end

function tests.test_a_manifest_of_a_later_version_is_refused()
  local folder = stopped(1, "later")
  local path = checkpoint.list(folder)[1]
  local m = json.read(path .. "/manifest.json")
  m.version = 99
  json.write(path .. "/manifest.json", m)
  check.throws(function() checkpoint.read(path) end, "its format is version 99")
end

check.run(tests)
