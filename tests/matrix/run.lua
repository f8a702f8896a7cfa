-- matrix/run.lua: combinations (draw.lua) trained in their layouts, each compared with one process: losses, norms of
-- the gradient, the loss on held-out data, the last weights as a checkpoint has them.  Those of as many ranks share a
-- start: its processes train one after another.  A refusal ends a program, so each has a start of its own.
-- What one process gives is computed once for each kind of model, precision and number of steps.
local draw = require "tests.matrix.draw"
local fs = require "pg.fs"
local mesh = pg.mesh
local training = require "tests.training"

local run = {}
local SEQUENCES = 480 -- of the data, of which a tenth is held out

-- ---- what is trained ----

-- Ids with some order in them; now and then the rest of a sequence is padding, or all of one, so that micro-batches
-- and ranks have targets that count in unequal numbers.  0 is the padding.
local function tokens()
  local path, bytes, T = training.scratch .. "/matrix.bin", {}, draw.CONTEXT
  local state, id = 1, 0
  for i = 0, SEQUENCES * T do
    state = (state * 1103515245 + 12345) % 2^31
    id = (3 * id + math.floor(state / 2^16) % 4) % 64
    local sequence = math.floor(i / T)
    local padding = sequence % 7 == 3 or sequence % 3 == 1 and i % T > sequence % 13
    local written = padding and 0 or 1 + 4 * id
    bytes[i + 1] = string.char(written % 256, math.floor(written / 256))
  end
  fs.write(path, table.concat(bytes))
  return path
end

local function model_of(o)
  local fields = { context = draw.CONTEXT, head_chunk = o.head_chunk }
  local kind = draw.kinds[o.kind]
  for key, value in pairs(kind) do
    if key ~= "gpt2" and key ~= "sgd" and key ~= "aside" then fields[key] = value end
  end
  return require(kind.gpt2 and "models.gpt2" or "models.llama")(fields)
end

