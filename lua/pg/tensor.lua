-- tensor.lua: a tensor as Lua sees it: a plain table around a C handle, contiguous, without strides.
--   t.shape {32,128}, t.dtype "f32", t.count; t.requires_grad and t.grad for leaves
--   t.lies_in, t.offset   of a parameter and its views, where other ranks send numbers of it (t:alive()) or more than
--                         t is to be kept of what is written into it (segment:put): the segment whose values it is
--                         part of, and from which element on
-- Operations live in ops/ and are added to Tensor as methods by lua/pg/init.lua.  Lifetimes: scope.lua.
local c = require "pg.c"
local scope = require "pg.scope"
local C, ffi = c.C, c.ffi

local Tensor = { is_tensor = true }
Tensor.__index = Tensor

local codes = { f32 = C.PG_F32, f64 = C.PG_F64, bf16 = C.PG_BF16, f16 = C.PG_F16,
                i32 = C.PG_I32, i64 = C.PG_I64, u8 = C.PG_U8, i16 = C.PG_I16 }
local ctypes = { f32 = "float", f64 = "double", i32 = "int32_t", i64 = "int64_t", u8 = "uint8_t",
                 i16 = "int16_t", bf16 = "uint16_t", f16 = "uint16_t" }
local sizes = { f32 = 4, f64 = 8, bf16 = 2, f16 = 2, i32 = 4, i64 = 8, u8 = 1, i16 = 2 }
-- By dtype: its code, the bytes of a number, whether it is one of the floating ones.
Tensor.codes, Tensor.sizes, Tensor.floating = codes, sizes, { f32 = true, f64 = true, bf16 = true, f16 = true }

local dims = ffi.new("int64_t[8]")
local slot = ffi.new("pg_tensor *[1]")

-- A shape -> its element count; the C dims buffer is filled on the way.
local function fill_dims(shape)
  if type(shape) ~= "table" then c.fail("a shape is a table of dims, such as { 2, 3 }; got %s", type(shape)) end
  local n = #shape
  if n > 8 then c.fail("a tensor has at most 8 dims, got %d", n) end
  local count = 1
  for i = 1, n do
    local d = c.int(shape[i], "a dim")
    if d < 0 then c.fail("dim %d is %d, below 0", i, d) end
    dims[i - 1] = d
    count = count * d
  end
  return n, count
end

local function wrap(raw, shape, dtype, count)
  local t = setmetatable({ raw = ffi.gc(raw, C.pg_tensor_free), shape = shape, dtype = dtype,
                           count = count, owners = 1 }, Tensor)
  scope.adopt(t)
  return t
end

-- "relu: " where an op of lua/pg/ops is on the stack: for messages, so it may be slow.
local function op_on_stack()
  local names = {}
  for module, ops in pairs(package.loaded) do
    if type(module) == "string" and module:find("^pg%.ops%.") and type(ops) == "table" then
      for name, f in pairs(ops) do names[f] = name .. ": " end
    end
  end
  for level = 2, 60 do
    local info = debug.getinfo(level, "f")
    if not info then return "" end
    if names[info.func] then return names[info.func] end
  end
  return ""
end

--- Tensor.empty(shape, dtype) -> a tensor whose numbers are not set.
function Tensor.empty(shape, dtype)
  local code = codes[dtype or "f32"] or c.fail("dtype %s is unknown (f32 f64 bf16 f16 i32 i64 u8 i16)", tostring(dtype))
  local n, count = fill_dims(shape)
  local rc = C.pg_tensor_new(slot, code, n, dims)
  if rc == C.PG_ENOMEM then -- garbage may hold what is needed
    c.collect()
    fill_dims(shape)
    rc = C.pg_tensor_new(slot, code, n, dims)
    if rc == C.PG_ENOMEM then
      c.code = rc
      c.fail("%s%s", op_on_stack(), ffi.string(C.pg_errmsg()))
    end
  end
  if rc < 0 then c.check(rc) end
  local t = wrap(slot[0], shape, dtype or "f32", count)
  if rc == C.PG_COLLECT and scope.plain() then c.collect() end
  return t
