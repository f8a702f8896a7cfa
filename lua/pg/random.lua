-- random.lua: tensors of random numbers.  Numbers come from counters, so a call that names a key gives
-- the same numbers wherever it stands; one without gets the next key of this process.
local c = require "pg.c"
local Tensor = require "pg.tensor"
local C, ffi = c.C, c.ffi

local random = { calls = 0 } -- calls: those without a key, so far

local function stream(o, name)
  if not o.key then random.calls = random.calls + 1 end
  return ffi.cast("uint64_t", c.int64(o.seed or 0, name .. ": seed")), c.hash(o.key or "random call " .. random.calls)
end

--- randn(shape, o) -> normal numbers.  o: mean (0), std (1), seed (0), dtype ("f32"), key: a name; without one every
-- call draws other numbers, the same in every run.
function random.randn(shape, o)
  o = c.keys(o or {}, { "seed", "key", "dtype", "std", "mean" }, "randn")
  local t = Tensor.empty(shape, o.dtype)
  local seed, key = stream(o, "randn")
  c.check(C.pg_random_normal(t.raw, seed, key, o.mean or 0, o.std or 1, 0, 0, 0))
  return t
end

--- rand(shape, o) -> uniform numbers in [low, high).  o: low (0), high (1), seed, dtype, key as in randn.
function random.rand(shape, o)
  o = c.keys(o or {}, { "seed", "key", "dtype", "low", "high" }, "rand")
  local t = Tensor.empty(shape, o.dtype)
  local seed, key = stream(o, "rand")
  c.check(C.pg_random_uniform(t.raw, seed, key, o.low or 0, o.high or 1, 0, 0, 0))
  return t
end

return random
