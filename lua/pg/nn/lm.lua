-- nn/lm.lua: what all language models share: the head, the loss of a batch.
local c = require "pg.c"
local Module = require "pg.nn.module"
local comm = require "pg.ops.comm"
local elementwise = require "pg.ops.elementwise"
local layers = require "pg.nn.layers"
local loss_ops = require "pg.ops.loss"
local matmul = require "pg.ops.matmul"
local mesh = require "pg.mesh"
local scope = require "pg.scope"
local vocab = require "pg.ops.vocab"

local lm = {}

--- Head{ norm = { name, module }, width=, vocab=, std=, tied = embedding or nil, name="lm_head", chunk=nil }:
-- the last norm and the logits; tied uses the embedding's own weight.  chunk: rows whose logits exist at a time
-- while the loss is computed, see head_loss.
lm.Head = Module.class "Head"
function lm.Head:init(o)
  c.keys(o, { "norm", "width", "vocab", "std", "tied", "name", "chunk" }, "Head")
  self.chunk = o.chunk and c.within(o.chunk, "Head.chunk", 0)
  self.norm = self:add(unpack(o.norm))
  if o.tied then self.weight = self:lend(o.tied.weight)
  else
    self.weight = self:add(o.name or "lm_head",
      layers.Linear { inputs = o.width, outputs = o.vocab, std = o.std }).weight
  end
end
function lm.Head:forward(x) return matmul.linear(self.norm(x), self.weight) end
--- head:loss(x, batch) -> loss, valid: the cross-entropy of forward(x), whose logits nobody else sees.
function lm.Head:loss(x, batch)
  return vocab.head_loss(self.norm(x), self.weight, batch.targets,
                         { chunk = self.chunk, ignore = batch.ignore, step = batch.step })
end

--- LM: a class for models whose self.layers is a Sequential from ids [B,T] to logits [B,T,V], with
-- self.vocab and self.context.
lm.LM = Module.class "LM"
local function check_ids(model, ids)
  if type(ids) ~= "table" or not ids.is_tensor then
    c.fail('model: token ids are a %s; give a tensor, such as pg.tensor({ { 72, 105 } }, "i32")', type(ids))
  end
  if #ids.shape ~= 2 then c.fail("model: token ids are %s; they must be [batch,tokens]", ids:describe()) end
  if ids.shape[2] > model.context then
    c.fail("model: a sequence of %d tokens, the model's context is %d", ids.shape[2], model.context)
  end
end
function lm.LM:forward(ids)
  check_ids(self, ids)
  return self.layers(ids)
end

-- Where the logits are those of a Head at the end and go nowhere else, the head computes the loss; where somebody's
-- own forward has a say, the loss is that of what it returns.
local function local_loss(model, batch)
  local items = model.layers and model.layers.items
  local head = items and items[#items]
  if head and model.forward == lm.LM.forward and model.layers.forward == layers.Sequential.forward
    and head.forward == lm.Head.forward then
    check_ids(model, batch.tokens)
    return head:loss(model.layers(batch.tokens, #items - 1), batch)
  end
  return loss_ops.cross_entropy(model:forward(batch.tokens), batch.targets,
                                { ignore = batch.ignore, step = batch.step })
end

--- model:loss(batch) -> loss, a tensor of one number: the mean over valid targets.
-- batch.tokens, batch.targets [B,T]; targets equal to batch.ignore (-100) do not count.  A batch of
-- pg.data carries the step block, so that the mean is over all valid targets of the global batch however
-- they fall over ranks; a batch of your own is averaged over the ranks by its valid targets.
-- batch.share = true leaves the value as this rank's share (the trainer sums it itself).
function lm.LM:loss(batch)
  if type(batch) ~= "table" or not batch.tokens or not batch.targets then
    c.fail("model:loss: a batch is a table with tokens and targets, as pg.data gives it")
  end
  local loss, valid = scope.light(local_loss, self, batch)
  if batch.share then return loss, valid end
  local dp = mesh.ready().dp
  if dp.size == 1 then return loss, valid end
  if not batch.step then
    local mine = valid:item()
    local all = dp:sum_numbers { mine }[1]
    loss = elementwise.scale(loss, all > 0 and mine / all or 0)
  end
  return comm.sum_values(loss, dp), valid
end

return lm