end

--- Tensor.like(t) -> empty of the same shape and dtype.
function Tensor.like(t) return Tensor.empty(t.shape, t.dtype) end

-- A shape with one dim -1 -> the same with that dim as large as what is left of t.
local function complete(t, shape, first)
  local open, known = nil, 1
  for i = 1, type(shape) == "table" and #shape or 0 do
    if shape[i] ~= -1 then known = known * c.int(shape[i], "view: a dim")
    elseif open then c.fail("view: {%s} leaves two dims open; one may be -1", table.concat(shape, ","))
    else open = i end
  end
  if not open then return shape end
  local rest = (t.count - first) / known
  if rest ~= math.floor(rest) or rest < 0 or known == 0 then
    c.fail("view: %s does not divide into {%s}", t:describe(), table.concat(shape, ","))
  end
  shape = { unpack(shape) }
  shape[open] = rest
  return shape
end

--- t:view(shape, first) -> the same numbers under another shape, from element `first` (0) on.
-- One dim may be -1: what is left.
function Tensor.view(t, shape, first)
  t:alive()
  first = c.int(first or 0, "view: the first element")
  shape = complete(t, shape, first)
  local n, count = fill_dims(shape)
  c.check(C.pg_tensor_view(slot, t.raw, first, n, dims))
  local v = wrap(slot[0], shape, t.dtype, count)
  if t.lies_in then v.lies_in, v.offset = t.lies_in, t.offset + first end
  return v
end

--- t:alive() -> t, whose numbers may be used: those of a parameter that are under way to this rank have come.
-- Raises where the tensor's numbers are gone.
function Tensor:alive()
  if not self.raw then
    c.fail("this tensor %s is dead: its scope has ended; return it from the scope, or t:keep() it there",
           self:describe())
  end
  local s = self.lies_in
  if s and s.gather then s:ready() end
  return self
end

--- t:retain(), t:release(): one more owner, one less; the numbers go with the last.
function Tensor:retain()
  self.owners = self.owners + 1
  return self
end

function Tensor:release()
  local n = self.owners - 1
  self.owners = n
  if n <= 0 and self.raw then
    C.pg_tensor_free(ffi.gc(self.raw, nil))
    self.raw = nil
  end
end

--- t:keep() -> t.  Lift it out of its scope: it lives until the collector finds no use of it.
function Tensor:keep()
  self:alive()
  self.scope = nil -- the scope's share of the count is the collector's now
  return self
end

--- t:free(): give the numbers back now.
function Tensor:free()
  if self.raw then
    C.pg_tensor_free(ffi.gc(self.raw, nil))
    self.raw, self.scope = nil, nil
  end
end

--- t:detach() -> the same numbers, unknown to the tape.
function Tensor:detach() return self:view(self.shape) end

-- Reading and writing -------------------------------------------------------------------------

-- A number out of C's memory; an i64 that a Lua number may not hold exactly stays an int64 literal.
local function exact(x)
  local number = tonumber(x)
  return type(x) == "cdata" and (number >= 2^53 or number <= -2^53) and x or number
end

--- t:item() -> the number of a tensor of one element (i64 from 2^53 on as an int64 literal).
local one = { f32 = ffi.new "float[1]", f64 = ffi.new "double[1]", i32 = ffi.new "int32_t[1]",
              i64 = ffi.new "int64_t[1]", u8 = ffi.new "uint8_t[1]", i16 = ffi.new "int16_t[1]" }
function Tensor:item()
  if self.count ~= 1 then c.fail("item: %s has %d elements, not one", self:describe(), self.count) end
  local buffer = one[self.dtype]
  if not buffer then return self:to("f32"):item() end
  c.check(C.pg_tensor_read(self:alive().raw, 0, buffer, sizes[self.dtype]))
  return exact(buffer[0])
end

