-- ranks: 3
-- The changes between whole tensors, addends, rows and columns, and their gradients, against numbers written out;
-- each input is used twice, so that a gradient is both written and added to.
local check = require "tests.check"
local mesh = pg.mesh.ready()
local axis = mesh.world
local rank, size = axis.rank, axis.size

-- A tensor whose element i (0-based) is f(i).
local function made(shape, f)
  local n = 1
  for _, d in ipairs(shape) do n = n * d end
  local list = {}
  for i = 0, n - 1 do list[i + 1] = f(i) end
  return pg.tensor(list):view(shape)
end
local function expect(got, want, what) check.equal(got:totable(), want:totable(), what) end
local function total(f)
  local sum = 0
  for r = 0, size - 1 do sum = sum + f(r) end
  return sum
end

-- y = op(x); then x's gradient where y's is dy: once, and twice as much from two uses.
local function try(what, op, x, want, dy, gradient)
  x.requires_grad = true
  local y = op(x)
  expect(y, want, what)
  pg.sum(pg.mul(y, dy)):backward()
  expect(x.grad, gradient, "gradient of " .. what)
  x.grad_fresh = true
  pg.sum(pg.add(pg.mul(op(x), dy), pg.mul(op(x), dy))):backward()
  expect(x.grad, pg.scale(gradient, 2), "gradient of two " .. what)
end

local mine = function(i) return 100 * rank + i end
local function of(r, i) return 100 * r + i end

try("copy_to_ranks", function(x) return pg.copy_to_ranks(x, axis) end, made({ 2, 2 }, mine), made({ 2, 2 }, mine),
    made({ 2, 2 }, function(i) return rank + i end), made({ 2, 2 }, function(i)
      return total(function(r) return r + i end) end))
try("reduce_from_ranks", function(x) return pg.reduce_from_ranks(x, axis) end, made({ 3 }, mine),
    made({ 3 }, function(i) return total(function(r) return of(r, i) end) end), made({ 3 }, mine), made({ 3 }, mine))
try("gather_rows", function(x) return pg.gather_rows(x, axis) end, made({ 2, 2 }, mine),
    made({ 6, 2 }, function(i) return of(math.floor(i / 4), i % 4) end),
    made({ 6, 2 }, function(i) return rank * i end), -- each rank's own use
    made({ 2, 2 }, function(i) return total(function(r) return r * (4 * rank + i) end) end))
try("join_rows", function(x) return pg.join_rows(x, axis) end, made({ 2, 2 }, mine),
    made({ 6, 2 }, function(i) return of(math.floor(i / 4), i % 4) end),
    made({ 6, 2 }, function(i) return i end), -- the same on all
    made({ 2, 2 }, function(i) return 4 * rank + i end))
try("reduce_scatter_rows", function(x) return pg.reduce_scatter_rows(x, axis) end, made({ 6, 2 }, mine),
    made({ 2, 2 }, function(i) return total(function(r) return of(r, 4 * rank + i) end) end), made({ 2, 2 }, mine),
    made({ 6, 2 }, function(i) return of(math.floor(i / 4), i % 4) end))

-- Columns: whole; with 2 of 9 past the end; with a rank that has nothing but padding.
for _, columns in ipairs { 9, 7, 5 } do
  try("gather_columns", function(x) return pg.gather_columns(x, axis, columns) end, made({ 2, 1, 3 }, mine),
      made({ 2, 1, columns }, function(i)
        local column = i % columns
        return of(math.floor(column / 3), 3 * math.floor(i / columns) + column % 3)
      end),
      made({ 2, 1, columns }, function(i) return i + 1 end),
      made({ 2, 1, 3 }, function(i)
        local column = 3 * rank + i % 3
        return column < columns and columns * math.floor(i / 3) + column + 1 or 0
      end))
end

check.throws(function() pg.reduce_scatter_rows(pg.zeros { 4, 2 }, axis) end,
             "reduce_scatter_rows: [4,2] f32 has 4 rows, which 3 ranks do not divide")

-- An axis of size one gives back what it got.
local x = pg.ones { 2, 2 }
for _, name in ipairs { "copy_to_ranks", "reduce_from_ranks", "gather_rows", "join_rows", "reduce_scatter_rows",
                        "gather_columns" } do
  assert(pg[name](x, mesh.tp) == x, name)
end
pg.barrier()
