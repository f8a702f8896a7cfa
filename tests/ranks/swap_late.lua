-- ranks: 3
-- Swapped twice in a row, while one rank comes late to everything (CASES.md C39): all ranks change at the same step,
-- hooks fire once a step, and nothing of a recipe that was replaced is called or held any more.
local host = require "pg.host"
local json = require "pg.json"
local swaps = require "tests.swaps"
swaps.base { steps = "16", data = ('text = "%s", batch = 6'):format(require("tests.training").text(500)) }

calls = {} -- luacheck: ignore 111 113
local held = setmetatable({}, { __mode = "k" })
function note(version, kind, f) -- luacheck: ignore 111
  if f then held[f] = version end
  table.insert(calls, { version = version, kind = kind }) -- luacheck: ignore 113
end
local function version(n)
  return ("local hooks = {}\nlocal function count(state) note(%d, 'hook ' .. state.step) end\n"):format(n)
    .. ("note(%d, 'file', count)\nhooks[1] = count\n"):format(n)
    .. swaps.text {
      optim = ('"adamw", rate = function(state) note(%d, "rate " .. state.step) return 1e-3 end'):format(n),
      more = ([[loss = function(model, batch) note(%d, "loss") return model:loss(batch) end,
      on_step = function(state) for _, f in ipairs(hooks) do f(state) end end,]]):format(n) }
end

local lates = 0
local got = swaps.run("late", version(1), { offers = { [5] = { version(2), version(3) } }, before = function(step)
  if step >= 4 and pg.rank() == 2 then
    lates = lates + 1
    host.nap(0.05)
  end
end })
assert(#got == 16 and (pg.rank() ~= 2 or lates > 9))

-- Which version did what at which step.
local hooks, rates, last = {}, {}, 0
for _, call in ipairs(calls) do -- luacheck: ignore 113
  local step = tonumber(call.kind:match "^hook (%d+)")
  if step then
    assert(not hooks[step], "a hook fired twice at step " .. step)
    hooks[step] = call.version
    assert(call.version >= last, "an old recipe was called again")
    last = call.version
  end
  local rated = tonumber(call.kind:match "^rate (%d+)")
  if rated then rates[rated] = math.max(rates[rated] or 0, call.version) end
end
for step = 1, 16 do
  local v = step < 5 and 1 or step < 6 and 2 or 3
  assert(hooks[step] == v, ("step %d: hook of version %s, not %d"):format(step, tostring(hooks[step]), v))
end
local mine = json.encode(hooks)
for rank, other in ipairs(require("pg.agree").texts(mine)) do
  assert(other == mine, ("rank %d: %s, here: %s"):format(rank - 1, other, mine))
end

calls = {} -- luacheck: ignore 111
jit.flush() -- compiled code holds what it was made of
collectgarbage()
collectgarbage()
for f, v in pairs(held) do assert(v == 3, ("version %d is still held: %s"):format(v, tostring(f))) end
pg.barrier()