-- A schedule of somebody's own: two backwards late.
local function late(o)
  local lists = {}
  for stage = 0, o.stages - 1 do
    local list = {}
    for k = 1, o.micro + o.stages do
      if k <= o.micro then list[#list + 1] = { "forward", k } end
      if k > o.stages then list[#list + 1] = { "backward", k - o.stages } end
    end
    lists[stage + 1] = list
  end
  return lists
end

local function own_loss(model, batch)
  return pg.cross_entropy(model(batch.tokens), batch.targets, { ignore = batch.ignore, step = batch.step })
end

-- Clipping at 0.5 binds in most steps; decay makes two groups of every segment.
local function optim_of(o)
  if draw.kinds[o.kind].sgd then return { "sgd", rate = 0.3, momentum = 0.9, decay = 0.01 } end
  return { "adamw", clip = 0.5, decay = 0.1, rate = pg.rate.cosine { peak = 1e-3, warmup = 3 } }
end

local function recipe_of(o)
  local schedule, chunks = draw.schedule(o)
  local micro = draw.of(o, "micro")
  return {
    model = model_of(o), optim = optim_of(o), loss = o.loss == "own" and own_loss or nil,
    layout = { dp = o.dp, pp = o.pp, tp = o.tp, zero = o.zero, bucket = o.bucket,
               schedule = schedule == "own" and late or schedule, chunks = chunks, blocks = draw.blocks(o),
               sequence = o.sequence },
    micro = micro > 0 and micro or nil, recompute = o.recompute, precision = o.precision,
    data = { tokens = training.scratch .. "/matrix.bin", dtype = "u16", pad = 0, batch = draw.BATCH, held_out = 0.1 },
    eval = {}, save = {}, steps = draw.of(o, "steps"), log = { every = 1000 },
  }
end

--- run.work{ folder, text, folder, text, ... }: in the processes of a start: trains these combinations.
function run.work(list)
  local build = mesh.build
  for i = 1, #list, 2 do
    local o = draw.parse(list[i + 1])
    if pg.rank() == 0 then fs.write(training.scratch .. "/matrix.at", list[i]) end
    mesh.build = function(layout)
      layout.tp_chunks = o.tp_chunks
      return build(layout)
    end
    require("pg.recipe").run(recipe_of(o), { path = "tests/matrix", args = { "--run=" .. list[i] } })
    mesh.build = build
    pg.barrier()
  end
  if pg.rank() == 0 then fs.write(training.scratch .. "/matrix.at", "") end
end

-- ---- starts ----

local starts = 0

-- One start -> whether it ended well, its output, the folder of the combination that it was at.
local function start(ranks, list)
  starts = starts + 1
  local file = ("%s/matrix-%d.lua"):format(training.scratch, starts)
  local words = {}
  for i, one in ipairs(list) do
    words[i] = ("%q, %q"):format(one.folder, one.text)
    fs.remove(one.folder)
  end
  fs.write(file, ('require("tests.matrix.run").work {\n  %s }\n'):format(table.concat(words, ",\n  ")))
  fs.write(training.scratch .. "/matrix.at", "")
  local fine = training.start(ranks, file, file .. ".log")
  return fine, fs.read(file .. ".log"), fs.read(training.scratch .. "/matrix.at")
end

-- The last lines of an output, which say why it ended.
local function last_lines(text)
  local lines = {}
  for line in text:gmatch "[^\n]+" do lines[#lines + 1] = line end
  return table.concat(lines, "\n      ", math.max(1, #lines - 11))
end

-- Train all of a list with as many ranks; one that ends its start is told, and the rest are started again.
local function train(ranks, list)
  while #list > 0 do
    local fine, output, at = start(ranks, list)
    if fine then return end
    local rest, found
    for i, one in ipairs(list) do
      if one.folder == at then found, rest = one, { unpack(list, i + 1) } end
    end
    if not found then found, rest = list[1], { unpack(list, 2) } end
    found.wrong = "ended:\n      " .. last_lines(output)
    list = rest
  end
end

-- ---- one process ----

local alone = {} -- text of a combination -> { records, weights }

-- What of a combination matters to one process.
local function reference(o)
  return { kind = o.kind, precision = o.precision, steps = draw.of(o, "steps") }
end

local function folder_of(i) return ("%s/matrix-run-%s"):format(training.scratch, i) end

local function outcome(folder) return { training.records(folder), training.weights(folder) } end

-- References of a list of combinations that are not there yet.
local function make_references(list)
  local wanted, seen = {}, {}
  for _, one in ipairs(list) do
    local text = draw.text(reference(one.o))
    if not alone[text] and not seen[text] then
      seen[text] = true
      wanted[#wanted + 1] = { text = text, folder = folder_of("alone-" .. text:gsub("%W+", "-")) }
    end
  end
  if #wanted == 0 then return end
  train(1, wanted)
  for _, one in ipairs(wanted) do
    if one.wrong then error(("%s, in a single process, %s"):format(one.text, one.wrong), 0) end
    alone[one.text] = outcome(one.folder)
  end
end

-- ---- comparing ----

-- Relative, of each tensor of the last weights.
local WEIGHTS = 1e-3
-- What is promised leaves room for small mistakes; all combinations come within a tenth of it.
local function bound(key, step) return training.bound(key, step) / 4 end
-- Of bf16: its layouts round sums differently.
local function bf16_bound(key, step)
  if key == "grad_norm" then return 2e-2 end
  return step == 1 and 1e-3 or 5e-3
end

-- Where the bias of keys is in a tensor: its gradient is zero but for rounding, which Adam makes large.
local function is_key_bias(name, i, count)
  return name:find "c_attn%.bias$" and i > count / 3 and i <= count / 3 * 2
end

-- nil, or which tensor is too far off.
local function weights_differ(got, want)
  for name, numbers in pairs(want) do
    local own, difference, size = got[name], 0, 0
    if not own or #own ~= #numbers then return ("the checkpoint has no %s of %d numbers"):format(name, #numbers) end
    for i, x in ipairs(numbers) do
      if not is_key_bias(name, i, #numbers) then
        difference, size = difference + (own[i] - x) ^ 2, size + x ^ 2
      end
    end
    local e = math.sqrt(difference / size)
    local near = e <= WEIGHTS
    if not near then -- or not a number
      return ("%s: the last weights differ by %.3g of their norm"):format(name, e)
    end
  end
  for name in pairs(got) do
    if not want[name] then return "the checkpoint has a " .. name .. " of its own" end
  end
end

-- How near losses and norms come to their bounds, of all combinations, and which comes nearest.
local nearest = { share = 0 }
local function note(one, got, want)
  for step, r in ipairs(want) do
    for _, key in ipairs { "loss", "grad_norm" } do
      local share = math.abs(got[step][key] - r[key]) / (bound(key, step) * r[key])
      if share > nearest.share then nearest = { share = share, text = one.text, step = step, key = key } end
    end
  end
end

local function differs(one)
  local got, want = outcome(one.folder), alone[draw.text(reference(one.o))]
  local half = one.o.precision == "bf16"
  if not half and #got[1] == #want[1] then note(one, got[1], want[1]) end
  local fine, message = pcall(training.agree, "it differs", got[1], want[1], half and bf16_bound or bound)
  if not fine then return tostring(message):gsub("^[^\n]-: it differs", "it differs") end
  return not half and weights_differ(got[2], want[2]) or nil
end

-- ---- refusals ----

local LIMIT = 10 -- seconds that a refusal may take

-- nil, or what is wrong with a refusal that must say one of these texts, before the first step and soon.
local function not_refused(one, texts)
  local before = pg.time()
  local fine, output = start(draw.ranks(one.o), { one })
  if fine then return "it was trained, and must be refused: " .. table.concat(texts, "; or: ") end
  if pg.time() - before > LIMIT then return ("the refusal took more than %d s:\n      %s"):format(LIMIT, output) end
  if fs.exists(one.folder) then return "it was refused late, and has begun a run:\n      " .. last_lines(output) end
  for _, text in ipairs(texts) do
    if output:find(text, 1, true) then return nil end
  end
  return ("the refusal does not say: %s\n      %s"):format(table.concat(texts, "; or: "), last_lines(output))
end

-- ---- all of it ----

local function by_ranks(list)
  local sizes, groups = {}, {}
  for _, one in ipairs(list) do
    local n = draw.ranks(one.o)
    if not groups[n] then
      groups[n] = {}
      sizes[#sizes + 1] = n
    end
    table.insert(groups[n], one)
  end
  table.sort(sizes)
  return sizes, groups
end

local function train_all(list)
  local sizes, groups = by_ranks(list)
  for _, n in ipairs(sizes) do
    local before = pg.time()
    train(n, groups[n])
    for _, one in ipairs(groups[n]) do
      one.wrong = one.wrong or differs(one)
      fs.remove(one.folder)
    end
    print(("%2d ranks: %d combinations, %.1f s"):format(n, #groups[n], pg.time() - before))
  end
end

local function tell(list)
  local failed = 0
  for _, one in ipairs(list) do
    if one.wrong then
      failed = failed + 1
      print(("FAILED %s\n    %s\n    again: make matrix ONLY='%s'"):format(one.text, one.wrong, one.text))
    end
  end
  return failed
end

--- run.all(combinations) -> how many failed.  Each agrees with one process, or is refused where draw.refused says so;
-- prints what does not, and how to run it again.
function run.all(combinations)
  tokens()
  local fit, unfit = {}, {}
  for i, o in ipairs(combinations) do
    local list = draw.refused(o) and unfit or fit
    list[#list + 1] = { o = o, text = draw.text(o), folder = folder_of(i) }
  end
  make_references(fit)
  train_all(fit)
  for _, one in ipairs(unfit) do one.wrong = not_refused(one, draw.refused(one.o)) end
  local failed, wrongly = tell(fit), tell(unfit)
  if nearest.text then
    print(("nearest to a bound: %s of step %d, %.2f of it, in %s"):format(nearest.key, nearest.step, nearest.share,
                                                                          nearest.text))
  end
  print(("%d combinations agree with one process, %d are refused with a reason, %d failed"):format(
    #fit - failed, #unfit - wrongly, failed + wrongly))
  return failed + wrongly
end

return run