--- t:at(i, j, ...) -> one number, 0-based.
function Tensor:at(...)
  local index = 0
  if select("#", ...) ~= #self.shape then
    c.fail("at: %d indices for %s", select("#", ...), self:describe())
  end
  for i = 1, #self.shape do
    local x = c.int(select(i, ...), "at: index")
    if x < 0 or x >= self.shape[i] then
      c.fail("at: index %d is %d, outside [0,%d)", i, x, self.shape[i])
    end
    index = index * self.shape[i] + x
  end
  local v = self:view({ 1 }, index)
  local x = v:item()
  v:free()
  return x
end

--- t:buffer() -> a C array with a copy of the numbers (host order; bf16 and f16 as f32), and its length.
function Tensor:buffer()
  if self.dtype == "bf16" or self.dtype == "f16" then return self:to("f32"):buffer() end
  local buffer = ffi.new(ctypes[self.dtype] .. "[?]", math.max(self.count, 1))
  c.check(C.pg_tensor_read(self:alive().raw, 0, buffer, self.count * sizes[self.dtype]))
  return buffer, self.count
end

--- t:totable() -> the numbers as one flat Lua table (i64 from 2^53 on as int64 literals).
function Tensor:totable()
  local buffer, n = self:buffer()
  local out = {}
  for i = 0, n - 1 do out[i + 1] = exact(buffer[i]) end
  return out
end

