-- ranks: 8
-- limit: 180
-- Loss, rate, clip and log change at step 50 of a run: in the same processes, and from there on to the bit what a run
-- does whose recipe was written to change at that step.
local host = require "pg.host"
local swaps = require "tests.swaps"
local AT, STEPS = 50, 56

local SMOOTH = [[pg.add(model:loss(batch), pg.scale(pg.mean(pg.square(model(batch.tokens))), 0.01))]]
swaps.base { steps = tostring(STEPS), optim = '"adamw", clip = 1, decay = 0.1, rate = function() return 1e-3 end' }
local old, new = swaps.text(), swaps.text {
  optim = '"adamw", clip = 0.25, decay = 0.1, rate = function(state) return 1e-2 / state.step end',
  more = "live = { watch = false }, loss = function(model, batch) return " .. SMOOTH .. " end,",
}

-- The same from the start: functions that look at the step; the clip, which is a number, by hand.
local written = ([[local step = 0
]] .. swaps.text {
  optim = ([["adamw", clip = 1, decay = 0.1,
    rate = function(state) return state.step < %d and 1e-3 or 1e-2 / state.step end]]):format(AT),
  more = ([[on_step = function(state) step = state.step end, loss = function(model, batch)
    if step + 1 < %d then return model:loss(batch) end
    return %s
  end,]]):format(AT, SMOOTH),
})
local want = swaps.run("written", written, { before = function(step, trainer)
  if step == AT then trainer.optim.settings.clip = 0.25 end
end })

local pid, seen = host.pid, {}
local got, answers = swaps.run("swapped", old, { offers = { [AT] = { new } }, before = function(step, trainer)
  seen[step] = trainer.optim.settings.clip
end })
swaps.same(got, want)
assert(host.pid == pid and seen[AT] == 1 and seen[AT + 1] == 0.25)
assert(got[AT - 1].rate == 1e-3 and got[AT].rate == 1e-2 / AT)

if pg.rank() == 0 then
  assert(#answers == 1 and answers[1].kind == "K" and answers[1].step == AT, answers[1].text)
  local entry = require("pg.live.journal").read(swaps.scratch .. "/swapped")[1]
  assert(entry.accepted and entry.step == AT and entry.text == new and #entry.hash == 16)
end

-- The run stands still for less than a step; the widths and tokens of a step are those of models/tiny.lua.
swaps.base { steps = "13", data = ("text = %q, batch = 64"):format(require("tests.training").text(2000)),
             model = 'require "models.llama" { blocks = 1, width = 128, heads = 4, vocab = 259, context = 64 }' }
local text = swaps.text()
local records, told = swaps.run("pause", text, { offers = { [4] = { text }, [6] = { text }, [8] = { text },
                                                             [10] = { text }, [12] = { text } } })
local function smallest(list)
  table.sort(list)
  return list[1]
end
if pg.rank() == 0 then
  local steps, pauses = {}, {}
  for i = 3, 13 do table.insert(steps, records[i].seconds * 1000) end
  for i = 1, 5 do pauses[i] = tonumber(told[i].text:match "stood still for ([%d.]+) ms") end
  print(("pause: %.1f ms, step: %.1f ms"):format(smallest(pauses), smallest(steps)))
  assert(smallest(pauses) < smallest(steps))
end
pg.barrier()
