-- ranks: 3
-- A head whose vocabulary is cut over three ranks, unevenly and padded, gives the loss and the gradients of one
-- process that has all of it.
local axis = pg.mesh.build({ tp = 3, dp = 1, pp = 1 }).tp
local check = require "tests.check"
local V, D, COLUMNS = 11, 5, 5
local targets = pg.tensor({ { 3, -7, 10, 0 }, { 4, 5, -7, 9 } }, "i32")

local function leaf(shape, key, dtype)
  local t = pg.randn(shape, { key = key, dtype = "f32" }):to(dtype)
  t.requires_grad = true
  return t
end

local function close(got, want, what, tolerance)
  local e = check.error(got, want) -- infinite where a number is none
  if e > tolerance then error(("rank %d: %s is off by %.3g"):format(axis.rank, what, e), 2) end
end

-- Rows [first, first + valid) of w, with rows of large numbers behind them up to COLUMNS.
local function part_of(w, first, valid)
  local padding = pg.full({ COLUMNS - valid, D }, 1e3, w.dtype)
  local rows = pg.concat({ pg.slice(w:detach(), 1, first + 1, valid), padding }, 1)
  rows.requires_grad = true
  return rows
end

local cuts = { { 4, 4, 3 }, { 5, 1, 5 }, { 5, 5, 1 } }
local function compare(widths, o, dtype, tolerance)
  local x, w = leaf({ 2, 4, D }, "x", dtype), leaf({ V, D }, "w", dtype)
  local want, wants = pg.cross_entropy(pg.linear(x, w), targets, { ignore = -7, step = o.step })
  want:backward()

  local first = 0
  for r = 1, axis.rank do first = first + widths[r] end
  local valid = widths[axis.rank + 1]
  local mine, x2 = part_of(w, first, valid), leaf({ 2, 4, D }, "x", dtype)
  local loss, count = pg.head_loss(x2, mine, targets, { axis = axis, first = first, valid = valid, vocab = V,
                                                        ignore = -7, step = o.step, chunk = o.chunk })
  close(loss, want, "loss", tolerance)
  assert(count:item() == 6 and wants:item() == 6)
  local all = loss:clone()
  axis:all_reduce(all, "max")
  assert(all:item() == loss:item(), "the ranks have different losses")
  loss:backward()
  axis:all_reduce(x2.grad)
  close(x2.grad, x.grad, "gradient of x", tolerance)
  local dw = mine.grad:totable()
  close(mine.grad:view { valid, D }, w.grad:view({ valid, D }, first * D), "gradient of w", tolerance)
  for i = valid * D + 1, #dw do assert(dw[i] == 0, "a row of padding has a gradient") end
end

pg.step.block()
pg.step.set { INV_TOKENS = 0.04 }
for _, widths in ipairs(cuts) do
  for _, chunk in ipairs { 0, 1, 3, 8 } do
    compare(widths, { chunk = chunk }, "f32", check.f32)
    compare(widths, { chunk = chunk, step = pg.step.block() }, "f64", check.double)
  end
end

-- A target outside the whole is refused on every rank, at the same place.
check.throws(function()
  pg.vocab_cross_entropy(pg.randn { 2, 4 }, pg.tensor({ 3, 11 }, "i32"),
                         { axis = axis, first = 4 * axis.rank, valid = axis.rank == 2 and 3 or 4, vocab = V })
end, "target 11 at row 0, column 1 is outside the vocabulary [0,11)")
pg.barrier()
