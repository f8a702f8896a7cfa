-- init.lua: the public names of pgrun, and nothing else.  `pg` is the one global.  Parts are loaded when
-- they are first named, so that a line that needs none of them starts at once.
local pg = {}

-- name = module: pg.name is that module.
local modules = {
  nn = "pg.nn", mesh = "pg.mesh", rate = "pg.optim.rate", data = "pg.data", json = "pg.json", fs = "pg.fs",
  step = "pg.step", schedule = "pg.parallel.schedule",
}

-- name = { module, field }: pg.name is that field.
local fields = {
  describe = { "pg.describe", "new" }, no_grad = { "pg.tape", "no_grad" }, scope = { "pg.scope", "run" },
  log = { "pg.log", "line" }, generate = { "pg.generate", "text" }, demo_text = { "pg.data.demo", "path" },
  parallel = { "pg.parallel.script", "new" }, stats = { "pg.stats", "of" },
  nonfinite = { "pg.watch", "nonfinite" }, timings = { "pg.watch", "timings" },
  reload = { "pg.live.reload", "module" }, gradients = { "pg.live.look", "gradients" },
  graph = { "pg.graph", "new" },
  watch_activations = { "pg.live.look", "activations" },
  randn = { "pg.random", "randn" }, rand = { "pg.random", "rand" },
}

local op_files = { "elementwise", "matmul", "norm", "attention", "loss", "vocab", "reduce", "custom", "comm" }

-- Tensors and all ops come together: ops become methods of tensors.
local function load_tensors()
  local Tensor = require "pg.tensor"
  for _, file in ipairs(op_files) do
    for name, f in pairs(require("pg.ops." .. file)) do
      if type(f) == "function" then
        if not fields[name] and not modules[name] then rawset(pg, name, f) end -- pg.log has two sides, see log.lua
        if Tensor[name] == nil then Tensor[name] = f end
      end
    end
  end
  Tensor.__add, Tensor.__sub, Tensor.__mul, Tensor.__div = pg.add, pg.sub, pg.mul, pg.div
  Tensor.__unm = pg.neg
  function Tensor:stats() return pg.stats(self) end
  rawset(pg, "Tensor", Tensor)
  for _, name in ipairs { "empty", "zeros", "ones", "full" } do rawset(pg, name, Tensor[name]) end
  --- pg.tensor(values, dtype) -> a tensor of a number or of nested tables of numbers.
  rawset(pg, "tensor", Tensor.from)
end

--- pg.build(description or module, o) -> a module with its parameters placed and initialised.
-- o.seed (0), o.dtype ("f32"), o.train (true): see params.build.
local function build(what, o)
  local describe = require "pg.describe"
  local module = describe.is(what) and describe.build(what) or what
  if type(module) ~= "table" or not module.is_module then
    require("pg.c").fail("build: %s is neither a description nor a module", tostring(what))
  end
  require("pg.params").build(module, o)
  return require("pg.parallel.zero").attach(module)
end

--- pg.time() -> seconds; pg.memory() -> { in_use, peak, kept, limit, tensors, holders }.
local function time() return require("pg.c").C.pg_time() end
local function memory()
  local c = require "pg.c"
  local m, bytes = c.ffi.new "pg_mem", c.ffi.new "int64_t[1]"
  c.C.pg_mem_stats(m)
  local out = { in_use = tonumber(m.in_use), peak = tonumber(m.peak), kept = tonumber(m.kept),
                limit = tonumber(m.limit), tensors = tonumber(m.tensors), holders = {} }
  for i = 0, 63 do
    local name = c.C.pg_mem_holder(i, bytes)
    if name == nil then break end
    out.holders[i + 1] = { tag = c.ffi.string(name), bytes = tonumber(bytes[0]) }
  end
  return out
end

--- pg.rank(), pg.ranks(), pg.barrier(): of the whole job.
local function rank() return require("pg.mesh").rank() end
local function ranks() return require("pg.mesh").size() end
local function barrier()
  local mesh = require "pg.mesh"
  mesh.rank()
  mesh.world:barrier()
end

pg.build, pg.time, pg.memory, pg.rank, pg.ranks, pg.barrier = build, time, memory, rank, ranks, barrier

--- pg.optim.adamw(parameters, settings), pg.optim.sgd(parameters, settings) -> an optimiser.
pg.optim = setmetatable({}, { __index = function(_, name)
  if name ~= "adamw" and name ~= "sgd" then return nil end
  return function(...)
    return require("pg.parallel.reducer").attach(require("pg.optim." .. name).new(...))
  end
end })

setmetatable(pg, { __index = function(_, name)
  local value
  if modules[name] then value = require(modules[name])
  elseif fields[name] then value = require(fields[name][1])[fields[name][2]]
  elseif type(name) == "string" and not rawget(pg, "Tensor") and name:match "^[%a_]+$" then
    load_tensors()
    return rawget(pg, name)
  end
  if value ~= nil then rawset(pg, name, value) end
  -- what brought tensors with it brings their methods
  if not rawget(pg, "Tensor") and package.loaded["pg.tensor"] then load_tensors() end
  return value
end })

return pg
