-- ops/attention.lua: attention, rotary positions, SwiGLU.
local c = require "pg.c"
local Tensor = require "pg.tensor"
local tape = require "pg.tape"
local done = require("pg.watch").done
local C, ffi = c.C, c.ffi

local ops = {}

-- Rotary positions ------------------------------------------------------------------------------

--- rope_table(positions, width, theta, dtype) -> cos, sin [positions, width/2]; angles in double.
function ops.rope_table(positions, width, theta, dtype)
  if width % 2 ~= 0 then c.fail("rope: head width %d is odd; it must be even", width) end
  local cos, sin = Tensor.empty({ positions, width / 2 }, dtype), Tensor.empty({ positions, width / 2 }, dtype)
  c.check(C.pg_rope_table(cos.raw, sin.raw, theta or 10000, 0))
  return cos, sin
end

local function turn_back(r, dx, dy, add)
  local s, a = r.saved, r.a
  c.check(C.pg_rope(dx.raw, dy.raw, s[1].raw, s[2].raw, a.heads, a.start, -1, add))
end

local ROPE = { name = "rope",
  pass = function(r, _, dy) -- in its own place, unless somebody else reads it
    if dy.owners > 1 or C.pg_tensor_handles(dy.raw) > 1 then return nil end
    turn_back(r, dy, dy, 0)
    return dy
  end,
  grad_input = function(r, dy, d, add) turn_back(r, d[1], dy, add[1]) end }

--- rope(x, cos, sin, heads, start, o) -> y like x.  x [B,T,C]; the first `heads` heads of each row turn
-- (half-split, as Hugging Face), the other columns are copied.  Row t uses line start + t; cos and sin are
-- f32 beside bf16 and f16.  o.in_place = true: y takes x's own memory; nobody may read x any more, not the
-- gradient of the op that made it either.  Su et al. 2021.
function ops.rope(x, cos, sin, heads, start, o)
  local in_place = o and c.keys(o, { "in_place" }, "rope").in_place
  if in_place and x.requires_grad and not x.record then
    c.fail("rope: x %s is a leaf that wants a gradient; in_place would change it, leave it out", x:describe())
  end
  local y = in_place and x:detach() or Tensor.like(x)
  done("rope", C.pg_rope(y.raw, x:alive().raw, cos:alive().raw, sin:alive().raw, heads, start or 0, 1, 0), y)
  if tape.wants(x) then
    tape.record(ROPE, { x }, 1, { cos, sin }, 2, y, { heads = heads, start = start or 0 })
  end
  return y
end

-- Attention -------------------------------------------------------------------------------------

local attn = ffi.new "pg_attn"
local known = { "heads", "kv_heads", "scale", "causal", "lengths", "dropout", "key", "step", "sample0",
                "head0", "heads_all" }

-- Fill the one options block; it is read during the call only.
local function options(o)
  attn.heads, attn.kv_heads = o.heads, o.kv_heads or o.heads
  attn.scale, attn.causal = o.scale or 0, o.causal and 1 or 0
  attn.lengths = o.lengths and o.lengths:alive().raw
  attn.dropout, attn.key = o.dropout or 0, o.key or 0
  attn.sample0, attn.head0 = o.sample0 or 0, o.head0 or 0
  attn.heads_all = o.heads_all or o.heads
  attn.step = o.step and o.step:alive().raw
  return attn
end

local function raw(t) return t and t.raw or nil end

-- The caller may change its table before backward reads it.
local function own_copy(o)
  local copy = {}
  for name, value in pairs(o) do copy[name] = value end
  if type(o.key) == "string" then copy.key = c.hash(o.key) end
  return copy
end

-- dq, dk, dv are written by one call with one `add`; where that differs among them, what is not
-- wanted added starts from zero.
local ATTENTION = { name = "attention", grad_input = function(r, dy, d, add)
  local s, some = r.saved, 0
  for i = 1, 3 do if d[i] and add[i] == 1 then some = 1 end end
  for i = 1, 3 do if d[i] and add[i] == 0 and some == 1 then d[i]:fill(0) end end
  c.check(C.pg_attention_grad(raw(d[1]), raw(d[2]), raw(d[3]), dy.raw, s[1].raw, raw(s[2]), raw(s[3]),
                              s[4].raw, s[5].raw, options(r.a), some))
end }

--- attention(q, k, v, o) -> y [B,T,H*K].  q [B,T,H*K], k and v [B,Tk,G*K]; or q packed
-- [B,T,(H+2G)*K] with k = v = nil.  o: heads, kv_heads (= heads), causal, scale (1/sqrt K), lengths
-- i32 [B] (keys from there on are masked), dropout with key and step.  A row that may see no key
-- gives 0.  key: uint64 or a name.
function ops.attention(q, k, v, o)
  c.keys(o, known, "attention")
  o = own_copy(o)
  local heads, groups = o.heads, o.kv_heads or o.heads
  if not heads or heads % groups ~= 0 then
    c.fail("attention: %s heads and %s kv_heads; kv_heads must divide heads", tostring(heads), tostring(groups))
  end
  local batch, rows, columns = unpack(q.shape)
  local all = k and heads or heads + 2 * groups
  if #q.shape ~= 3 or columns % all ~= 0 then
    c.fail("attention: q is %s; it must be [batch,tokens,columns], columns a multiple of %d heads", q:describe(), all)
  end
  local width = columns / all
  local stat = q.dtype == "f64" and "f64" or "f32"
  local y, lse = Tensor.empty({ batch, rows, heads * width }, q.dtype), Tensor.empty({ batch, heads, rows }, stat)
  if k then k:alive() end
  if v then v:alive() end
  done("attention", C.pg_attention(y.raw, lse.raw, q:alive().raw, raw(k), raw(v), options(o)), y)
  if tape.wants(q, k, v) then
    tape.record(ATTENTION, { q, k, v }, 3, { q, k or false, v or false, y, lse, o.lengths or false, o.step or false },
      7, y, o)
  end
  return y
end

-- SwiGLU ----------------------------------------------------------------------------------------

local SWIGLU = { name = "swiglu", grad_input = function(r, dy, d, add)
  c.check(C.pg_swiglu_grad(d[1].raw, dy.raw, r.saved[1].raw, add[1]))
end }

--- swiglu(x) -> y [..,F] = silu(first half) * second half of x [..,2F].  Shazeer 2020.
function ops.swiglu(x)
  local shape = { unpack(x.shape) }
  if #shape == 0 or shape[#shape] % 2 ~= 0 then
    c.fail("swiglu: x is %s; its last dim must be even: a gate and a value of each", x:describe())
  end
  shape[#shape] = shape[#shape] / 2
  local y = Tensor.empty(shape, x.dtype)
  done("swiglu", C.pg_swiglu(y.raw, x:alive().raw), y)
  if tape.wants(x) then tape.record(SWIGLU, { x }, 1, { x }, 1, y) end
  return y
end

return ops
