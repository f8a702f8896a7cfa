-- ranks: 2
-- Whatever order the micro-batches take, the training is that of a single process.
local compare = require("tests.training").compare
local cases = { "dropout_micro", "held_out" }
for _, schedule in ipairs { "gpipe", "1f1b", "interleaved", "zb-h1" } do
  compare { layout = { pp = 2, schedule = schedule }, cases = cases }
end
compare { layout = { pp = 2, schedule = "gpipe", chunks = 2, blocks = { 1, 2, 2, 1 } }, cases = cases, deep = 6 }
-- one of one's own: two backwards late
compare { layout = { pp = 2, schedule = function(o)
  local lists = {}
  for stage = 0, o.stages - 1 do
    lists[stage + 1] = {}
    for k = 1, o.micro + 2 do
      local list = lists[stage + 1]
      if k <= o.micro then list[#list + 1] = { "forward", k } end
      if k > 2 then list[#list + 1] = { "backward", k - 2 } end
    end
  end
  return lists
end }, cases = cases }
