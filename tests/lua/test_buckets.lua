-- test_buckets.lua: which parameters share a segment: small neighbours packed, large items cut, none across a border.
local check = require "tests.check"
local buckets = require "pg.buckets"
local nn = pg.nn
local equal = check.equal
local tests = {}
local KIB = 1 / 1024 -- MiB
local kin = {}

-- Groups from { name, kin, count, count, ... }, counts of parameters of 4 bytes.
local function groups_of(list)
  local groups = {}
  for i, entry in ipairs(list) do
    local g = { name = entry[1], kin = entry[2] or nil, list = {} }
    for k = 3, #entry do g.list[k - 2] = { count = entry[k] } end
    groups[i] = g
  end
  return groups
end

-- "a to b: 1 2 3", a text for each segment.
local function told(list, size, bytes)
  local out = {}
  for i, s in ipairs(buckets.share(groups_of(list), size, bytes or 4)) do
    local words = { s.name .. ":" }
    for _, p in ipairs(s.list) do words[#words + 1] = tostring(p.count) end
    out[i] = table.concat(words, " ")
  end
  return out
end

function tests.test_small_neighbours_are_packed_from_the_end()
  local list = { { "a", kin, 100 }, { "b", kin, 60, 40 }, { "c", kin, 100 }, { "d", kin, 36 } }
  equal(told(list, KIB), { "a: 100", "b to d: 60 40 100 36" })
  local half = { "a: 100", "b: 60 40", "c to d: 100 36" } -- 136 numbers for 128: a sixteenth more
  equal(told(list, KIB / 2), half)
  equal(told(list, KIB, 8), half)
  list[4][3] = 37
  equal(told(list, KIB / 2), { "a: 100", "b: 60 40", "c: 100", "d: 37" })
  equal(told(list, 1), { "a to d: 100 60 40 100 37" })
  equal(told({}, 1), {})
end

function tests.test_large_ones_are_cut_between_tensors()
  local list = { { "a", kin, 8 }, { "b", kin, 4, 256, 4, 500, 128 }, { "c", kin, 8 } }
  equal(told(list, KIB), { "a: 8", "b (1 of 3): 4 256 4", "b (2 of 3): 500", "b (3 of 3): 128", "c: 8" })
  equal(told({ { "rest", nil, 100, 100, 100 } }, KIB), { "rest (1 of 2): 100", "rest (2 of 2): 100 100" })
end

function tests.test_each_tensor_for_itself()
  equal(told({ { "a", kin, 8 }, { "b", kin, 4, 5 } }, 0), { "a: 8", "b (1 of 2): 4", "b (2 of 2): 5" })
end

function tests.test_nothing_is_packed_across_a_border()
  equal(told({ { "a", kin, 8 }, { "b", {}, 8 }, { "c", kin, 8 }, { "d", false, 8 }, { "e", false, 8 } }, 1),
        { "a: 8", "b: 8", "c: 8", "d: 8", "e: 8" })
end

function tests.test_a_size_is_a_number_of_mebibytes()
  for _, size in ipairs { -1, 0 / 0, "8", true } do
    check.throws(function() told({ { "a", kin, 8 } }, size) end, "a number of MiB is wanted, 0 or more")
  end
  equal(told({ { "a", kin, 8 }, { "b", kin, 8 } }, math.huge), { "a to b: 8 8" })
end

-- ---- a model's items ----

local function linear() return nn.Linear { inputs = 4, outputs = 4 } end

local function names(module, o)
  local out = {}
  for i, s in ipairs(pg.build(module, o).segments) do out[i] = s.name end
  return out
end

-- Items a to f and, between c and d, one that has an inner Sequential and a weight beside it.
local Nest = nn.class "Nest"
function Nest:init()
  self.bias = self:param("bias", { 4 })
  self.inner = self:add("inner", nn.Sequential { { "x", linear() }, { "y", linear() } })
end
local Whole = nn.class "Whole"
function Whole:init()
  local items = {}
  for i, name in ipairs { "a", "b", "c", "nest", "d", "e", "f" } do
    items[i] = { name, name == "nest" and Nest() or linear() }
  end
  self.layers, self.gain = self:add("", nn.Sequential(items)), self:param("gain", { 4 })
end

function tests.test_items_of_one_sequential_are_packed()
  equal(names(Whole()), { "rest", "a to nest", "nest.inner.x to nest.inner.y", "d to f" })
  equal(names(Whole(), { bucket = 0 }),
        { "rest", "a", "b", "c", "nest", "nest.inner.x", "nest.inner.y", "d", "e", "f" })
end

function tests.test_what_another_rank_holds_is_a_border()
  local model = Whole()
  model.layers.children[2].absent = true
  equal(names(model), { "rest", "a", "c to nest", "nest.inner.x to nest.inner.y", "d to f" })
end

function tests.test_items_that_name_a_segment_share_it()
  local function model()
    return nn.Sequential { { "a", linear(), "odd" }, { "b", linear() }, { "c", linear(), "odd" } }
  end
  equal(names(model()), { "odd to b" })
  equal(names(model(), { bucket = 0 }), { "odd (1 of 2)", "odd (2 of 2)", "b" })
end

function tests.test_numbers_do_not_depend_on_it()
  local want = pg.build(require "models.llama" { blocks = 2, width = 8, heads = 2, vocab = 11, context = 4 })
  for _, size in ipairs { 0, KIB, 4 * KIB } do
    local got = pg.build(require "models.llama" { blocks = 2, width = 8, heads = 2, vocab = 11, context = 4 },
                         { bucket = size })
    check.is_true(#got.segments > #want.segments)
    local other = got:named()
    for i, entry in ipairs(want:named()) do
      equal(other[i].name, entry.name)
      check.close(other[i].parameter, entry.parameter, 0)
    end
  end
end

check.run(tests)
