-- ranks: 4
-- Timelines of four stages, and of a recipe whose two pipelines are of two stages each.
local measured = require "pg.parallel.measured"
local timelines = require "tests.timelines"
local training = require "tests.training"

timelines.all(4)

-- Rank 0's pipeline is the one that is shown.
local layout = { dp = 2, pp = 2, schedule = "zb-h1" }
local more = { layout = layout, micro = 1, steps = 2, log = { timeline = 2 },
               model = require "models.llama" { blocks = 2, width = 32, heads = 2, vocab = 259, context = 32 } }
local _, folder = training.run(more, "two-pipelines")
local m = measured.read(folder .. "/timeline-2.json")
assert(m.stages == 2 and m.micro == 4 and m.schedule == "zb-h1" and #m.timeline[2] == 12)
pg.barrier()
