-- ranks: 4
-- limit: 120
-- Lines that one rank alone runs as far as others are needed, between the steps of a training whose stages, gradients
-- and values travel: each fails, and the losses are those of a training that nobody has spoken to, to the bit.
local lines = require "pg.live.lines"
local swaps = require "tests.swaps"

local FAILING = {
  "@%d optim:step()",
  "@%d trainer:evaluate()",
  "@%d trainer:gradients()",
  "@%d model:loss(trainer.micro and {} or nil)",
  "@%d local s = model.segments[1] s:bring() s:share_values() error 'left under way'",
  "@%d pcall(optim.step, optim)",
  "if pg.rank() == %d then trainer:evaluate() end error 'afterwards'",
}
local STEPS = #FAILING + 3

local text = swaps.text
swaps.base { steps = tostring(STEPS), data = ('text = %q, batch = 8, held_out = 0.3'):format(
  require("tests.training").text(500)),
  model = 'require "models.gpt2" { blocks = 2, width = 32, heads = 2, vocab = 259, context = 32, dropout = 0.1 }' }
for zero = 0, 3 do
  local recipe = text { more = ("micro = 1, layout = { pp = 2, zero = %d, bucket = 0.02, schedule = %q },"):format(
    zero, zero % 2 == 0 and "1f1b" or "zb-h1") }
  local want = swaps.run("alone-" .. zero, recipe)
  local failed = 0
  local got = swaps.run("spoken-" .. zero, recipe, { before = function(step, trainer)
    local run = trainer.live
    if not run or not FAILING[step - 2] then return end
    run.session = run.session or lines.new { keep = true }
    run.session:hear ""
    local host, said = require "pg.host", nil
    local send = host.control_send
    host.control_send = function(_, _, told) said = told end
    run.client = host.rank == 0 and 0 or nil
    run:run_line(FAILING[step - 2]:format((step + zero) % 4), trainer)
    run.client, host.control_send = nil, send
    if host.rank == 0 then failed = failed + (said:sub(1, 1) == "-" and 1 or 0) end
  end })
  swaps.same(got, want)
  assert(pg.rank() > 0 or failed >= #FAILING - 1, failed .. " lines failed")
end
pg.barrier()
