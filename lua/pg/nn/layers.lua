-- nn/layers.lua: the layers every model is made of: Linear, Embedding, norms, Dropout, Sequential.
local c = require "pg.c"
local Module = require "pg.nn.module"
local elementwise = require "pg.ops.elementwise"
local loss = require "pg.ops.loss"
local matmul = require "pg.ops.matmul"
local norm = require "pg.ops.norm"
local tape = require "pg.tape"

local layers = {}

-- The sizes that a layer cannot do without.
local function need(o, what, ...)
  for _, key in ipairs { ... } do
    c.within(o[key] or c.fail("%s: %s is missing", what, key), what .. "." .. key, 1)
  end
end

-- Rows of the weight by name: parts = { { "q_proj", 128 }, ... } become pieces q_proj.weight, ...
local function pieces(parts, what)
  if not parts then return nil end
  local out = {}
  for i, part in ipairs(parts) do out[i] = { name = part[1] .. "." .. what, rows = part[2] } end
  return out
end

--- Linear{ inputs=, outputs=, bias=false, std=0.02, activation=nil, parts=nil }: y = x w^T + b.
-- weight [outputs,inputs].  parts names runs of rows that are fused here and keep their own names.
layers.Linear = Module.class "Linear"
function layers.Linear:init(o)
  c.keys(o, { "inputs", "outputs", "bias", "std", "activation", "parts" }, "Linear")
  need(o, "Linear", "inputs", not o.parts and "outputs" or nil)
  local outputs = o.outputs
  if o.parts then
    outputs = 0
    for _, part in ipairs(o.parts) do outputs = outputs + part[2] end
  end
  self.activation = o.activation
  self.weight = self:param("weight", { outputs, o.inputs },
                           { init = { "normal", o.std or 0.02 }, pieces = pieces(o.parts, "weight"), split = 1 })
  if o.bias then
    self.bias = self:param("bias", { outputs }, { init = { "zeros" }, pieces = pieces(o.parts, "bias") })
  end
end
function layers.Linear:forward(x) return matmul.linear(x, self.weight, self.bias, self.activation) end

--- Embedding{ entries=, width=, std=0.02 }: rows of weight [entries,width] at ids.
layers.Embedding = Module.class "Embedding"
function layers.Embedding:init(o)
  c.keys(o, { "entries", "width", "std" }, "Embedding")
  need(o, "Embedding", "entries", "width")
  self.weight = self:param("weight", { o.entries, o.width }, { init = { "normal", o.std or 0.02 }, split = 1 })
end
function layers.Embedding:forward(ids) return loss.embedding(self.weight, ids) end

--- RMSNorm{ width=, eps=1e-5 }
layers.RMSNorm = Module.class "RMSNorm"
function layers.RMSNorm:init(o)
  c.keys(o, { "width", "eps" }, "RMSNorm")
  need(o, "RMSNorm", "width")
  self.eps = o.eps or 1e-5
  self.weight = self:param("weight", { o.width }, { init = { "ones" } })
end
function layers.RMSNorm:forward(x) return norm.rmsnorm(x, self.weight, self.eps) end

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

--- Dropout{ p=, name= }: off outside training.  The mask is keyed by name, step and the element's place
-- in the global batch, so that it is the same in every layout.
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
  local per_sample = x.count / x.shape[1]
  return elementwise.dropout(x, self.p, { key = self.key, step = context.step,
                                          first = (context.sample0 or 0) * per_sample })
end

--- Sequential{ { name, module, segment }, ... }: one after another; each item has a segment of its own
-- (named like it, or as the third entry says) and may be recomputed (self.recompute = true recomputes
-- every item that says can_recompute).
layers.Sequential = Module.class "Sequential"
function layers.Sequential:init(items)
  self.items = {}
  for i, item in ipairs(items) do
    self.items[i] = self:add(item[1], item[2], item[3] or true)
  end
end
-- forward(x, last): only the items up to that number.
function layers.Sequential:forward(x, last)
  local recompute = require("pg.ops.custom").recompute
  for i = 1, last or #self.items do
    local item = self.items[i]
    if self.recompute and item.can_recompute then x = recompute(item, x) else x = item(x) end
  end
  return x
end

return layers
