-- flops.lua: how many floating point operations a token of training needs, and what a card can do: together
-- the model FLOPs utilisation (MFU; Chowdhery et al. 2022, appendix B).  Two conventions, both shown:
--   causal   6 N' + 6 S A: products with the weights, without the rows that an embedding looks up, and the half
--            of attention that a causal mask leaves
--   full     6 N + 12 S A: every parameter and the whole square, as most published figures count
-- N: parameters; N': without input embeddings; S: tokens of a sequence; A: sum over blocks of heads x width.
local c = require "pg.c"
local C, ffi = c.C, c.ffi

local flops = {}

-- Dense peaks in FLOP/s by the vendor's data sheets; the first that stands in the card's name, as whole words, counts.
local peaks = {
  { "B200", bf16 = 2.25e15 }, { "GB200", bf16 = 2.5e15 },
  { "GH200", bf16 = 989e12, tf32 = 494.5e12, fp32 = 67e12 },
  { "H100 PCIe", bf16 = 756e12, fp32 = 51e12 }, { "H100 NVL", bf16 = 835e12, fp32 = 60e12 },
  { "H100", bf16 = 989e12, tf32 = 494.5e12, fp32 = 67e12 }, { "H200", bf16 = 989e12, tf32 = 494.5e12, fp32 = 67e12 },
  { "H20", bf16 = 148e12, fp32 = 44e12 }, { "A100", bf16 = 312e12, tf32 = 156e12, fp32 = 19.5e12 },
  { "A800", bf16 = 312e12, tf32 = 156e12, fp32 = 19.5e12 }, { "L40S", bf16 = 362e12, fp32 = 91.6e12 },
  { "A10G", bf16 = 70e12, fp32 = 31.2e12 }, { "A10", bf16 = 125e12, fp32 = 31.2e12 },
  { "L4", bf16 = 121e12, fp32 = 30.3e12 }, { "RTX 4090", bf16 = 165e12, fp32 = 82.6e12 },
  { "RTX 3090", bf16 = 71e12, fp32 = 35.6e12 },
}

--- flops.peak(card, precision) -> dense FLOP/s of the card of this name, or nil where it is not known.
function flops.peak(card, precision)
  for _, entry in ipairs(peaks) do
    if card:find("%f[%w]" .. entry[1] .. "%f[%W]") then return entry[precision] end
  end
end

--- flops.card() -> the name of this process's GPU; nil on other devices.
function flops.card()
  if c.device() ~= "cuda" then return nil end
  return ffi.string(C.pg_version_info()):match "\n?GPU 0%s+([^\n,]+)"
end

local function elements(p) return c.product(p.whole or p.shape) end

--- flops.token(model, context) -> causal, full: operations for one token, forward and backward.  Counts the
-- whole model, also what other ranks hold.
function flops.token(model, context)
  local all, looked_up, width = 0, 0, 0
  local seen, lent = {}, {}
  model:each_parameter(function(p, prefix)
    if not prefix then lent[p] = true
    elseif not seen[p] then
      seen[p] = true
      all = all + elements(p)
    end
  end)
  model:each_module(function(m)
    if m.class_name == "Embedding" and not lent[m.weight] then looked_up = looked_up + elements(m.weight) end
    if m.class_name == "Attention" then width = width + m.options.heads_all * m.head_width end
  end)
  return 6 * (all - looked_up) + 6 * context * width, 6 * all + 12 * context * width
end

return flops
