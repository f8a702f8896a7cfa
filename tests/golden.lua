-- golden.lua: reads the files of tests/golden; what their entries mean stands in tests/golden/README.md.
local c = require "pg.c"
local json = require "pg.json"
local Tensor = require "pg.tensor"
local C, ffi = c.C, c.ffi

local golden = {}
golden.__index = golden

local names = {}
for name, code in pairs(Tensor.codes) do names[tonumber(code)] = name end

--- golden.open(name) -> the file tests/golden/NAME.safetensors.
function golden.open(name)
  local slot = ffi.new "pg_safetensors *[1]"
  c.check(C.pg_safetensors_open(slot, "tests/golden/" .. name .. ".safetensors"))
  return setmetatable({ raw = ffi.gc(slot[0], C.pg_safetensors_close), name = name }, golden)
end

--- file:meta(key) -> a value of the metadata, read as JSON.
function golden:meta(key)
  local text = C.pg_safetensors_meta(self.raw, key)
  if text == nil then c.fail("%s: no metadata %s", self.name, key) end
  return json.decode(ffi.string(text), key)
end

--- file:names() -> the names of all entries.
function golden:names()
  local list = {}
  for i = 0, tonumber(C.pg_safetensors_count(self.raw)) - 1 do
    list[#list + 1] = ffi.string(C.pg_safetensors_name(self.raw, i))
  end
  return list
end

--- file:read(entry, dtype) -> a tensor, or nil where there is no such entry.  dtype: cast floating ones.
function golden:read(entry, dtype)
  local i = C.pg_safetensors_find(self.raw, entry)
  if i < 0 then return nil end
  local code, n, dims = ffi.new "int[1]", ffi.new "int[1]", ffi.new "int64_t[8]"
  c.check(C.pg_safetensors_info(self.raw, i, code, n, dims))
  local shape = {}
  for d = 1, n[0] do shape[d] = tonumber(dims[d - 1]) end
  local own = names[code[0]]
  local t = Tensor.empty(shape, (own == "f32" or own == "f64") and dtype or own)
  c.check(C.pg_safetensors_read(self.raw, i, 0, t.raw))
  return t
end

return golden
