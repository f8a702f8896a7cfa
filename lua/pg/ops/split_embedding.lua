-- ops/split_embedding.lua: rows of a table that is cut over ranks: this one holds those of ids
-- [first, first + valid); the ids of other ranks give rows of zeros here, so that the ranks' results are addends
-- of the whole.
local c = require "pg.c"
local Tensor = require "pg.tensor"
local tape = require "pg.tape"
local done = require("pg.watch").done
local C, ffi = c.C, c.ffi

local ops = {}

-- Shapes alone hold no ids to look at.
local function has_numbers()
  if C.pg_shape_only(0) ~= 0 then
    C.pg_shape_only(1)
    return false
  end
  return ffi.string(C.pg_device()) ~= "shape"
end

-- Where in this rank's rows each id lies (0 for those of others), and 1 or 0: is it here?
local function look_up(ids, o)
  local at, here = Tensor.empty(ids.shape, "i32"), Tensor.empty({ ids.count }, "f32")
  if not has_numbers() then return at, here end
  local from, n = ids:buffer()
  local to, ones = ffi.new("int32_t[?]", math.max(n, 1)), ffi.new("float[?]", math.max(n, 1))
  for i = 0, n - 1 do
    local id = tonumber(from[i])
    if id < 0 or id >= o.vocab then
      c.fail("embedding: id %d at place %d is outside [0,%d)", id, i, o.vocab)
    end
    id = id - o.first
    if id >= 0 and id < o.valid then to[i], ones[i] = id, 1 end
  end
  return at:write(to), here:write(ones)
end

-- y [..,D] times the number of each row.
local function times_rows(y, x, numbers)
  local spread = Tensor.empty({ numbers.count, x.shape[#x.shape] }, x.dtype)
  local cast = numbers.dtype == x.dtype and numbers or numbers:to(x.dtype)
  c.check(C.pg_expand(spread.raw, cast.raw, 1, 1, 0))
  local rows, out = x:view(spread.shape), y:view(spread.shape)
  c.check(C.pg_binary(out.raw, rows.raw, spread.raw, C.PG_MUL, 0))
  for _, t in ipairs { spread, rows, out } do t:release() end
  if cast ~= numbers then cast:release() end
end

local PART = { name = "embedding_part", weights = { [1] = true }, mixed = true,
  grad_input = function() end,
  grad_weight = function(r, dy, d, add)
    local masked = Tensor.like(dy)
    times_rows(masked, dy, r.saved[2])
    c.check(C.pg_embedding_grad(d[1].raw, masked.raw, r.saved[1].raw, add[1]))
    masked:release()
  end }

--- embedding_part(table, ids, o) -> y [..,D].  table [rows,D]; ids i32 or i64, each in [0,o.vocab); o.first,
-- o.valid: the ids that are here.
function ops.embedding_part(table, ids, o)
  local at, here = look_up(ids:alive(), o)
  local shape = { unpack(ids.shape) }
  shape[#shape + 1] = table.shape[2]
  local y = Tensor.empty(shape, table.dtype)
  done("embedding", C.pg_embedding(y.raw, table:alive().raw, at.raw), y)
  times_rows(y, y, here)
  if tape.wants(table) then tape.record(PART, { table }, 1, { at, here }, 2, y) end
  return y
end

return ops
