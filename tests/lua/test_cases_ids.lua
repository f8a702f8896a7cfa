-- test_cases_ids.lua: ids and places that do not exist, in training and in writing text (CASES.md C12): an
-- error before the kernel that names value, limit, row and column, and a process that goes on as before.
local check = require "tests.check"
local equal, is_true, throws = check.equal, check.is_true, check.throws
local tests = {}
pg.step.block() -- lives as long as the process

local V, T = 259, 8
local function tiny(name)
  local sizes = { blocks = 1, width = 16, heads = 2, vocab = V, context = T }
  return pg.build(require("models." .. name)(sizes))
end
local function ids(rows, dtype) return pg.tensor(rows, dtype or "i32") end

-- Losses of three steps on a batch that never changes.
local function losses(model)
  local optim = pg.optim.adamw(model:parameters(), { rate = 1e-2 })
  local out = {}
  for i = 1, 3 do
    pg.scope(function()
      local loss = model:loss { tokens = ids { { 1, 2, 3 } }, targets = ids { { 2, 3, 4 } } }
      loss:backward()
      optim:step()
      out[i] = loss:item()
    end)
  end
  return out
end

function tests.test_a_wrong_token_leaves_the_training_as_it_was()
  for _, name in ipairs { "llama", "gpt2" } do
    local want = losses(tiny(name))
    local model = tiny(name)
    local wrongs = { { V, "i32" }, { -1, "i32" }, { 2^31 - 1, "i32" }, { V, "i64" }, { "9007199254740993", "i64" } }
    for _, wrong in ipairs(wrongs) do
      local batch = { tokens = ids({ { 1, 2, 3 }, { 4, wrong[1], 6 } }, wrong[2]),
                      targets = ids { { 2, 3, 4 }, { 5, 6, 7 } } }
      local message = throws(function() model:loss(batch) end, "outside the vocabulary [0,259)")
      is_true(message:find(("id %s at row 1, column 1"):format(tostring(wrong[1])), 1, true) ~= nil, message)
      is_true(message:find("^[%w/_]+%.lua:%d+: ") and not message:find("lua/pg/", 1, true), message)
    end
    equal(losses(model), want)
  end
end

function tests.test_targets_are_checked_as_well()
  local model = tiny "llama"
  local function with(target)
    return function() model:loss { tokens = ids { { 1, 2 }, { 3, 4 } }, targets = ids { { 2, 3 }, { target, 5 } } } end
  end
  for _, wrong in ipairs { V, -1, -99, 2^31 - 1 } do
    throws(with(wrong), ("target %.0f at row 1, column 0 is outside the vocabulary [0,259)"):format(wrong))
  end
  equal(losses(model), losses(tiny "llama"))
end

function tests.test_a_place_beyond_the_context()
  for _, name in ipairs { "llama", "gpt2" } do
    local model = tiny(name)
    local row = {}
    for i = 1, T + 1 do row[i] = i end
    throws(function() model(ids { row }) end, "a sequence of 9 tokens, the model's context is 8")
    row[T + 1] = nil
    equal(model(ids { row }).shape, { 1, T, V })
  end
end

function tests.test_what_is_no_batch()
  local model = tiny "llama"
  throws(function() model { { 1, 2 } } end, "token ids are a table; give a tensor")
  throws(function() model(nil) end, "token ids are a nil")
  throws(function() model(ids { 1, 2 }) end, "they must be [batch,tokens]")
  throws(function() model(ids({ { 1, 2 } }, "f32")) end, "they must be i32 or i64")
  throws(function() model:loss(nil) end, "a batch is a table with tokens and targets")
  throws(function() model:loss { tokens = ids { { 1, 2 } } } end, "a batch is a table with tokens and targets")
  throws(function() model:loss { tokens = ids { { 1, 2 } }, targets = ids { { 1, 2, 3 } } } end,
         "each row needs one target")
end

function tests.test_text_longer_than_the_context()
  for _, name in ipairs { "llama", "gpt2" } do
    local model = tiny(name)
    for _, n in ipairs { 1, T - 1, T, T + 1, 5 * T } do
      local prompt = ("x"):rep(n)
      local text = pg.generate(model, prompt, { tokens = T + 3, seed = 5 })
      equal(text:sub(1, n), prompt)
      equal(pg.generate(model, prompt, { tokens = T + 3, seed = 5 }), text)
    end
    equal(pg.generate(model, "ab", { tokens = 0 }), "ab")
    equal(#pg.generate(model, "", { tokens = 0 }), 0)
  end
end

function tests.test_settings_of_generate()
  local model = tiny "llama"
  local function with(o, prompt, m)
    return function() pg.generate(m or model, prompt == nil and "a" or prompt, o) end
  end
  throws(with { tokens = -1 }, "generate: tokens is -1; it must be at least 0")
  throws(with { tokens = 1e12 }, "it must be at most 2147483646")
  throws(with { tokens = 1.5 }, "tokens is 1.5, not an integer")
  throws(with { temperature = "hot" }, "temperature is hot, not a number")
  throws(with { tokens = 1, temperature = -1 }, "temperature -1; it must be 0")
  throws(with { tokens = 1, temperature = 0 / 0 }, "temperature")
  throws(with { tokens = 1, top_k = -1 }, "top_k -1; it must be 0")
  throws(with { tokens = 1, top_p = 0 }, "top_p 0 lies outside (0,1]")
  throws(with { tokens = 1, seed = 2^53 + 2 }, "exact only below 2^53")
  throws(with { tokn = 1 }, "did you mean tokens?")
  throws(with({ tokens = 1 }, 5), "a string is wanted, got number")
  throws(with({ tokens = 1 }, "a", {}), "is no language model")
  equal(pg.generate(model, "a", { tokens = 3, temperature = 0, seed = 1 }),
        pg.generate(model, "a", { tokens = 3, temperature = 0, seed = 2 }))
end

-- A model as the weights of a checkpoint gone bad would make it.
function tests.test_logits_that_are_not_finite()
  local model = tiny "llama"
  for _, p in ipairs(model:parameters()) do p:fill(0 / 0) end
  throws(function() pg.generate(model, "a", { tokens = 1 }) end, "generate: the model's logits are not numbers")
  throws(function() pg.generate(model, "a", { tokens = 1, temperature = 0 }) end, "not numbers")
  equal(pg.generate(tiny "llama", "a", { tokens = 0 }), "a")
end

check.run(tests)
