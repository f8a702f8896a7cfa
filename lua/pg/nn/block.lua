-- nn/block.lua: attention, MLP and the residual blocks of LLaMA and GPT-2.
-- Children are named so that full names are those of Hugging Face.  Under tensor parallelism a rank has some heads
-- and some of the MLP's hidden columns; norms, dropout and sums of a block are on the residual stream (rows.lua).
local c = require "pg.c"
local Module = require "pg.nn.module"
local layers = require "pg.nn.layers"
local attention = require "pg.ops.attention"
local elementwise = require "pg.ops.elementwise"
local params = require "pg.params"
local reduce = require "pg.ops.reduce"
local rows = require "pg.nn.rows"
local tape = require "pg.tape"

local block = {}

local IN_PLACE = { in_place = true }

--- Attention{ width=, heads=, kv_heads=heads, head_width=width/heads, causal=true, bias=false, rope=nil,
-- out_std=std, std=0.02, dropout=0, name=, names={ q, k, v, out } or { qkv, out } }.
-- q, k, v are one product.  rope: an object with tables(T) -> cos, sin, or nil for none.
block.Attention = Module.class "Attention"
function block.Attention:init(o)
  c.keys(o, { "width", "heads", "kv_heads", "head_width", "causal", "bias", "rope", "std", "out_std",
              "dropout", "name", "names" }, "Attention")
  local heads, groups = o.heads, o.kv_heads or o.heads
  if heads < 1 or groups < 1 or heads % groups ~= 0 then
    c.fail("Attention: %d heads and %d kv_heads; kv_heads must divide heads", heads, groups)
  end
  local width = o.head_width or o.width / heads
  if width ~= math.floor(width) then
    c.fail("Attention: width %d does not divide into %d heads; choose heads that divide it", o.width, heads)
  end
  local names = o.names or { "q_proj", "k_proj", "v_proj", "o_proj" }
  self.rope, self.head_width = o.rope, width
  self.options = { heads = heads, kv_heads = groups, heads_all = heads, head0 = 0, causal = o.causal ~= false }
  self.dropout, self.key = o.dropout or 0, c.hash("attention dropout " .. (o.name or ""))
  local parts = #names == 4
    and { { names[1], heads * width }, { names[2], groups * width }, { names[3], groups * width } }
    or { { names[1], (heads + 2 * groups) * width, sections = { heads * width, groups * width, groups * width } } }
  self.qkv = self:add("", layers.Linear { inputs = o.width, parts = parts, bias = o.bias, std = o.std, split = "out" })
  self.out = self:add(names[#names], layers.Linear { inputs = heads * width, outputs = o.width, bias = o.bias,
                                                     std = o.out_std or o.std, split = "in" })
end

-- Whole query heads on each rank, and with them their key and value head: some of its own, or, where there are
-- fewer than ranks, a copy of one.
function block.Attention:split_over(tp, name)
  local o, size = self.options, tp.size
  local heads, groups = o.heads, o.kv_heads
  local function fits(n) return heads % n == 0 and (groups % n == 0 or n % groups == 0) end
  if not fits(size) then
    c.fail("layout.tp = %d: %s has %d heads and %d kv_heads; tp must divide heads, and divide kv_heads or be a "
           .. "multiple of them; %s would fit", size, name, heads, groups, params.fitting(size, heads, fits))
  end
  o.heads, o.kv_heads, o.head0 = heads / size, math.max(groups / size, 1), tp.rank * heads / size
  if groups >= size then return end
  for _, p in ipairs { self.qkv.weight, self.qkv.bias } do
    local keys = #p.pieces == 1 and p.pieces[1].sections or p.pieces
    keys[2].copies, keys[3].copies = size / groups, size / groups
  end
end

function block.Attention:forward(x)
  local qkv, own = self.qkv(x), rows.own "Attention"
  if own then qkv = reduce.reshape(qkv, { own[1], own[2], -1 }) end
  local o, context = self.options, tape.context
  if self.rope then
    local cos, sin = self.rope:tables(qkv.shape[2], x.dtype == "f64" and "f64" or "f32")
    qkv = attention.rope(qkv, cos, sin, o.heads + o.kv_heads, 0, IN_PLACE)
  end
  if self.dropout > 0 and context.training then
    o = { heads = o.heads, kv_heads = o.kv_heads, heads_all = o.heads_all, head0 = o.head0, causal = o.causal,
          dropout = self.dropout, key = self.key, step = context.step, sample0 = context.sample0 }
  end
  return self.out(attention.attention(qkv, nil, nil, o))
