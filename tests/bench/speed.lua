-- speed.lua: the speed of runs from their metrics.jsonl: medians over the steps after the first few.
--   pgrun tests/bench/speed.lua [--skip=3] RUN...
local json = require "pg.json"

local function median(list)
  table.sort(list)
  local n = #list
  if n == 0 then return 0 / 0 end
  return (list[math.ceil(n / 2)] + list[math.floor(n / 2) + 1]) / 2
end

-- Values of the field in the records after `skip`.
local function column(records, name, skip)
  local out = {}
  for i = skip + 1, #records do
    local value = records[i][name]
    if type(value) == "number" then out[#out + 1] = value end
  end
  return out
end

local function report(folder, skip)
  local records = {}
  for line in pg.fs.read(folder .. "/metrics.jsonl"):gmatch "[^\n]+" do
    records[#records + 1] = json.decode(line)
  end
  local first = records[1]
  print(("%s: %d steps, median of those after %d: %.0f tokens/s, %.4f s a step, MFU causal %.1f %%, full %.1f %%, peak "
         .. "%.1f GiB; first step %.2f s; loss %.4f to %.4f"):format(
    folder, #records, skip, median(column(records, "tokens_per_s", skip)), median(column(records, "seconds", skip)),
    100 * median(column(records, "mfu_causal", skip)), 100 * median(column(records, "mfu_full", skip)),
    math.max(0, unpack(column(records, "memory_peak", 0))) / 2^30, first.seconds, first.loss, records[#records].loss))
end

local skip = 3
for _, word in ipairs(arg) do
  local number = word:match "^%-%-skip=(%d+)$"
  if number then skip = tonumber(number) else report(word, skip) end
end
