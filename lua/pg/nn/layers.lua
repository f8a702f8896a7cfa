-- nn/layers.lua: the layers every model is made of: Linear, Embedding, Positions, norms, Dropout, Sequential.
-- Under tensor parallelism Linear and Embedding hold a part of their weight where `split` says so; all others are
-- whole on every rank.  What they take and give under sequence parallelism: rows.lua.
local c = require "pg.c"
local Module = require "pg.nn.module"
local comm = require "pg.ops.comm"
local elementwise = require "pg.ops.elementwise"
local loss = require "pg.ops.loss"
local matmul = require "pg.ops.matmul"
local mesh = require "pg.mesh"
local norm = require "pg.ops.norm"
local params = require "pg.params"
local reduce = require "pg.ops.reduce"
local rows = require "pg.nn.rows"
local split_linear = require "pg.ops.split_linear"
local tape = require "pg.tape"
local Tensor = require "pg.tensor"

local layers = {}

-- The sizes that a layer cannot do without.
local function need(o, what, ...)
  for _, key in ipairs { ... } do
    c.within(o[key] or c.fail("%s: %s is missing", what, key), what .. "." .. key, 1)
  end
end

-- Rows of the weight by name: parts = { { "q_proj", 128, sections = nil }, ... } become pieces q_proj.weight, ...
local function pieces(parts, what)
  if not parts then return nil end
  local out = {}
  for i, part in ipairs(parts) do
    local sections
    for k, n in ipairs(part.sections or {}) do
      sections = sections or {}
      sections[k] = { rows = n }
    end
    out[i] = { name = part[1] .. "." .. what, rows = part[2], sections = sections }
  end
  return out
end

--- Linear{ inputs=, outputs=, bias=false, std=0.02, activation=nil, parts=nil, split=nil, pad=false }: y = x w^T + b.
-- weight [outputs,inputs].  parts names runs of rows that are fused here and keep their own names; a part's
-- sections = { rows, ... } are runs of it that tensor parallelism cuts each for itself.  split = "out": each rank of
-- tp holds some outputs, and so gives some columns of y, of all rows (pad = true: as many as there are, padded to
-- equal shares); split = "in": it holds some inputs and takes the columns that a layer split = "out" gives.
layers.Linear = Module.class "Linear"
function layers.Linear:init(o)
  c.keys(o, { "inputs", "outputs", "bias", "std", "activation", "parts", "split", "pad" }, "Linear")
  need(o, "Linear", "inputs", not o.parts and "outputs" or nil)
  if o.split and o.split ~= "out" and o.split ~= "in" then
    c.fail('Linear: split is %s; it may be "out", "in" or nil', tostring(o.split))
  end
  if o.split == "in" and (o.parts or o.activation) then
    c.fail('Linear: split = "in" goes with neither parts nor an activation: its products are sums over ranks')
  end
  local outputs = o.outputs
  if o.parts then
    outputs = 0
    for _, part in ipairs(o.parts) do outputs = outputs + part[2] end
  end
  self.activation, self.split, self.pad = o.activation, o.split, o.pad
  self.weight = self:param("weight", { outputs, o.inputs },
                           { init = { "normal", o.std or 0.02 }, pieces = pieces(o.parts, "weight"),
                             split = o.split == "in" and 2 or o.split == "out" and 1 or nil })
  if o.bias then
    self.bias = self:param("bias", { outputs }, { init = { "zeros" }, pieces = pieces(o.parts, "bias"),
                                                  split = o.split == "out" and 1 or nil })
  end
end
function layers.Linear:split_over(_, name)
  local what = ("the %s of Linear %s"):format(self.split == "in" and "inputs" or "outputs", name)
  for _, p in ipairs { self.weight, self.bias } do params.cut(p, { pad = self.pad, what = what }) end
end

-- Linear layers of a rank of tp, by split.
local parted = {}
parted["out"] = function(self, x)
  if rows.own "Linear" then return split_linear.linear_gathered(x, self.weight, self.bias, self.activation, mesh.tp) end
  return matmul.linear(comm.copy_to_ranks(x, mesh.tp), self.weight, self.bias, self.activation)
end
parted["in"] = function(self, x)
  if rows.own "Linear" then return split_linear.linear_scattered(x, self.weight, self.bias, mesh.tp) end
  local y = comm.reduce_from_ranks(matmul.linear(x, self.weight), mesh.tp)
  return self.bias and elementwise.add(y, self.bias) or y
end

function layers.Linear:forward(x)
  if self.weight.cut then return parted[self.split](self, x) end
  return matmul.linear(x, self.weight, self.bias, self.activation)
end

--- Embedding{ entries=, width=, std=0.02, split=true }: rows of weight [entries,width] at ids.  Each rank of tp holds
-- as many entries as another, padded; split = false: all.
layers.Embedding = Module.class "Embedding"
function layers.Embedding:init(o)
  c.keys(o, { "entries", "width", "std", "split" }, "Embedding")
  need(o, "Embedding", "entries", "width")
  self.entries = o.entries
  self.weight = self:param("weight", { o.entries, o.width },
                           { init = { "normal", o.std or 0.02 }, split = o.split ~= false and 1 or nil })
end
function layers.Embedding:split_over() params.cut(self.weight, { pad = true }) end
function layers.Embedding:pad_rows() params.pad(self.weight) end

-- This rank's part of ids [B,T] under sequence parallelism.
local function own_ids(ids, own) return ids:view({ own.count }, own.first) end

