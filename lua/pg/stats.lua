-- stats.lua: what a tensor's numbers are like, for people: t:stats() prints one line.  Runs on the device, in
-- pieces of a fixed size and in double, so that a large tensor costs no memory; only a sample comes to the host, and
-- pieces in which some number is not finite.
local c = require "pg.c"
local Tensor = require "pg.tensor"
local watch = require "pg.watch"
local C = c.C

local PIECE = 2^20           -- numbers taken at a time
local SAMPLES, RUN = 64, 256 -- the histogram looks at so many runs of numbers, of this length
local BINS = 24
local BARS = { "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█" }

local Stats = {}
Stats.__index = Stats

local function finite(x) return x == x and x ~= math.huge and x ~= -math.huge end

-- f(piece) for the numbers from `first` on, as f64; the piece dies with the call.
local function with_piece(t, first, n, f)
  local view = t:view({ n }, first)
  local piece = Tensor.empty({ n }, "f64"):copy_from(view)
  view:free()
  local out = f(piece)
  piece:free()
  return out
end

local function reduce(x, kind)
  local y = Tensor.empty({ 1 }, "f64")
  c.check(C.pg_reduce(y.raw, x.raw, kind, -1, 0))
  local value = y:item()
  y:free()
  return value
end

-- The finite numbers of a piece in which others are, as a tensor; nil where none is.
local function only_finite(piece)
  local kept = {}
  for _, x in ipairs(piece:totable()) do if finite(x) then kept[#kept + 1] = x end end
  return kept[1] and Tensor.from(kept, "f64") or nil
end

-- f(x) for every piece, x its finite numbers -> how many are not finite.
local function each_piece(t, f)
  local bad = 0
  for first = 0, t.count - 1, PIECE do
    bad = bad + with_piece(t, first, math.min(PIECE, t.count - first), function(piece)
      local some = Tensor.floating[t.dtype] and watch.nonfinite(piece) or 0
      local x = some > 0 and only_finite(piece) or some == 0 and piece
      if x then f(x) end
      if x and x ~= piece then x:free() end
      return some
    end)
  end
  return bad
end

local function squares_from(x, mean)
  local m, y = Tensor.full({ 1 }, mean, "f64"), Tensor.like(x)
  c.check(C.pg_binary(y.raw, x.raw, m.raw, C.PG_SUB, 0))
  local z = Tensor.like(x)
  c.check(C.pg_unary(z.raw, y.raw, C.PG_SQUARE))
  local sum = reduce(z, C.PG_SUM)
  m:free()
  y:free()
  z:free()
  return sum
end

-- Counts of a sample between min and max.
local function histogram(t, s)
  local bins = {}
  for i = 1, BINS do bins[i] = 0 end
  local step = math.max(RUN, math.floor(t.count / SAMPLES))
  for first = 0, t.count - 1, step do
    for _, x in ipairs(with_piece(t, first, math.min(RUN, t.count - first), Tensor.totable)) do
      if finite(x) then
        local at = s.max > s.min and math.floor((x - s.min) / (s.max - s.min) * BINS) or BINS / 2
        at = math.max(1, math.min(BINS, at + 1))
        bins[at] = bins[at] + 1
      end
    end
  end
  return bins
end

-- A bar a bin; a bin with a few numbers differs from an empty one.
local function bars(bins)
  local most, text = 1, {}
  for _, n in ipairs(bins) do most = math.max(most, n) end
  for i, n in ipairs(bins) do
    text[i] = n == 0 and " " or BARS[math.max(1, math.ceil(n / most * #BARS))]
  end
  return table.concat(text)
end

function Stats:__tostring()
  local head = ("[%s] %s"):format(table.concat(self.shape, ","), self.dtype)
  if self.count == 0 then return head .. "  empty" end
  local bad = self.nonfinite > 0 and ("  NOT FINITE %.0f"):format(self.nonfinite) or ""
  if not self.mean then return head .. bad end
  return ("%s  mean %.4g  std %.4g  min %.4g  max %.4g%s  |%s|"):format(head, self.mean, self.std, self.min, self.max,
                                                                      bad, bars(self.histogram))
end

local stats = {}

--- stats.of(t), t:stats() -> { shape, dtype, count, mean, std, min, max, nonfinite, histogram }, which prints as a
-- line.  Numbers that are not finite are counted and left out of the rest; std divides by the count; the histogram (24
-- bins from min to max) is of a sample.  Any dtype, in double.
function stats.of(t)
  if type(t) ~= "table" or not t.is_tensor then c.fail("stats: a tensor is wanted, got %s", type(t)) end
  t:alive()
  local s = setmetatable({ shape = t.shape, dtype = t.dtype, count = t.count, nonfinite = 0 }, Stats)
  if t.count == 0 then return s end
  local sum, n, low, high = 0, 0, math.huge, -math.huge
  s.nonfinite = each_piece(t, function(x)
    sum, n = sum + reduce(x, C.PG_SUM), n + x.count
    low, high = math.min(low, reduce(x, C.PG_RMIN)), math.max(high, reduce(x, C.PG_RMAX))
  end)
  if n == 0 then return s end
  s.mean, s.min, s.max = sum / n, low, high
  local squares = 0
  each_piece(t, function(x) squares = squares + squares_from(x, s.mean) end)
  s.std = math.sqrt(squares / n)
  s.histogram = histogram(t, s)
  return s
end

return stats
