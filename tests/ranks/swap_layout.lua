-- ranks: 8
-- limit: 180
-- A swap in a run that is cut along all axes, and nothing whole on any rank: a good one, also of the code of the model,
-- and some that fail in their first step on one rank while others wait for it over tp, pp and dp.
local swaps = require "tests.swaps"
local AT, STEPS = 5, 14

swaps.base { steps = tostring(STEPS),
  model = 'require "models.llama" { blocks = 4, width = 32, heads = 4, kv_heads = 2, vocab = 259, context = 32 }',
  more = "micro = 1, layout = { pp = 2, tp = 2, zero = 3, bucket = 0.02 }," }
local function with(body) return swaps.text { more = swaps.more .. body } end
local SCALED = "loss = function(model, batch) return pg.scale(model:loss(batch), %s) end,"
local new = with(SCALED:format "0.5")
local written = "local step = 0\n" .. with([[on_step = function(state) step = state.step end,
  ]] .. SCALED:format(("step + 1 < %d and 1 or 0.5"):format(AT)))
local want = swaps.run("written", written)

-- On rank r the k-th call of the loss of a step fails, after what came before was computed.
local function failing(r, k)
  return "local n = 0\n" .. with(([[loss = function(model, batch)
    n = n + 1
    local loss = model:loss(batch)
    if loss:item() > 0 and pg.rank() == %d and n == %d then error "on one rank" end
    return loss
  end,]]):format(r, k))
end
-- A rank of the first stage fails in a layer of its own.
local broken_block = [[local llama = require "models.llama"
local function model()
  local m = llama { blocks = 4, width = 32, heads = 4, kv_heads = 2, vocab = 259, context = 32 }
  m = getmetatable(m).build(require("pg.describe").fill(m, getmetatable(m).schema, "llama"))
  local item, calls = m.layers.items[2], 0
  local forward = item.forward
  function item:forward(x)
    calls = calls + 1
    if calls == 3 and pg.rank() == 1 then error "in a block" end
    return forward(self, x)
  end
  return m
end
]] .. with(SCALED:format "0.5"):gsub("model = [^\n]*", "model = model,")
local bad = { failing(7, 1), failing(4, 2), broken_block,
              with "layout = { pp = 4, tp = 2, zero = 3, bucket = 0.02 }, micro = 1," }
local wants = { "rank 7: ", "rank 4: ", "rank 1: ", "layout.dp was 2, is 1" }
local got, answers = swaps.run("swapped", with "", { offers = { [AT - 2] = { bad[1] }, [AT - 1] = { bad[2] },
  [AT] = { new }, [AT + 2] = { bad[3] }, [AT + 4] = { bad[4], bad[1] } } })
swaps.same(got, want)
if pg.rank() == 0 then
  local texts = { wants[1], wants[2], "from step " .. AT .. " on", wants[3], wants[4], wants[1] }
  for i, text in ipairs(texts) do swaps.holds(answers[i] and answers[i].text, text) end
  assert(#answers == #texts)
end
pg.barrier()