function layers.Embedding:forward(ids)
  local w, own = self.weight, rows.own "Embedding"
  local part = { first = w.start, vocab = self.entries }
  if not w.cut then return loss.embedding(w, own and own_ids(ids, own) or ids, part) end
  local y = loss.embedding(w, ids, part)
  if not own then return comm.reduce_from_ranks(y, mesh.tp) end
  return comm.reduce_scatter_rows(reduce.reshape(y, { ids.count, w.shape[2] }), mesh.tp)
end

--- Positions{ context=, width=, std=0.02 }: x + a learned row of weight [context,width] for each position.
layers.Positions = Module.class "Positions"
function layers.Positions:init(o)
  c.keys(o, { "context", "width", "std" }, "Positions")
  need(o, "Positions", "context", "width")
  self.weight = self:param("weight", { o.context, o.width }, { init = { "normal", o.std or 0.02 } })
  self.kept = {}
end

-- The positions of this rank's rows, which may begin and end within a sequence.
function layers.Positions:ids(own)
  local kept, T = self.kept, own[2]
  if kept.ids and kept.first == own.first and kept.count == own.count and kept.T == T then return kept.ids end
  local list = {}
  for i = 1, own.count do list[i] = (own.first + i - 1) % T end
  local ids = Tensor.from(list, "i32")
  if c.shapes_only() then return ids end
  self.kept = { ids = ids:keep(), first = own.first, count = own.count, T = T }
  return ids
end
function layers.Positions:forward(x)
  local own, w = rows.own "Positions", self.weight
  if own then return elementwise.add(x, loss.embedding(w, self:ids(own))) end
  local t = x.shape[2]
  return elementwise.add(x, t == w.shape[1] and w or reduce.slice(w, 1, 1, t))
end

--- RMSNorm{ width=, eps=1e-5 }; norm:after(x, r) -> x + r, the norm of it, in one pass; LayerNorm as well.
layers.RMSNorm = Module.class "RMSNorm"
function layers.RMSNorm:init(o)
  c.keys(o, { "width", "eps" }, "RMSNorm")
  need(o, "RMSNorm", "width")
  self.eps = o.eps or 1e-5
  self.weight = self:param("weight", { o.width }, { init = { "ones" } })
end
function layers.RMSNorm:forward(x) return norm.rmsnorm(x, self.weight, self.eps) end
function layers.RMSNorm:after(x, r) return norm.add_rmsnorm(x, r, self.weight, self.eps) end

--- LayerNorm{ width=, eps=1e-5, bias=true }
layers.LayerNorm = Module.class "LayerNorm"
function layers.LayerNorm:init(o)
  c.keys(o, { "width", "eps", "bias" }, "LayerNorm")
  need(o, "LayerNorm", "width")
  self.eps = o.eps or 1e-5
  self.weight = self:param("weight", { o.width }, { init = { "ones" } })
  if o.bias ~= false then self.bias = self:param("bias", { o.width }, { init = { "zeros" } }) end
end
function layers.LayerNorm:forward(x) return norm.layernorm(x, self.weight, self.bias, self.eps) end
function layers.LayerNorm:after(x, r) return norm.add_layernorm(x, r, self.weight, self.bias, self.eps) end

--- Dropout{ p=, name= }: off outside training.  The mask is keyed by name, step and the element's place
-- in the global batch, so that it is the same in every layout; x is the residual stream, not a rank's columns.
layers.Dropout = Module.class "Dropout"
function layers.Dropout:init(o)
  c.keys(o, { "p", "name" }, "Dropout")
  if type(o.p) ~= "number" or not (o.p >= 0 and o.p < 1) then
    c.fail("Dropout: p is %s, outside [0,1)", tostring(o.p))
  end
  self.p, self.key = o.p, c.hash("dropout " .. (o.name or c.fail "Dropout: it needs a name of its own"))
end
function layers.Dropout:forward(x)
  local context = tape.context
  if self.p == 0 or not context.training then return x end
  local own = rows.own "Dropout"
  local first
  if own then -- rows of the flattened batch, of which a sample has T
    if x.shape[1] ~= own.count then
      c.fail("Dropout: x is %s, this rank's rows are %d; under layout.sequence it works on the residual stream",
             x:describe(), own.count)
    end
    first = ((context.sample0 or 0) * own[2] + own.first) * (x.count / own.count)
  else
    first = (context.sample0 or 0) * (x.count / x.shape[1])
  end
  return elementwise.dropout(x, self.p, { key = self.key, step = context.step, first = first })
end

--- Sequential{ { name, module, segment }, ... }: one after another; each item has a segment of its own
-- (named like it, or as the third entry says) and may be recomputed (self.recompute = true recomputes
-- every item that says can_recompute).  self.around, a list by item of { before(x) -> x, after(x) -> x }
-- or false, is run beside them: under ZeRO-3 it brings an item's numbers and drops them.
layers.Sequential = Module.class "Sequential"
function layers.Sequential:init(items)
  self.items = {}
  for i, item in ipairs(items) do
    self.items[i] = self:add(item[1], item[2], item[3] or true)
  end
end
function layers.Sequential:forward(x) return self:run(x, 1, #self.items) end

--- sequential:run(x, first, last) -> x through items first to last.
function layers.Sequential:run(x, first, last)
  local recompute = require("pg.ops.custom").recompute
  for i = first, last do
    local item = self.items[i]
    x = self:at(i, x, self.recompute and item.can_recompute and recompute or item.__call)
  end
  return x
end

--- sequential:at(i, x, f) -> what f(item i, x) returns, a tensor first, between what `around` has for that item.
function layers.Sequential:at(i, x, f)
  local around = self.around and self.around[i]
  if not around then return f(self.items[i], x) end
  return around.after(f(self.items[i], around.before(x)))
end

return layers
