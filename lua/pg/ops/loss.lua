-- ops/loss.lua: softmax, embedding, cross-entropy; choosing ids: argmax and sampling.
local c = require "pg.c"
local Tensor = require "pg.tensor"
local tape = require "pg.tape"
local done = require("pg.watch").done
local C = c.C

local ops = {}

local SOFTMAX = { name = "softmax", grad_input = function(r, dy, d, add)
  c.check(C.pg_softmax_grad(d[1].raw, dy.raw, r.saved[1].raw, r.a.log, add[1]))
end }

local function softmax(name, log)
  local attributes = { log = log }
  return function(x)
    local y = Tensor.like(x)
    done(name, C.pg_softmax(y.raw, x:alive().raw, log), y)
    if tape.wants(x) then tape.record(SOFTMAX, { x }, 1, { y }, 1, y, attributes) end
    return y
  end
end

--- softmax(x), log_softmax(x) -> y like x, over the last dim.
ops.softmax, ops.log_softmax = softmax("softmax", 0), softmax("log_softmax", 1)

local EMBEDDING = { name = "embedding", weights = { [1] = true }, mixed = true,
  grad_input = function() end,
  grad_weight = function(r, dy, d, add)
    c.check(C.pg_embedding_grad(d[1].raw, dy.raw, r.saved[1].raw, r.a.first, r.a.vocab, add[1]))
  end }

--- embedding(table, ids, o) -> y [..,D].  table [R,D]; ids i32 or i64, each in [0,o.vocab), by default [0,R).
-- A table that is a part of the vocabulary's holds the rows of ids from o.first (0) on: ids of other rows give zeros,
-- so that the results of all parts are addends of the whole; rows past the vocabulary are padding.
function ops.embedding(table, ids, o)
  o = c.keys(o or {}, { "first", "vocab" }, "embedding")
  local a = { first = o.first or 0, vocab = o.vocab or 0 }
  local shape = { unpack(ids.shape) }
  shape[#shape + 1] = table.shape[2]
  local y = Tensor.empty(shape, table.dtype)
  done("embedding", C.pg_embedding(y.raw, table:alive().raw, ids:alive().raw, a.first, a.vocab), y)
  if tape.wants(table) then tape.record(EMBEDDING, { table }, 1, { ids }, 1, y, a) end
  return y
end

local function loss_rule(per_row)
  return { name = "cross_entropy", grad_input = function(r, dy, d, add)
    local s, out = r.saved, nil
    if not per_row then out = r.saved[4].raw end -- says that dy is one number: of the mean
    c.check(C.pg_cross_entropy_grad(d[1].raw, dy.raw, s[1].raw, s[2].raw, s[3].raw, out, r.a.ignore,
                                    s[5] and s[5].raw or nil, add[1]))
  end }
end
local MEAN, ROWS = loss_rule(false), loss_rule(true)

--- cross_entropy(logits, targets, o) -> loss, valid.  logits [..,V], targets [..] i32 or i64.
-- Targets equal to o.ignore (-100) do not count.  o.reduction "mean" (over valid targets; 0 where
-- there are none) or "none" (a loss for each row).  With o.step, a step block, the mean is over the
-- valid targets of the whole step: the sum times step[INV_TOKENS].  valid: a tensor of one number.
-- o.in_place: the gradient is written over the logits (those of a leaf stay), which nobody may read after the loss.
function ops.cross_entropy(logits, targets, o)
  o = o or {}
  local reduction = o.reduction or "mean"
  if reduction ~= "mean" and reduction ~= "none" then
    c.fail('cross_entropy: reduction is "%s"; "mean" or "none"', tostring(reduction))
  end
  local stat = logits.dtype == "f64" and "f64" or "f32"
  local n = targets.count
  local out, lse = Tensor.empty({ 2 }, stat), Tensor.empty({ n }, stat)
  local rows = reduction == "none" and Tensor.empty(targets.shape, stat) or nil
  local ignore = o.ignore or c.IGNORE
  done("cross_entropy", C.pg_cross_entropy(out.raw, rows and rows.raw, lse.raw, logits:alive().raw,
       targets:alive().raw, ignore, o.step and o.step.raw), out)
  local y = rows or out:view({ 1 })
  if tape.wants(logits) then
    tape.record(rows and ROWS or MEAN, { logits }, 1, { logits, targets, lse, out, o.step or false }, 5, y,
                { ignore = ignore, in_place = o.in_place and 1 or nil })
  end
  return y, out:view({ 1 }, 1)
end

--- argmax(x) -> ids i32 [..], over the last dim; the first of equals.
function ops.argmax(x)
  local shape = { unpack(x.shape, 1, #x.shape - 1) }
  local ids = Tensor.empty(shape, "i32")
  return done("argmax", C.pg_argmax(ids.raw, x:alive().raw), ids)
end

--- sample(logits, o) -> ids i32 [N].  logits [N,V]; o.temperature (1; 0 = argmax), o.top_k (0 = all),
-- o.top_p (1 = all), o.seed, o.first (index of the first draw in the stream).
function ops.sample(logits, o)
  o = o or {}
  local ids = Tensor.empty({ logits.shape[1] }, "i32")
  local seed = c.ffi.cast("uint64_t", c.int64(o.seed or 0, "sample: seed"))
  return done("sample", C.pg_sample(ids.raw, logits:alive().raw, o.temperature or 1, o.top_k or 0, o.top_p or 1,
                                    seed, c.hash "sample", o.first or 0), ids)
end

return ops