end

--- Rope{ width=, theta=10000, context= }: the tables of one model, shared by its blocks.
local Rope = {}
Rope.__index = Rope
function block.Rope(o)
  if o.width % 2 ~= 0 then
    c.fail("rope: the heads are %g wide; choose width and heads so that width / heads is even", o.width)
  end
  return setmetatable({ width = o.width, theta = o.theta, context = o.context, kept = {} }, Rope)
end
function Rope:tables(tokens, dtype)
  if tokens > self.context then
    c.fail("rope: a sequence of %d tokens, the model's context is %d", tokens, self.context)
  end
  local t = self.kept[dtype]
  if not t or not t.cos.raw then
    local cos, sin = attention.rope_table(self.context, self.width, self.theta, dtype)
    t = { cos = cos:keep(), sin = sin:keep() }
    if not c.shapes_only() then self.kept[dtype] = t end
  end
  return t.cos, t.sin
end

-- Hidden columns of an MLP over the ranks of tp.
local function check_ffn(self, tp, name) params.divides(self.ffn, tp.size, "the hidden width (ffn) of " .. name) end

--- GatedMLP{ width=, ffn=, std=, out_std= }: down(silu(gate x) * up x); gate and up are one product.
block.GatedMLP = Module.class "GatedMLP"
function block.GatedMLP:init(o)
  c.keys(o, { "width", "ffn", "std", "out_std" }, "GatedMLP")
  self.ffn = o.ffn
  self.gate_up = self:add("", layers.Linear { inputs = o.width, std = o.std, split = "out",
                                              parts = { { "gate_proj", o.ffn }, { "up_proj", o.ffn } } })
  self.down = self:add("down_proj", layers.Linear { inputs = o.ffn, outputs = o.width, std = o.out_std or o.std,
                                                    split = "in" })
end
block.GatedMLP.split_over = check_ffn
function block.GatedMLP:forward(x) return self.down(attention.swiglu(self.gate_up(x))) end

--- MLP{ width=, ffn=4 width, activation="gelu_tanh", bias=true, std=, out_std=, names={ in, out } }.
block.MLP = Module.class "MLP"
function block.MLP:init(o)
  c.keys(o, { "width", "ffn", "activation", "bias", "std", "out_std", "names" }, "MLP")
  local names = o.names or { "c_fc", "c_proj" }
  local ffn = o.ffn or 4 * o.width
  self.ffn = ffn
  self.up = self:add(names[1], layers.Linear { inputs = o.width, outputs = ffn, bias = o.bias ~= false,
                                               activation = o.activation or "gelu_tanh", std = o.std, split = "out" })
  self.down = self:add(names[2], layers.Linear { inputs = ffn, outputs = o.width, bias = o.bias ~= false,
                                                 std = o.out_std or o.std, split = "in" })
end
block.MLP.split_over = check_ffn
function block.MLP:forward(x) return self.down(self.up(x)) end

--- Block{ norm1 = { name, module }, attention = { name, module }, norm2 =, mlp =, dropout = p, name = }:
-- x + attention(norm1 x), then x + mlp(norm2 x).
block.Block = Module.class "Block"
block.Block.can_recompute = true
function block.Block:init(o)
  c.keys(o, { "norm1", "attention", "norm2", "mlp", "dropout", "name" }, "Block")
  self.norm1, self.attention = self:add(unpack(o.norm1)), self:add(unpack(o.attention))
  self.norm2, self.mlp = self:add(unpack(o.norm2)), self:add(unpack(o.mlp))
  if (o.dropout or 0) > 0 then
    self.drop1 = layers.Dropout { p = o.dropout, name = o.name .. ".1" }
    self.drop2 = layers.Dropout { p = o.dropout, name = o.name .. ".2" }
  end
end
function block.Block:forward(x)
  local a = self.attention(self.norm1(x))
  if self.drop1 then a = self.drop1(a) end
  local h
  if self.norm2.after then x, h = self.norm2:after(x, a)
  else
    x = elementwise.add(x, a)
    h = self.norm2(x)
  end
  local m = self.mlp(h)
  if self.drop2 then m = self.drop2(m) end
  return elementwise.add(x, m)
end

return block
