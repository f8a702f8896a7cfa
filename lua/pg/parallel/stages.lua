-- parallel/stages.lua: which blocks lie in which chunk of a pipeline: a list of items, each with a cost, cut into
-- neighbouring runs, one for each chunk (stages * chunks a stage; chunk c sits on stage c % stages).
local c = require "pg.c"
local describe = require "pg.describe"

local stages = {}

-- Sums of the first i costs, from [0] on.
local function sums(costs)
  local out = { [0] = 0 }
  for i, x in ipairs(costs) do
    local wants = describe.fault(x, { "number", low = 0 })
    if wants then c.fail("stages: the cost of item %d is %s; it must be %s", i, describe.show(x), wants) end
    out[i] = out[i - 1] + x
  end
  return out
end

-- The best way to cut items 1..n into k runs.  add(total, cost of a run) -> total, a sum to be made small; runs that
-- cost more than `most` are not looked at.  Bellman's recursion over (runs, items); time O(k n^2), fewer where
-- `most` binds.  Of equal ways it takes the one whose first runs are smallest: those stages keep the most
-- micro-batches alive.
local function best(sum, n, k, add, most)
  local total, from = { [0] = { [0] = 0 } }, {}
  for runs = 1, k do
    total[runs], from[runs] = {}, {}
    for i = runs, n - (k - runs) do
      local least = math.huge
      for j = i - 1, runs - 1, -1 do -- the last run is j + 1 .. i
        local cost = sum[i] - sum[j]
        if cost > most then break end
        local before = total[runs - 1][j]
        local t = before and add(before, cost) or math.huge
        if t <= least and t < math.huge then least, from[runs][i] = t, j end
      end
      total[runs][i] = least < math.huge and least or nil
    end
  end
  return total[k][n], from
end

local function check_counts(counts, n, chunks)
  if type(counts) ~= "table" then c.fail("stages: the counts are %s; a list is wanted", describe.show(counts)) end
  if #counts ~= chunks then
    c.fail("stages: %s has %d counts for %d chunks; give each chunk one", describe.show(counts), #counts, chunks)
  end
  local sum, out = 0, {}
  for i, count in ipairs(counts) do
    local wants = describe.fault(count, { "integer", low = 1 })
    if wants then c.fail("stages: the count of chunk %d is %s; it must be %s", i - 1, describe.show(count), wants) end
    out[i] = { sum + 1, sum + count }
    sum = sum + count
  end
  if sum ~= n then
    c.fail("stages: %s makes %d items, there are %d; take %d %s", describe.show(counts), sum, n, math.abs(sum - n),
           sum > n and "away" or "more")
  end
  return out
end

--- stages.cut(costs, chunks, counts) -> { { first, last }, ... }: the items of each chunk, counted from 1.
-- costs: a number of at least 0 for each item, such as its parameters or its seconds;
-- counts: how many items each chunk takes, as the user wants them; without, the largest chunk is as cheap as can be,
-- and among such cuts the chunks are as even as can be (least sum of squares).  Raises where there are fewer items
-- than chunks, or the counts do not fit.
function stages.cut(costs, chunks, counts)
  if type(costs) ~= "table" then c.fail("stages: the costs are %s; a list is wanted", describe.show(costs)) end
  local n = #costs
  c.within(chunks, "stages: chunks", 1)
  if n < chunks then
    c.fail("stages: %d item%s for %d chunks, each wants at least one; nearest: %s%d items", n, n == 1 and "" or "s",
           chunks, n > 0 and ("%d chunk%s, or "):format(n, n == 1 and "" or "s") or "", chunks)
  end
  local sum = sums(costs)
  if counts then return check_counts(counts, n, chunks) end
  local most = best(sum, n, chunks, math.max, math.huge)
  local _, from = best(sum, n, chunks, function(total, cost) return total + cost * cost end, most)
  local out, last = {}, n
  for runs = chunks, 1, -1 do
    out[runs] = { from[runs][last] + 1, last }
    last = from[runs][last]
  end
  return out
end

return stages
