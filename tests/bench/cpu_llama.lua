-- cpu_llama.lua: seconds of a training step of LLaMA or GPT-2 on the CPU, fp32, beside PyTorch.
--   OMP_NUM_THREADS=2 pgrun tests/bench/cpu_llama.lua --shape=llama
--   OMP_NUM_THREADS=2 pgrun tests/bench/cpu_llama.lua --shape=gpt2 --steps=5 --rounds=3 \
--       --peer="python3 tests/bench/torch_cpu_llama.py"
-- A step is forward, loss, backward, clipping and AdamW on random tokens made before the clock
-- starts.  Prints one JSON line as torch_cpu_llama.py does.  With a peer the two take turns, A B A
-- B, since a machine's speed drifts; then a line with the ratio of their medians follows.

-- The same two shapes stand in torch_cpu_llama.py.
local shapes = {
  llama = { model = "models.llama", batch = 16, settings = {
    blocks = 4, width = 256, heads = 8, ffn = 688, vocab = 259, context = 256 } },
  gpt2 = { model = "models.gpt2", batch = 4, settings = {
    blocks = 12, width = 768, heads = 12, vocab = 50257, context = 64 } },
}

local function fail(format, ...) error("cpu_llama: " .. format:format(...), 0) end

local options = { shape = "llama", steps = 10, warmup = 3, rounds = 3, seed = 1, peer = "" }
for _, word in ipairs(arg) do
  local key, value = word:match "^%-%-(%w+)=(.*)$"
  if not key or options[key] == nil then
    fail("%s is not an option (--shape= --steps= --warmup= --rounds= --seed= --peer=)", word)
  end
  if type(options[key]) == "number" then
    value = tonumber(value) or fail("--%s=%s is not a number", key, value)
  end
  options[key] = value
end
local shape = shapes[options.shape] or fail("--shape=%s is neither llama nor gpt2", options.shape)
if options.steps < 1 or options.rounds < 1 then fail("--steps and --rounds are at least 1") end
-- Both sides must have the same threads, so the number has to be said.
local threads = tonumber(os.getenv "OMP_NUM_THREADS")
  or fail("set OMP_NUM_THREADS, for this side and for the peer")

local function median(list)
  local sorted = { unpack(list) }
  table.sort(sorted)
  local half = math.floor(#sorted / 2)
  return #sorted % 2 == 1 and sorted[half + 1] or (sorted[half] + sorted[half + 1]) / 2
end

local function random_batch()
  local B, T, V = shape.batch, shape.settings.context, shape.settings.vocab
  local tokens, targets = {}, {}
  for b = 1, B do
    local row, shifted = {}, {}
    local next_id = math.random(0, V - 1)
    for t = 1, T do
      row[t], next_id = next_id, math.random(0, V - 1)
      shifted[t] = next_id
    end
    tokens[b], targets[b] = row, shifted
  end
  return { tokens = pg.tensor(tokens, "i32"), targets = pg.tensor(targets, "i32") }
end

math.randomseed(options.seed)
local model = pg.build(require(shape.model)(shape.settings))
local optim = pg.optim.adamw(model:parameters(),
                             { rate = 1e-3, betas = { 0.9, 0.95 }, decay = 0.1, clip = 1.0 })

-- Seconds of each of n steps, and the last loss.  Reading the loss waits for the step's end.
local function run(n)
  local seconds, last = {}, nil
  for i = 1, n do
    pg.scope(function()
      local batch = random_batch()
      local began = pg.time()
      local loss = model:loss(batch)
      loss:backward()
      optim:step()
      last = loss:item()
      seconds[i] = pg.time() - began
    end)
  end
  return seconds, last
end

-- Median seconds of a step of the peer, in a process of its own with its own warm-up.
local function run_peer()
  local command = ("%s --shape %s --threads %d --steps %d --warmup %d"):format(
    options.peer, options.shape, threads, options.steps, options.warmup)
  local pipe = assert(io.popen(command))
  local text = pipe:read "*a"
  pipe:close()
  local seconds = tonumber(text:match '"seconds":%s*([%d.e+-]+)')
  if not seconds then fail("no seconds in what `%s` printed: %s", command, text) end
  return seconds, text
end

run(options.warmup)
local ours, theirs, loss, peer_line = {}, {}, nil, nil
for _ = 1, options.peer == "" and 1 or options.rounds do
  local seconds
  seconds, loss = run(options.steps)
  ours[#ours + 1] = median(seconds)
  if options.peer ~= "" then theirs[#theirs + 1], peer_line = run_peer() end
end

local tokens = shape.batch * shape.settings.context
local middle = median(ours)
print(('{"name": "pgrun", "shape": "%s", "threads": %d, "steps": %d, "seconds": %.6g, '
  .. '"loss": %.9g, "tokens_per_s": %.6g}')
  :format(options.shape, threads, options.steps, middle, loss, tokens / middle))
if peer_line then
  io.write(peer_line)
  print(('{"rounds": %d, "ours": %.6g, "peer": %.6g, "speedup": %.4g}')
    :format(options.rounds, middle, median(theirs), median(theirs) / middle))
end
