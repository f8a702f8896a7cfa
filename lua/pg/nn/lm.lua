-- nn/lm.lua: what all language models share: the head, the loss of a batch.
local c = require "pg.c"
local Module = require "pg.nn.module"
local comm = require "pg.ops.comm"
local elementwise = require "pg.ops.elementwise"
local loss_ops = require "pg.ops.loss"
local matmul = require "pg.ops.matmul"
local mesh = require "pg.mesh"

local lm = {}

--- Head{ norm = { name, module }, width=, vocab=, std=, tied = embedding or nil, name="lm_head" }:
-- the last norm and the logits; tied uses the embedding's own weight.
lm.Head = Module.class "Head"
function lm.Head:init(o)
  c.keys(o, { "norm", "width", "vocab", "std", "tied", "name" }, "Head")
  self.norm = self:add(unpack(o.norm))
  if o.tied then self.weight = self:lend(o.tied.weight)
  else
    local layers = require "pg.nn.layers"
    self.weight = self:add(o.name or "lm_head",
      layers.Linear { inputs = o.width, outputs = o.vocab, std = o.std }).weight
  end
end
function lm.Head:forward(x) return matmul.linear(self.norm(x), self.weight) end

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
function lm.LM:forward(ids) return self:part(nil, { tokens = ids }, 1, #self.layers.items) end

--- model:part(x, batch, first, last) -> items first to last of its layers run on x (nil: on the batch's tokens).
-- Where last is the last of all and the batch has targets: loss, valid; else what the last item gives.
function lm.LM:part(x, batch, first, last)
  if first == 1 then
    x = batch.tokens
    check_ids(self, x)
  end
  x = self.layers:run(x, first, last)
  if last < #self.layers.items or not batch.targets then return x end
  return loss_ops.cross_entropy(x, batch.targets, { ignore = batch.ignore, step = batch.step })
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
  local loss, valid = self:part(nil, batch, 1, #self.layers.items)
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
