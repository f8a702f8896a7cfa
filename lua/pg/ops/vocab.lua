-- ops/vocab.lua: losses over vocabularies too large for one tensor of logits: cut by columns over the ranks of an
-- axis, or worked through by chunks of rows.  In both a row leaves two numbers behind, the log of its sum of
-- exponentials and the target's logit (pg_vocab_stats); those of all ranks and chunks join to the loss.
local c = require "pg.c"
local Tensor = require "pg.tensor"
local gemm = require "pg.gemm"
local loss = require "pg.ops.loss"
local matmul = require "pg.ops.matmul"
local scope = require "pg.scope"
local tape = require "pg.tape"
local done = require("pg.watch").done
local C = c.C

local ops = {}

-- Which ids a rank's `columns` columns are; whole: all there are, in one place.
local function part_of(o, columns, name)
  local size = o.axis and o.axis.size or 1
  local first, valid = o.first or 0, o.valid or columns
  if size > 1 and not (o.first and o.vocab) then
    c.fail("%s: the vocabulary is cut over %d ranks; first and vocab must say which ids are here, of how many",
           name, size)
  end
  local vocab = o.vocab or first + valid
  return { axis = o.axis, size = size, first = first, valid = valid, vocab = vocab, ignore = o.ignore or c.IGNORE,
           step = o.step, whole = size == 1 and first == 0 and valid == columns and vocab == columns }
end

-- Loss and lse of all rows: this rank's stats [2,N] beside those of the others.
local function join(name, stats, targets, part)
  local n, kept = stats.shape[2], stats.dtype
  local parts
  if part.size == 1 then parts = stats:view { 1, 2, n }
  else
    parts = Tensor.empty({ part.size, 2, n }, kept)
    part.axis:all_gather(parts, stats)
  end
  local out, lse = Tensor.empty({ 2 }, kept), Tensor.empty({ n }, kept)
  done(name, C.pg_vocab_loss(out.raw, nil, lse.raw, parts.raw, targets.raw, part.ignore, part.step and part.step.raw),
       out)
  parts:release()
  return out, lse
end

local function kept_dtype(x) return x.dtype == "f64" and "f64" or "f32" end

local function stats_of(name, stats, logits, targets, part)
  done(name, C.pg_vocab_stats(stats.raw, logits:alive().raw, targets:alive().raw, part.first, part.valid, part.vocab,
                              part.ignore), stats)
end

-- dlogits (logits themselves, or apart from them) from the kept numbers of a loss.
local function grad_into(dlogits, dy, logits, targets, lse, out, step, a, add)
  c.check(C.pg_vocab_grad(dlogits.raw, dy.raw, logits.raw, targets.raw, lse.raw, out.raw, a.first, a.valid, a.ignore,
                          step and step.raw or nil, add))
end

local VOCAB = { name = "vocab_cross_entropy", grad_input = function(r, dy, d, add)
  local logits, targets, lse, out, step = unpack(r.saved, 1, 5)
  grad_into(d[1], dy, logits, targets, lse, out, step, r.a, add[1])
end }

