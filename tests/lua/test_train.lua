-- test_train.lua: the loop of a recipe in one process: accumulation, recomputation, evaluation, batches
-- without a target, bad numbers, saves that fail, memory.
local check = require "tests.check"
local c = require "pg.c"
local checkpoint = require "pg.checkpoint"
local fs = require "pg.fs"
local training = require "tests.training"
local tests = {}

require("pg.step").block() -- one for the process; made here so that no test counts it

local runs = 0
-- training.run under a name of its own.
local function run(changes, args)
  runs = runs + 1
  local name = "train-" .. runs
  fs.remove(training.scratch .. "/" .. name)
  return training.run(changes, name, args)
end

local function losses(changes, args) return training.column((run(changes, args)), "loss") end

function tests.test_the_same_run_gives_the_same_bits() check.equal(losses(), losses()) end

function tests.test_accumulation_does_not_change_the_training()
  check.close(losses { micro = 2 }, losses(), check.f32)
  check.close(losses { micro = 1 }, losses(), check.f32)
end

function tests.test_recomputation_gives_the_same_bits() check.equal(losses { recompute = "block" }, losses()) end

-- The switch is the process's: each run sets it.  Only GPUs have it do something.
function tests.test_tf32_is_a_precision_of_its_own()
  local want = losses()
  local got = losses { precision = "tf32" }
  check.equal(c.C.pg_allow_tf32(0), 1)
  if c.device() == "cpu" then check.equal(got, want) else check.close(got, want, 1e-2) end
  c.C.pg_allow_tf32(1)
  check.equal(losses(), want)
  check.equal(c.C.pg_allow_tf32(0), 0)
end