--- t:write(buffer, n): copy n elements (all) of a C array of the tensor's own type into it.
function Tensor:write(buffer, n)
  if type(buffer) ~= "cdata" and (type(buffer) ~= "string" or #buffer < (n or self.count) * sizes[self.dtype]) then
    c.fail("write: %s wants a C array of %d bytes; pg.tensor makes a tensor of a table", self:describe(),
           (n or self.count) * sizes[self.dtype])
  end
  local s = self.lies_in
  c.check(C.pg_tensor_write(self:alive().raw, 0, buffer, (n or self.count) * sizes[self.dtype]))
  if s then s:noted(self) end
  return self
end

-- Shape of nested tables, flattened into `flat`.
local function flatten(x, shape, level, flat)
  if type(x) ~= "table" then
    if x == nil then
      c.fail(level > 1 and "tensor: a row with a hole" or "tensor: a number or a table of numbers is wanted, got nil")
    end
    if shape[level] ~= nil then c.fail("tensor: rows of different depth") end
    flat[#flat + 1], shape.closed = x, true
    return
  end
  if shape[level] == nil then
    if shape.closed then c.fail("tensor: rows of different depth") end
    if level > 8 then c.fail("a tensor has at most 8 dims; the table is deeper") end
    shape[level] = #x
  end
  for k in pairs(x) do
    if type(k) ~= "number" or k > #x then c.fail("tensor: a row with a hole or a name in it, at %s", tostring(k)) end
  end
  if shape[level] ~= #x then c.fail("tensor: rows of %d and %d elements", shape[level], #x) end
  for i = 1, #x do flatten(x[i], shape, level + 1, flat) end
  if #x > 0 then shape.closed = true end
end

-- An integer v that is exact as a double, and a dtype of integers.
local function fits(v, dtype)
  if dtype == "u8" then return v >= 0 and v <= 255 end
  if dtype == "i16" then return v >= -2^15 and v < 2^15 end
  return dtype == "i64" or (v >= -2^31 and v < 2^31)
end

local function to_c(x, dtype, i)
  if dtype == "i64" then return c.int64(x, ("tensor: element %d"):format(i)) end
  if dtype == "i32" or dtype == "u8" or dtype == "i16" then
    local v = tonumber(c.int64(x, ("tensor: element %d"):format(i)))
    if not fits(v, dtype) then c.fail("tensor: element %d is %.0f, outside %s", i, v, dtype) end
    return v
  end
  return tonumber(x) or c.fail("tensor: element %d is %s, not a number", i, type(x))
end

--- Tensor.from(values, dtype) -> a tensor from a number or (nested) tables of numbers.
function Tensor.from(values, dtype)
  if type(values) == "table" and values.is_tensor then
    c.fail("tensor: it is a tensor already; t:clone() and t:to(dtype) make others of it")
  end
  dtype = dtype or "f32"
  if dtype == "bf16" or dtype == "f16" then return Tensor.from(values, "f32"):to(dtype) end
  local shape, flat = {}, {}
  flatten(values, shape, 1, flat)
  shape.closed = nil
  if not ctypes[dtype] then c.fail("dtype %s is unknown", tostring(dtype)) end
  local buffer = ffi.new(ctypes[dtype] .. "[?]", math.max(#flat, 1))
  for i = 1, #flat do buffer[i - 1] = to_c(flat[i], dtype, i) end
  return Tensor.empty(shape, dtype):write(buffer)
end

--- Tensor.full(shape, value, dtype), zeros, ones.
function Tensor.full(shape, value, dtype) return Tensor.empty(shape, dtype):fill(value) end
function Tensor.zeros(shape, dtype) return Tensor.full(shape, 0, dtype) end
function Tensor.ones(shape, dtype) return Tensor.full(shape, 1, dtype) end

local integral = { i32 = true, i64 = true, u8 = true, i16 = true }

--- t:fill(value) -> t, in place.
function Tensor:fill(value)
  if integral[self.dtype] then
    local x = exact(c.int64(value, "fill: value"))
    if type(x) == "cdata" then
      c.fail("fill: value is %s: it travels as a double, exact only below 2^53; write it with pg.tensor", tostring(x))
    end
    if not fits(x, self.dtype) then c.fail("fill: value is %.0f, outside %s", x, self.dtype) end
    value = x
  elseif type(value) ~= "number" then
    c.fail("fill: value is a %s, not a number", type(value))
  end
  self:alive()
  if self.lies_in then
    local x = Tensor.full(self.shape, value, self.dtype == "f64" and "f64" or "f32")
    self:copy_from(x)
    x:release()
  else
    c.check(C.pg_fill(self.raw, value))
  end
  return self
end

--- t:copy_from(x) -> t.  The same count; casts.
function Tensor:copy_from(x)
  if type(x) ~= "table" or not x.is_tensor then c.fail("copy_from: a tensor is wanted, got %s", type(x)) end
  self:alive()
  x:alive()
  if self.lies_in then self.lies_in:put(self, x) else c.check(C.pg_copy(self.raw, x.raw)) end
  return self
end

--- t:to(dtype) -> a copy in another dtype (unknown to the tape; see ops.cast for the recorded one).
function Tensor:to(dtype)
  if dtype == nil then c.fail('to: a dtype is wanted, such as t:to "f64"') end
  return Tensor.empty(self.shape, dtype):copy_from(self)
end

--- t:clone() -> a copy.
function Tensor:clone() return Tensor.like(self):copy_from(self) end

-- Printing -------------------------------------------------------------------------------------

function Tensor:describe()
  return ("[%s] %s"):format(table.concat(self.shape, ","), self.dtype)
end

local function row_text(t, first, n)
  local shown = math.min(n, 8)
  if shown == 0 then return "[]" end
  local v = t:view({ shown }, first)
  local values = v:totable()
  v:free()
  for i = 1, shown do
    local x = values[i]
    values[i] = type(x) == "number" and ("%10.4g"):format(x) or tostring(x)
  end
  return table.concat(values, " ") .. (n > shown and ("  ... %d more"):format(n - shown) or "")
end

--- tostring(t) -> shape, dtype and a readable excerpt: at most 6 rows of 8 numbers.
function Tensor:__tostring()
  if not self.raw then return ("tensor %s (dead)"):format(self:describe()) end
  if c.shapes_only() then return ("tensor %s (shape only)"):format(self:describe()) end
  if #self.shape == 0 then return ("tensor %s %.9g"):format(self:describe(), self:item()) end
  local width = self.shape[#self.shape]
  local rows = width > 0 and self.count / width or 0
  local lines = { "tensor " .. self:describe() }
  for i = 0, math.min(rows, 6) - 1 do lines[#lines + 1] = "  " .. row_text(self, i * width, width) end
  if rows > 6 then lines[#lines + 1] = ("  ... %d more rows"):format(rows - 6) end
  return table.concat(lines, "\n")
end

return Tensor