--- vocab_cross_entropy(logits, targets, o) -> loss, valid, as cross_entropy gives them, the same on all ranks of
-- o.axis.  This rank's logits [..,Vl] are those of ids [o.first, o.first + o.valid) of o.vocab; columns from o.valid
-- on are padding.  targets: ids of the whole.  o.ignore, o.step, o.in_place as in cross_entropy.
-- One all-gather of 8 bytes a row; the gradient needs none.
function ops.vocab_cross_entropy(logits, targets, o)
  o = c.keys(o or {}, { "axis", "first", "valid", "vocab", "ignore", "step", "in_place" }, "vocab_cross_entropy")
  local part = part_of(o, logits.shape[#logits.shape] or 0, "vocab_cross_entropy")
  if part.whole then
    return loss.cross_entropy(logits, targets, { ignore = o.ignore, step = o.step, in_place = o.in_place })
  end
  local stats = Tensor.empty({ 2, targets.count }, kept_dtype(logits))
  stats_of("vocab_cross_entropy", stats, logits, targets, part)
  local out, lse = join("vocab_cross_entropy", stats, targets, part)
  local y = out:view { 1 }
  if tape.wants(logits) then
    tape.record(VOCAB, { logits }, 1, { logits, targets, lse, out, o.step or false }, 5, y,
                { first = part.first, valid = part.valid, ignore = part.ignore, in_place = o.in_place and 1 or nil })
  end
  return y, out:view({ 1 }, 1)
end

-- The head ----------------------------------------------------------------------------------------

-- Bytes of logits that are held at once rather than computed again in backward, and those of a chunk.
local HELD, CHUNK = 2^30, 2^28

local function chunk_rows(chunk, rows, columns, dtype)
  if chunk then return chunk == 0 and rows or math.min(c.within(chunk, "head_loss: chunk", 0), rows) end
  local row = columns * Tensor.sizes[dtype]
  if rows * row <= HELD then return rows end
  local n = math.floor(CHUNK / row)
  return math.max(n - n % 128, 1)
end

local function product(name, out, a, b, ta, tb, beta)
  done(name, C.pg_matmul(out.raw, a.raw, b.raw, gemm.options(ta, tb, 1, beta)), out)
end

-- f(first, x, logits, targets) for each chunk of rows: its logits, in one buffer for all, and views of its rows.
local function each_chunk(name, x, w, targets, chunk, f)
  local columns, width = unpack(w.shape)
  local buffer = Tensor.empty({ chunk, columns }, x.dtype)
  for first = 0, targets.count - 1, chunk do
    local n = math.min(chunk, targets.count - first)
    local views = { x:view({ n, width }, first * width), buffer:view { n, columns }, targets:view({ n }, first) }
    product(name, views[2], views[1], w, false, true)
    f(first, unpack(views))
    for i = 1, 3 do views[i]:release() end
  end
  buffer:release()
end

-- Both gradients in one go: the logits of a chunk exist once.
local HEAD = { name = "head_loss", mixed = true, grad_input = function(r, dy, d, add)
  local x, w, targets, lse, out, step = unpack(r.saved, 1, 6)
  each_chunk("gradient of head_loss", x, w, targets, r.a.chunk, function(first, x_n, logits, targets_n)
    local n, width = unpack(x_n.shape)
    local lse_n = lse:view({ n }, first)
    grad_into(logits, dy, logits, targets_n, lse_n, out, step, r.a, 0)
    lse_n:release()
    if d[1] then
      local dx_n = d[1]:view({ n, width }, first * width)
      product("head_loss", dx_n, logits, w, false, false, add[1])
      dx_n:release()
    end
    if d[2] then product("head_loss", d[2], logits, x_n, true, false, first > 0 and 1 or add[2]) end
  end)
end }

local function head_shapes(x, w, targets)
  if #w.shape ~= 2 or #x.shape < 1 or x.shape[#x.shape] ~= w.shape[2] then
    c.fail("head_loss: x is %s, w is %s; x must be [..,D], w [V,D]", x:describe(), w:describe())
  end
  if x.count ~= targets.count * w.shape[2] then
    c.fail("head_loss: x is %s, targets are %s; each row needs one target", x:describe(), targets:describe())
  end
end

local function held(x, w, targets, o)
  local settings = { in_place = true }
  for k, v in pairs(o) do if k ~= "chunk" then settings[k] = v end end
  return ops.vocab_cross_entropy(matmul.linear(x, w), targets, settings)
end

local function chunked(x, w, targets, o, chunk)
  local part = part_of(o, w.shape[1], "head_loss")
  local kept, n = kept_dtype(x), targets.count
  local stats = Tensor.empty({ 2, n }, kept)
  each_chunk("head_loss", x:alive(), w:alive(), targets, chunk, function(first, _, logits, targets_n)
    local mine = Tensor.empty({ 2, targets_n.count }, kept)
    stats_of("head_loss", mine, logits, targets_n, part)
    c.check(C.pg_place(stats.raw, mine.raw, 1, first, 0))
    mine:release()
  end)
  local out, lse = join("head_loss", stats, targets, part)
  local y = out:view { 1 }
  if tape.wants(x, w) then
    tape.record(HEAD, { x, w }, 2, { x, w, targets, lse, out, o.step or false }, 6, y,
                { chunk = chunk, first = part.first, valid = part.valid, ignore = part.ignore })
  end
  return y, out:view({ 1 }, 1)
end

--- head_loss(x, w, targets, o) -> loss, valid: cross_entropy of linear(x, w), x [..,D], w [V,D], without ever holding
-- all logits.  o.chunk: rows whose logits exist at a time; 0: all.  By default all rows where their logits take at
-- most 1 GiB, else chunks of 256 MiB, whose logits are computed again in backward: a third more work for the head.
-- The rest of o as in vocab_cross_entropy (w then holds this rank's rows, and x is the same on all ranks of o.axis).
function ops.head_loss(x, w, targets, o)
  o = c.keys(o or {}, { "axis", "first", "valid", "vocab", "ignore", "step", "chunk" }, "head_loss")
  head_shapes(x, w, targets)
  local chunk = chunk_rows(o.chunk, targets.count, w.shape[1], x.dtype)
  if chunk >= targets.count then return scope.light(held, x, w, targets, o) end
  return scope.light(chunked, x, w, targets, o, chunk)
end

return ops
