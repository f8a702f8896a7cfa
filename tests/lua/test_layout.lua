-- test_layout.lua: which layouts fit (C18, C19, C23), what is said of those that do not, and how a model is cut into
-- stages.  One process: nothing here asks another rank.
local check = require "tests.check"
local layout = require "pg.parallel.layout"
local parts = require "pg.parallel.parts"
local gpt2, llama = require "models.gpt2", require "models.llama"
local describe = require "pg.describe"
local nn = pg.nn
local tests = {}

local function resolve(fields, ranks) return layout.resolve(fields, ranks) end
local function refused(want, f, ...)
  local args = { ... }
  local message = check.throws(function() f(unpack(args)) end, want)
  check.is_true(not message:find("\n", 1, true), message)
end

function tests.test_dp_takes_what_the_other_axes_leave()
  check.equal(resolve({ pp = 2, tp = 2 }, 8).dp, 2)
  check.equal(resolve({}, 6).dp, 6)
  check.equal(resolve({ dp = 3, pp = 2 }, 6).dp, 3)
end

function tests.test_a_product_that_is_not_the_ranks_is_refused_with_what_fits() -- C23
  refused("layout: pp 2 x dp 2 x tp 2 = 8 ranks, but 4 were started; use -n 8, or layout.dp = \"rest\"", resolve,
          { pp = 2, dp = 2, tp = 2 }, 4)
  refused("use -n 12, or a layout of 8 ranks, such as pp 2 x dp 1 x tp 4", resolve, { pp = 3, dp = 1, tp = 4 }, 8)
  refused("layout: pp 2 x tp 3 = 6, which does not divide the ranks: 4 were started; use -n 6, or a layout of 4 ranks",
          resolve, { pp = 2, tp = 3 }, 4)
  refused("use -n 4, or a layout of 1 rank, such as pp 1 x dp 1 x tp 1", resolve, { pp = 4 }, 1)
end

local function share(fields, ranks, batch, micro) return layout.share(resolve(fields, ranks), batch, micro) end

function tests.test_batch_over_dp_over_micro_batches()
  check.equal(share({ pp = 2 }, 4, 12), 6)
  check.equal(share({ pp = 2 }, 4, 12, 2), 2)
  refused("data.batch 9 does not divide over dp = 2 ranks; nearest: 8 or 10", share, { pp = 2 }, 4, 9)
  refused("micro 4 does not divide a rank's 6 sequences (data.batch 12 / dp 2); choose a divisor of 6", share,
          { pp = 2 }, 4, 12, 4)
end

function tests.test_schedules_and_chunks()
  local l = resolve({ pp = 2, schedule = "interleaved" }, 2)
  layout.check_schedule(l, 4)
  check.equal(l.chunks, 2)
  for _, micro in ipairs { 1, 2, 3, 5 } do -- C19
    for _, name in ipairs { "gpipe", "1f1b", "interleaved", "zb-h1" } do
      layout.check_schedule(resolve({ pp = 4, schedule = name }, 4), micro)
    end
  end
  refused("schedule 1f1b has one chunk a stage, 2 are asked for", share, { pp = 2, chunks = 2 }, 2, 4)
  refused("layout.chunks is 2; with layout.pp = 1", share, { chunks = 2 }, 2, 4)
  refused("a list of steps for each of the 2 stages", share, { pp = 2, schedule = function() return {} end }, 2, 4)
end

-- ---- stages ----

local function model_of(blocks, o)
  o = o or {}
  return describe.build(llama { blocks = blocks, width = 16, heads = 2, vocab = o.vocab or 259, context = 16,
                                tied = o.tied })
end

