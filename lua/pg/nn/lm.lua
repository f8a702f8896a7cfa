-- nn/lm.lua: what all language models share: the head, the loss of a batch, a run of their layers.
-- Under tensor parallelism the head's rows of the vocabulary are cut over the ranks of tp, padded to equal shares.
local c = require "pg.c"
local Module = require "pg.nn.module"
local comm = require "pg.ops.comm"
local elementwise = require "pg.ops.elementwise"
local layers = require "pg.nn.layers"
local loss_ops = require "pg.ops.loss"
local matmul = require "pg.ops.matmul"
local mesh = require "pg.mesh"
local params = require "pg.params"
local reduce = require "pg.ops.reduce"
local rows = require "pg.nn.rows"
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
  self.vocab = o.vocab
  self.norm = self:add(unpack(o.norm))
  if o.tied then self.weight = self:lend(o.tied.weight)
  else
    self.weight = self:add(o.name or "lm_head",
      layers.Linear { inputs = o.width, outputs = o.vocab, std = o.std, split = "out", pad = true }).weight
  end
end

-- A tied embedding that would be whole is cut as well: all ranks share the work of the head.
function lm.Head:split_over()
  self.weight.split = 1
  params.cut(self.weight, { pad = true })
end

-- The last norm of all rows, for each rank to go on to its part of the vocabulary.
local function all_rows(self, x)
  local h = self.norm(x)
  if not self.weight.cut then return h end
  local own = rows.own "Head"
  if not own then return comm.copy_to_ranks(h, mesh.tp) end
  return reduce.reshape(comm.gather_rows(h, mesh.tp), { own[1], own[2], h.shape[2] })
end

--- head(x) -> logits [B,T,vocab], on every rank of tp.
function lm.Head:forward(x)
  local logits = matmul.linear(all_rows(self, x), self.weight)
  return self.weight.cut and comm.gather_columns(logits, mesh.tp, self.vocab) or logits
end

--- head:loss(x, batch) -> loss, valid: the cross-entropy of forward(x), whose logits nobody else sees and no rank
-- has whole.
function lm.Head:loss(x, batch)
  local w, o = self.weight, { chunk = self.chunk, ignore = batch.ignore, step = batch.step }
  if w.cut then o.axis, o.first, o.valid, o.vocab = mesh.tp, w.start, w.valid, self.vocab end
  return vocab.head_loss(all_rows(self, x), w, batch.targets, o)
end

--- LM: a class for models whose self.layers is a Sequential from ids [B,T] to logits [B,T,V], with
-- self.vocab and self.context.  Its last item, as nn.Head does, may have loss(x, batch).
lm.LM = Module.class "LM"

local function check_ids(self, ids)
  if type(ids) ~= "table" or not ids.is_tensor then
    c.fail('model: token ids are a %s; give a tensor, such as pg.tensor({ { 72, 105 } }, "i32")', type(ids))
  end
  if #ids.shape ~= 2 then c.fail("model: token ids are %s; they must be [batch,tokens]", ids:describe()) end
  if ids.shape[2] > self.context then
    c.fail("model: a sequence of %d tokens, the model's context is %d", ids.shape[2], self.context)
  end
end

-- What a first item of one's own gives, [B,T,..] whole on every rank -> this rank's rows, where it works on those.
-- The gradient is that of these rows alone, as for all that is not cut (params.sums).
local function enter_rows(x)
  local own = rows.own "model"
  if not own or #x.shape < 3 or x.shape[1] ~= own[1] or x.shape[2] ~= own[2] then return x end
  local width = x.count / (own[1] * own[2])
  return reduce.slice(reduce.reshape(x, { own[1] * own[2], width }), 1, own.first + 1, own.count)
end

-- What a last item of one's own gives, a row for each of this rank's rows -> [B,T,..] on all ranks.
local function leave_rows(x)
  local own = rows.own "model"
  if not own or #x.shape ~= 2 or x.shape[1] ~= own.count then return x end
  return reduce.reshape(comm.join_rows(x, mesh.tp), { own[1], own[2], x.shape[2] })
end

local function run(list, x, first, last)
  if first > last then return x end
  if first > 1 then return list:run(x, first, last) end
  return list:run(enter_rows(list:run(x, 1, 1)), 2, last)
end

-- Does the last item compute the loss of what it would return?  One with a forward of its own has a say in it.
local function has_loss(item)
  return item.loss ~= nil and (item.loss ~= lm.Head.loss or item.forward == lm.Head.forward)
end

local function last_loss(list, x, batch)
  return list:at(#list.items, x, function(item, h) return item:loss(h, batch) end)
end

--- model:part(x, batch, first, last) -> items first to last of its layers on x; x is nil where first is 1: the
-- batch's tokens.  Where last is the last item and the batch has targets: loss, valid, as share of the step's mean
-- (batch.step) or mean of the batch.
function lm.LM:part(x, batch, first, last)
  local ids, list = batch.tokens, self.layers
  check_ids(self, ids)
  rows.enter(ids.shape[1], ids.shape[2])
  x = x or ids
  local n = #list.items
  if last < n then return scope.light(run, list, x, first, last) end
  if batch.targets and has_loss(list.items[n]) then
    x = scope.light(run, list, x, first, n - 1)
    return scope.light(last_loss, list, x, batch)
  end
  x = leave_rows(scope.light(run, list, x, first, n))
  if not batch.targets then return x end
  return loss_ops.cross_entropy(x, batch.targets, { ignore = batch.ignore, step = batch.step })
end

function lm.LM:forward(ids) return self:part(nil, { tokens = ids }, 1, #self.layers.items) end

-- Where somebody's own forward has a say, the loss is that of what it returns.
local function local_loss(self, batch)
  local list = self.layers
  if list and list.items and self.forward == lm.LM.forward and list.forward == layers.Sequential.forward then
    return self:part(nil, batch, 1, #list.items)
  end
  return loss_ops.cross_entropy(self:forward(batch.tokens), batch.targets,
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
