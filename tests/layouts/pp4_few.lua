-- ranks: 4
-- limit: 240
-- Fewer micro-batches than stages, and as many (C19): 1, 2, 3 and 4 on 4 stages, under each schedule.
local compare = require("tests.training").compare
for _, schedule in ipairs { "gpipe", "1f1b", "interleaved", "zb-h1" } do
  local deep = schedule == "interleaved" and 8 or 4
  for _, micro in ipairs { 12, 6, 4, 3 } do
    compare { layout = { pp = 4, schedule = schedule }, cases = { "plain" }, deep = deep,
              more = { micro = micro, steps = 3 } }
  end
end