-- Blocks of each chunk.
local function counts(plan)
  local out = {}
  for chunk = 0, plan.pp * plan.chunks - 1 do
    local n = plan[chunk][2] - plan[chunk][1] + 1
    if chunk == 0 then n = n - 1 end
    if chunk == plan.pp * plan.chunks - 1 then n = n - 1 end
    out[#out + 1] = n
  end
  return out
end

function tests.test_blocks_that_do_not_divide_are_all_there() -- C18
  for _, case in ipairs { { 30, 4 }, { 7, 3 }, { 5, 5 }, { 8, 3 } } do
    local sum, most, least = 0, 0, math.huge
    for _, n in ipairs(counts(parts.cut(model_of(case[1], { vocab = 8 }), { pp = case[2] }))) do
      sum, most, least = sum + n, math.max(most, n), math.min(least, n)
    end
    check.equal(sum, case[1])
    check.is_true(most - least <= 1)
  end
end

function tests.test_embedding_and_head_weigh_as_much_as_they_hold()
  local got = counts(parts.cut(model_of(8, { vocab = 600 }), { pp = 2 })) -- both are three blocks' worth
  check.equal(got, { 4, 4 })
  got = counts(parts.cut(model_of(8, { vocab = 600 }), { pp = 4 }))
  check.equal(got, { 1, 3, 3, 1 })
  check.equal(counts(parts.cut(model_of(8), { pp = 2, chunks = 2, blocks = { 1, 4, 2, 1 } })), { 1, 4, 2, 1 })
end

function tests.test_fewer_blocks_than_stages_are_refused_with_numbers() -- C18
  refused("layout.pp = 4: 4 stages, each takes at least one block, and the model has 2; nearest that fit: layout.pp = "
          .. "2, or a model of 4 blocks", parts.cut, model_of(2), { pp = 4 })
  refused("layout.pp 2 x layout.chunks 3 = 6 chunks, each takes at least one block, and the model has 5; nearest that "
          .. "fit: layout.chunks = 2, or a model of 6 blocks", parts.cut, model_of(5), { pp = 2, chunks = 3 })
  refused("makes 7 items, there are 8", parts.cut, model_of(8), { pp = 2, blocks = { 3, 4 } })
end

function tests.test_models_that_stages_cannot_run_are_refused()
  local Plain = nn.class "Plain"
  function Plain:init() self.w = self:param("w", { 2, 2 }) end
  refused("a pipeline needs an nn.LM", parts.cut, Plain {}, { pp = 2 })
  local own = model_of(4)
  function own.forward(self, ids) return pg.scale(self.layers(ids), 2) end
  refused("a forward or loss of its own", parts.cut, own, { pp = 2 })
end

function tests.test_what_several_stages_use_is_known()
  local plan = parts.cut(model_of(4, { tied = true }), { pp = 4 })
  check.equal(#plan.shared, 1)
  check.equal(plan.shared[1][2], { 0, 3 })
  check.equal(plan.shared[1][1].stages, 2)
  check.equal(#parts.cut(model_of(4), { pp = 4 }).shared, 0)
  local model = describe.build(gpt2 { blocks = 2, width = 16, heads = 2, vocab = 259, context = 16 })
  model:param("outside", { 3 })
  plan = parts.cut(model, { pp = 2 })
  check.equal(#plan.shared, 2)
  check.equal(plan.shared[2][2], { 0, 1 })
end

function tests.test_a_model_counts_once_whatever_is_lent()
  check.equal(parts.count(model_of(4)) - parts.count(model_of(4, { tied = true })), 259 * 16)
end

function tests.test_states_that_do_not_fit_are_refused_before_they_are_made()
  local message = check.throws(function()
    layout.build(llama { blocks = 2, width = 2^20, heads = 2, ffn = 8, vocab = 8, context = 16 }, resolve({}, 1), {})
  end, "layout: out of memory before the first step: the fullest rank would hold 131073.1 GiB")
  local all = message:find("weights 32768.3 GiB, gradients 32768.3 GiB, moments 65536.5 GiB", 1, true)
  check.is_true(all ~= nil, message)
end

check.run(tests)
