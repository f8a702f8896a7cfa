-- ranks: 2
-- What collectives write into parameters of half precision, their masters follow: ranks that began with other numbers
-- and were given those of rank 0 stay the same through updates, whoever holds the masters.
local mesh = require "pg.mesh"
local step = require "pg.step"
local rank, nn = pg.rank(), pg.nn

local function same(t, axis, what)
  local most, least = t:clone(), t:clone()
  axis:all_reduce(most, "max")
  axis:all_reduce(least, "min")
  local a, b = most:totable(), least:totable()
  for i = 1, #a do
    assert(a[i] == b[i], ("%s: number %d is %.9g on one rank, %.9g on another"):format(what, i, a[i], b[i]))
  end
end

local ways = { -- in one order on all ranks
  { "broadcast", function(p) mesh.dp:broadcast(p) end },
  { "later", function(p) mesh.dp:broadcast(p, 0, true):wait() end },
  { "view", function(p)
    mesh.dp:broadcast(p:view({ 3 }))
    mesh.dp:broadcast(p:view({ p.count - 3 }, 3))
  end },
  { "average", function(p) mesh.dp:all_reduce(p) end },
  { "gathered", function(p)
    local half = p.count / 2
    mesh.dp:all_gather(p, p:view({ half }, rank * half):clone())
  end },
  { "sent", function(p)
    if rank == 0 then mesh.dp:send(p, 1) p:copy_from(p:clone()) else mesh.dp:recv(p, 0) end
  end },
}

for zero = 0, 1 do
  mesh.build { dp = 2, zero = zero }
  for _, way in ipairs(ways) do
    local name, write = unpack(way)
    local what = ("zero %d, %s"):format(zero, name)
    local module = nn.class "Two"()
    module.a, module.b = module:param("a", { 5, 30 }), module:param("b", { 8 }, { init = { "normal", 1 } })
    pg.build(module, { dtype = "bf16", seed = rank })
    for _, p in ipairs(module:parameters()) do write(p) end
    local s = module.segments[1]
    local optim = require("pg.optim.sgd").new(module:parameters(), { rate = 2^-9 }) -- each rank on its own
    for _ = 1, 3 do
      for _, p in ipairs(module:parameters()) do
        p.grad:fill(1)
        p.grad_fresh = false
      end
      optim:step()
      s:ready()
    end
    same(s.value:to "f32", mesh.dp, what .. ", values")
    if zero == 0 then same(s:read_numbers(), mesh.dp, what .. ", masters") end
  end
end
step.block()
pg.barrier() -- a rank that left would not be waited for
