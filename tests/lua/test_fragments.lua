-- test_fragments.lua: every number of a whole tensor is saved by one rank, from where it lies.
local c = require "pg.c"
local check = require "tests.check"
local fragments = require "pg.fragments"
local tests = {}

local function piece(o)
  o.name, o.first, o.start, o.copies = o.name or "w", o.first or 0, o.start or 0, o.copies or 1
  o.whole = o.whole or o.shape
  return o
end

-- A segment of single-piece parameters, end to end.
local function segment(pieces)
  local params, offset = {}, 0
  for i, p in ipairs(pieces) do
    params[i] = { offset = offset, pieces = { p }, stages = p.stages }
    offset = offset + c.product(p.shape)
  end
  return { params = params, count = offset, first = 0, size = offset }
end

-- The elements of the whole tensor that a fragment's numbers are, in their order.
local function elements(f)
  local list = {}
  for k = f.from, f.from + f.count - 1 do
    list[#list + 1] = f.first + (f.cols == 0 and k or math.floor(k / f.cols) * f.stride + k % f.cols)
  end
  return list
end

local home = { pp = 0, tp = 0 }

function tests.test_block_of_each_cut()
  local function block(o) return { fragments.block(piece(o)) } end
  check.equal(block { shape = { 3, 4 } }, { 0, 0, 0 })
  check.equal(block { shape = { 3, 4 }, whole = { 9, 4 }, dim = 1, start = 6 }, { 24, 0, 0 })
  check.equal(block { shape = { 5 }, whole = { 10 }, dim = 1, start = 5 }, { 5, 0, 0 })
  check.equal(block { shape = { 3, 2 }, whole = { 3, 8 }, dim = 2, start = 4 }, { 4, 2, 8 })
  check.equal(block { shape = { 2, 3, 5 }, whole = { 2, 6, 5 }, dim = 2, start = 3 }, { 15, 15, 30 })
  check.equal(block { shape = { 2, 3, 5 }, whole = { 2, 3, 10 }, dim = 3, start = 5 }, { 5, 5, 10 })
end

function tests.test_a_window_begins_and_ends_within_rows()
  local s = segment { piece { shape = { 7 } }, piece { shape = { 2, 3 }, whole = { 2, 6 }, dim = 2, start = 3 } }
  local list = fragments.of(s, home, 5, 6)
  check.equal(#list, 2)
  check.equal({ list[1].at, list[1].count, list[1].from }, { 5, 2, 5 })
  check.equal(elements(list[1]), { 5, 6 })
  check.equal({ list[2].at, list[2].count, list[2].from }, { 7, 4, 0 })
  check.equal(elements(list[2]), { 3, 4, 5, 9 })
  check.equal(elements(fragments.within(list[2], 9, 100)), { 5, 9 })
  check.equal(fragments.within(list[2], 0, 7), nil)
  check.equal(#fragments.of(s, home, 13, 0), 0)
end

function tests.test_a_tensor_without_elements_is_listed_and_padding_is_not()
  local list = fragments.of(segment { piece { name = "none", shape = { 0, 3 } },
                                      piece { shape = { 0, 3 }, whole = { 5, 3 }, dim = 1, start = 5 } }, home, 0, 0)
  check.equal(#list, 1)
  check.equal({ list[1].name, list[1].count }, { "none", 0 })
end

-- How often each element of the whole tensor is written by all ranks of a layout.
local function written(sizes, zero, held)
  local times, whole = {}, nil
  for tp = 0, sizes.tp - 1 do
    for pp = 0, sizes.pp - 1 do
      local s = segment { piece { shape = { 4 }, name = "other" }, held(tp, pp) }
      for rank = 0, sizes.dp - 1 do
        if zero > 0 then s.first, s.size = s.count / sizes.dp * rank, s.count / sizes.dp end
        local first, size = fragments.share(s, { rank = rank, size = sizes.dp })
        for _, f in ipairs(fragments.of(s, { pp = pp, tp = tp }, s.first, s.size)) do
          local part = f.name == "w" and f.writes and fragments.within(f, first, size)
          if f.name == "w" then whole = f.whole end
          for _, e in ipairs(part and elements(part) or {}) do times[e + 1] = (times[e + 1] or 0) + 1 end
        end
      end
    end
  end
  return times, c.product(whole)
end

local function once(sizes, held)
  for zero = 0, 1 do
    local times, count = written(sizes, zero, held)
    check.equal(#times, count)
    for i = 1, count do check.equal(times[i], 1, ("element %d under zero %d"):format(i - 1, zero)) end
  end
end

function tests.test_every_number_is_saved_by_one_rank()
  once({ pp = 1, dp = 3, tp = 1 }, function() return piece { shape = { 5, 4 } } end)
  once({ pp = 1, dp = 2, tp = 4 }, function() return piece { shape = { 2, 6 } } end) -- held by all of tp
  once({ pp = 1, dp = 2, tp = 4 }, function(tp)
    return piece { shape = { 2, 6 }, whole = { 8, 6 }, dim = 1, start = 2 * tp }
  end)
  once({ pp = 1, dp = 2, tp = 4 }, function(tp)
    return piece { shape = { 4, 3 }, whole = { 4, 12 }, dim = 2, start = 3 * tp }
  end)
  once({ pp = 1, dp = 2, tp = 4 }, function(tp) -- two ranks hold the same rows
    return piece { shape = { 2, 6 }, whole = { 4, 6 }, dim = 1, start = 2 * math.floor(tp / 2), copies = 2 }
  end)
  once({ pp = 3, dp = 2, tp = 1 }, function() return piece { shape = { 5, 4 }, stages = 3 } end) -- tied
end

check.run(tests)
