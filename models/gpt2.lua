-- models/gpt2.lua: GPT-2 (Radford et al. 2019): LayerNorm, learned positions, GELU, tied head.
--   gpt2{ blocks =, width =, ... } or gpt2 "124m"; names of parameters are Hugging Face's, weights [out,in].
local nn = pg.nn

local schema = {
  blocks  = { "integer", 12, "number of blocks", low = 1, high = 1e5 },
  width   = { "integer", 768, "width of the residual stream", low = 1 },
  heads   = { "integer", 12, "attention heads", low = 1 },
  vocab   = { "integer", 50257, "vocabulary", low = 1 },
  context = { "integer", 1024, "longest sequence", low = 1 },
  dropout = { "number", 0, "of embeddings, attention and residuals", low = 0, below = 1 },
  tied    = { "boolean", true, "the head is the embedding" },
  eps     = { "number", 1e-5, "of the norms", low = 0 },
  std     = { "number", 0.02, "of initial weights", low = 0 },
  head_chunk = { "integer", nil, "rows of logits at a time in the loss; 0: all; default: all up to 1 GiB", low = 0 },
}

local sizes = {
  ["124m"] = { blocks = 12, width = 768, heads = 12 },
  ["350m"] = { blocks = 24, width = 1024, heads = 16 },
  ["774m"] = { blocks = 36, width = 1280, heads = 20 },
  ["1.5b"] = { blocks = 48, width = 1600, heads = 25 },
}

-- Token and position embedding.
local Embed = nn.class "Embed"
function Embed:init(s)
  self.tokens = self:add("wte", nn.Embedding { entries = s.vocab, width = s.width, std = s.std })
  self.positions = self:add("wpe", nn.Positions { context = s.context, width = s.width, std = s.std / 2 })
  if s.dropout > 0 then self.drop = nn.Dropout { p = s.dropout, name = "embedding" } end
end
function Embed:forward(ids)
  local x = self.positions(self.tokens(ids))
  return self.drop and self.drop(x) or x
end

local function block(s, i)
  local out_std = s.std / math.sqrt(2 * s.blocks)
  return nn.Block {
    name = "block " .. i, dropout = s.dropout,
    norm1 = { "ln_1", nn.LayerNorm { width = s.width, eps = s.eps } },
    attention = { "attn", nn.Attention { width = s.width, heads = s.heads, bias = true, std = s.std, out_std = out_std,
                                         dropout = s.dropout, name = "block " .. i, names = { "c_attn", "c_proj" } } },
    norm2 = { "ln_2", nn.LayerNorm { width = s.width, eps = s.eps } },
    mlp = { "mlp", nn.MLP { width = s.width, std = s.std, out_std = out_std } },
  }
end

local GPT2 = nn.class("GPT2", nn.LM)
function GPT2:init(s)
  self.settings, self.vocab, self.context = s, s.vocab, s.context
  local embed = Embed(s)
  local items = { { "", embed, "embedding" } }
  for i = 0, s.blocks - 1 do items[#items + 1] = { "h." .. i, block(s, i) } end
  items[#items + 1] = { "", nn.Head { norm = { "ln_f", nn.LayerNorm { width = s.width, eps = s.eps } }, width = s.width,
                                      vocab = s.vocab, std = s.std, tied = s.tied and embed.tokens or nil,
                                      chunk = s.head_chunk }, "head" }
  self.layers = self:add("", nn.Sequential(items))
end

return pg.describe("gpt2", schema, GPT2, sizes)
