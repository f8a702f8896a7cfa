-- step.lua: the step block: the numbers of a step that change, in device memory, where kernels read them.
-- One for the process: pg.data fills in the token count and the random base when a step begins, the
-- optimiser the rate and the bias corrections before it updates.
local c = require "pg.c"
local Tensor = require "pg.tensor"
local C, ffi = c.C, c.ffi

local step = {}
local slots = {}
for name in ("RATE BIAS1 BIAS2 CLIP SCALE FINITE RANDOM INV_TOKENS NORM SUMSQ"):gmatch "%S+" do
  slots[name] = tonumber(C["PG_STEP_" .. name])
end
local size = tonumber(C.PG_STEP_SIZE)
local host = ffi.new("double[?]", size)

--- step.block() -> the block, an f64 tensor.
function step.block()
  if not step.tensor then
    step.tensor = Tensor.zeros({ size }, "f64"):keep()
    step.set { SCALE = 1, CLIP = 1, FINITE = 1 }
  end
  return step.tensor
end

--- step.set{ NAME = number, ... }: write those slots; the others keep what the device has.
function step.set(values)
  local t = step.block()
  for name, value in pairs(values) do
    host[0] = value
    c.check(C.pg_tensor_write(t.raw, slots[name], host, 8))
  end
end

--- step.get(name, ...) -> their numbers, read from the device.
function step.get(...)
  c.check(C.pg_tensor_read(step.block().raw, 0, host, size * 8))
  local out = {}
  for i = 1, select("#", ...) do out[i] = host[slots[select(i, ...)]] end
  return unpack(out)
end

--- step.all() -> { NAME = number }, for step.set.
function step.all()
  local out = {}
  c.check(C.pg_tensor_read(step.block().raw, 0, host, size * 8))
  for name, at in pairs(slots) do out[name] = host[at] end
  return out
end

--- step.random_base(seed, number) -> the random base of a step: an integer in [0, 2^53).
function step.random_base(seed, number)
  local h = c.hash("step " .. tostring(c.int64(seed, "seed")) .. " " .. ("%d"):format(number))
  return tonumber(h % 0x20000000000000ULL) -- 2^53
end

return step
