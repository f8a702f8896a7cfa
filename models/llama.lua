-- models/llama.lua: LLaMA (Touvron et al. 2023): RMSNorm, rotary positions, grouped heads, SwiGLU.
--   llama{ blocks =, width =, heads =, ... } or llama "7b"; names of parameters are Hugging Face's.
local nn = pg.nn

local schema = {
  blocks   = { "integer", 4, "number of blocks", low = 1, high = 1e5 },
  width    = { "integer", 128, "width of the residual stream", low = 1 },
  heads    = { "integer", 4, "attention heads", low = 1 },
  kv_heads = { "integer", nil, "key and value heads; default: heads", low = 1 },
  ffn      = { "integer", nil, "hidden width of the MLP; default: 8/3 width rounded up to a multiple of 8", low = 1 },
  vocab    = { "integer", 259, "vocabulary", low = 1 },
  context  = { "integer", 128, "longest sequence", low = 1 },
  tied     = { "boolean", false, "the head is the embedding" },
  theta    = { "number", 10000, "base of the rotary angles" },
  eps      = { "number", 1e-5, "of the norms", low = 0 },
  std      = { "number", 0.02, "of initial weights", low = 0 },
  head_chunk = { "integer", nil, "rows of logits at a time in the loss; 0: all; default: all up to 1 GiB", low = 0 },
}

local sizes = {
  ["7b"]  = { blocks = 32, width = 4096, heads = 32, ffn = 11008, vocab = 32000, context = 4096 },
  ["13b"] = { blocks = 40, width = 5120, heads = 40, ffn = 13824, vocab = 32000, context = 4096 },
}

local Llama = nn.class("Llama", nn.LM)

local function block(s, i, rope)
  local out_std = s.std / math.sqrt(2 * s.blocks) -- keeps the residual stream's variance (GPT-2 paper, 2.3)
  return nn.Block {
    norm1 = { "input_layernorm", nn.RMSNorm { width = s.width, eps = s.eps } },
    attention = { "self_attn", nn.Attention { width = s.width, heads = s.heads, kv_heads = s.kv_heads, rope = rope,
                                              std = s.std, out_std = out_std, name = "block " .. i } },
    norm2 = { "post_attention_layernorm", nn.RMSNorm { width = s.width, eps = s.eps } },
    mlp = { "mlp", nn.GatedMLP { width = s.width, ffn = s.ffn, std = s.std, out_std = out_std } },
  }
end

function Llama:init(s)
  s.kv_heads = s.kv_heads or s.heads
  s.ffn = s.ffn or math.ceil(s.width * 8 / 3 / 8) * 8
  self.settings, self.vocab, self.context = s, s.vocab, s.context
  local rope = nn.Rope { width = s.width / s.heads, theta = s.theta, context = s.context }
  local embedding = nn.Embedding { entries = s.vocab, width = s.width, std = s.std }
  local items = { { "model.embed_tokens", embedding } }
  for i = 0, s.blocks - 1 do items[#items + 1] = { "model.layers." .. i, block(s, i, rope) } end
  local norm = nn.RMSNorm { width = s.width, eps = s.eps }
  items[#items + 1] = { "", nn.Head { norm = { "model.norm", norm }, width = s.width, vocab = s.vocab, std = s.std,
                                      tied = s.tied and embedding or nil, chunk = s.head_chunk }, "head" }
  self.layers = self:add("", nn.Sequential(items))
end

return pg.describe("llama", schema, Llama, sizes)