function tests.test_a_record_has_the_keys_that_are_promised()
  local records = run { data = { text = training.text(500), batch = 8, held_out = 0.2 }, eval = { every = 2 } }
  local names = {}
  for name in pairs(records[2]) do names[#names + 1] = name end
  table.sort(names)
  check.equal(table.concat(names, " "),
              "grad_norm loss memory_peak rate seconds step tokens tokens_per_s val_loss") -- null: mfu_causal, mfu_full
  check.equal(records[1].val_loss, nil)
  check.equal(records[6].tokens, 6 * 8 * 32)
end

function tests.test_evaluation_sees_every_held_out_sample_once()
  local counted = 0
  local function loss(model, batch)
    if not require("pg.tape").context.training then counted = counted + batch.targets.count end
    return model:loss(batch)
  end
  local data = { text = training.text(500), batch = 8, held_out = 0.2 }
  local records = run { data = data, loss = loss, micro = 4 }
  local held = math.floor(fs.size(data.text) * 0.2)
  check.equal(counted, math.floor((held - 1) / 32) * 32)
  check.is_true(math.abs(records[6].val_loss - records[6].loss) < 0.5)
end

function tests.test_a_loss_and_a_rate_of_ones_own()
  local seen = {}
  local function loss(model, batch)
    return (pg.cross_entropy(model(batch.tokens), batch.targets, { step = batch.step }))
  end
  local got = run { loss = loss, optim = { "adamw", clip = 1.0, rate = function(state)
    seen[#seen + 1] = state.step
    check.is_true(state.loss > 0 and state.tokens == state.step * 256 and state.steps == 6)
    return 1e-3 * math.min(1, state.step / 3)
  end } }
  check.equal(seen, { 1, 2, 3, 4, 5, 6 })
  check.close(got[2].loss, losses()[2], check.f32)
end

function tests.test_the_hook_sees_every_step()
  local steps, folder = {}, nil
  local _, at = run { on_step = function(state) steps[#steps + 1], folder = state.step, state.run end }
  check.equal(steps, { 1, 2, 3, 4, 5, 6 })
  check.equal(folder, at)
end

-- A token file of 9 samples: ids, padding, padding, and so on, so that they have 31, 0 and 1 targets that
-- count (the last of a sample is the next one's first id), and the last of all has none.
local function padded()
  local path, ids = training.scratch .. "/padded.bin", {}
  for i = 0, 9 * 32 do ids[i + 1] = math.floor(i / 32) % 3 == 0 and i < 9 * 32 and 1 + i % 7 or 0 end
  fs.write(path, string.char(unpack(ids)))
  return path
end

function tests.test_a_batch_without_a_target_is_no_step()
  local records, folder = run { data = { tokens = padded(), dtype = "u8", pad = 0, batch = 1 }, steps = 5,
                                save = {} }
  check.equal(training.column(records, "step"), { 1, 2, 3, 4, 5 }) -- an epoch
  check.equal(records[5].tokens, 3 * 31 + 2)
  for _, r in ipairs(records) do check.is_true(r.loss > 0 and r.loss < 10 and r.grad_norm > 0) end
  local m = checkpoint.read(checkpoint.list(folder)[1])
  check.equal(m.optimizer.steps, 5)
  check.is_true(m.position >= 5 and m.position <= 9)
end

function tests.test_an_epoch_without_any_target_ends_the_run()
  local path = training.scratch .. "/empty.bin"
  fs.write(path, ("\0"):rep(129))
  check.throws(function() run { data = { tokens = path, dtype = "u8", pad = 0, batch = 1 } } end,
               "a whole epoch without a target that counts")
end

function tests.test_a_loss_that_is_not_finite_ends_the_run_by_name()
  local function loss(model, batch) return pg.scale(model:loss(batch), 0 / 0) end
  check.throws(function() run { loss = loss } end, "step 1, rank 0: the loss is nan; first bad tensor: none among")
  local function spoilt(model, batch)
    model.layers.items[2].norm1.weight:fill(1 / 0)
    return model:loss(batch)
  end
  check.throws(function() run { loss = spoilt } end,
               "first bad tensor: the parameter model.layers.0.input_layernorm.weight")
end

function tests.test_a_gradient_that_is_not_finite_ends_the_run_by_name()
  local explode = pg.op { name = "explode", forward = function(_, x) return x:clone() end,
                          grad = function(_, dy) return pg.scale(dy, 1 / 0) end }
  local function loss(model, batch) return explode((model:loss(batch))) end
  local message = check.throws(function() run { loss = loss } end, "step 1, rank 0: the gradient norm is ")
  check.is_true(message:find("first bad gradient: ", 1, true) ~= nil, message)
end

function tests.test_a_save_that_fails_stops_or_goes_on()
  local save = { every = 1, keep = 9 }
  local function fail_after(step)
    return function(state)
      if state.step ~= step then return end
      c.collect() -- or the files of a run before are closed, and fail, in place of the save
      c.C.pg_fs_fail_after(1)
    end
  end
  local changes = { save = save, on_step = fail_after(1) }
  check.throws(function() run(changes) end, "the checkpoints before it stand")
  c.C.pg_fs_fail_after(0)
  save.on_error = "go on"
  local records, folder = run(changes)
  check.equal(#records, 6)
  check.equal(#checkpoint.list(folder), 5)
  changes.on_step = fail_after(5)
  check.equal(select(3, run(changes)), 1) -- the last numbers are on no disk: not all of the work was done
  c.C.pg_fs_fail_after(0)
end

-- Lua's heap in KiB, without compiled traces, open files, mappings of this process.
local function held()
  jit.flush()
  c.collect()
  local mappings = 0
  for _ in io.lines "/proc/self/maps" do mappings = mappings + 1 end
  return { heap = collectgarbage "count", files = #fs.list "/proc/self/fd", mappings = mappings }
end

-- With all that happens on the way.
function tests.test_no_step_takes_more_than_the_tenth()
  local steps, at = 1000, {}
  local peaks = training.column((run {
    model = require "models.llama" { blocks = 1, width = 16, heads = 2, vocab = 259, context = 16 }, steps = steps,
    data = { text = training.text(500), batch = 2, held_out = 0.02 }, eval = { every = 7 }, save = { every = 50 },
    sample = { every = 50, tokens = 5 },
    on_step = function(state) if state.step % 200 == 0 then at[state.step] = held() end end,
  }), "memory_peak")
  check.equal(#peaks, steps)
  for step = 11, steps do check.equal(peaks[step], peaks[10]) end
  check.equal(at[1000].files, at[200].files)
  check.is_true(at[1000].mappings <= at[200].mappings + 4, at[1000].mappings .. " mappings")
  local grown = math.huge -- in the 200 steps where least did: LuaJIT's own buffers grow now and then
  for step = 400, steps, 200 do grown = math.min(grown, at[step].heap - at[step - 200].heap) end
  check.is_true(grown < 2, ("Lua's heap grew by %.1f KiB in each 200 steps"):format(grown))
end

function tests.test_a_run_is_not_written_over()
  fs.remove(training.scratch .. "/taken")
  training.run({}, "taken")
  check.throws(function() training.run({}, "taken") end, "holds a run already")
end

function tests.test_data_beyond_the_model_are_refused()
  check.throws(function() run(nil, { "--data.context=64" }) end, "data.context is 64, the model's is 32")
  check.throws(function() run(nil, { "--data.vocab=300" }) end, "data.vocab is 300, the model's is 259")
  check.throws(function() run(nil, { "--model.vocab=100" }) end, "set vocab = 259")
end

check.run(tests)
