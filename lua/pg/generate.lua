-- generate.lua: a model writes text, one token at a time.
local c = require "pg.c"
local host = require "pg.host"
local Tensor = require "pg.tensor"
local loss = require "pg.ops.loss"
local reduce = require "pg.ops.reduce"
local scope = require "pg.scope"
local tape = require "pg.tape"
local tokeniser = require "pg.data.tokeniser"
local watch = require "pg.watch"
local ffi = c.ffi

local generate = {}
local known = { "tokens", "temperature", "top_k", "top_p", "seed", "tokeniser" }

-- Minus infinity forbids an id; NaN would draw nonsense.
local function check_logits(last, n)
  if watch.nonfinite(last) == 0 then return end
  for _, x in ipairs(last:totable()) do
    if x ~= x or x == math.huge then
      c.fail("generate: the model's logits are not numbers (%s) after %d tokens; its weights are spoilt",
             tostring(x), n)
    end
  end
end

-- The next id after the last `context` of ids[0..n).
local function next_id(model, ids, n, o, draw)
  local T = math.min(n, model.context)
  local window = Tensor.empty({ 1, T }, "i32"):write(ids + (n - T))
  local logits = model(window)
  local rows = logits.count / model.vocab -- those of every id, or of the last one alone
  local last = reduce.slice(reduce.reshape(logits, { rows, model.vocab }), 1, rows, 1)
  if o.vocab and o.vocab < model.vocab then last = reduce.slice(last, 2, 1, o.vocab) end
  check_logits(last, n)
  return loss.sample(last, { temperature = o.temperature, top_k = o.top_k, top_p = o.top_p, seed = o.seed,
                             first = draw }):item()
end

-- Settings that C takes as numbers.
local function check_numbers(o)
  for _, key in ipairs { "temperature", "top_k", "top_p" } do
    if o[key] ~= nil and type(o[key]) ~= "number" then
      c.fail("generate: %s is %s, not a number", key, tostring(o[key]))
    end
  end
  if o.top_k then c.int(o.top_k, "generate: top_k") end
end

--- generate.ids(model, ids, n, o) -> int32 array, length: the ids continued by o.tokens (200); by fewer where
-- a training is asked to stop meanwhile.
function generate.ids(model, ids, n, o)
  if type(model) ~= "table" or not model.is_module or not model.context then
    c.fail("generate: %s is no language model; give what pg.build made of one", tostring(model))
  end
  check_numbers(o)
  local more = c.within(o.tokens or 200, "generate: tokens", 0, 2^31 - 1 - n)
  if n < 1 then c.fail("generate: an empty prompt; give at least one token") end
  local all = ffi.new("int32_t[?]", n + more)
  ffi.copy(all, ids, n * 4)
  local before = tape.context
  tape.context = { training = false }
  local stopped = model.stopped or function(asked) return asked end -- ranks that write together stop together
  local ok, message = pcall(tape.no_grad, function()
    for i = 0, more - 1 do
      if stopped(host.stop_requested()) then
        more = i
        break
      end
      all[n + i] = scope.run(next_id, model, all, n + i, o, i)
    end
  end)
  tape.context = before
  if not ok then error(message, 0) end
  return all, n + more
end

--- generate.text(model, prompt, { tokens=200, temperature=0.8, top_k=0, top_p=1, seed=0 }) -> prompt and what
-- follows it, as text.  Collectives are the model's alone: ranks that share one all call it.
function generate.text(model, prompt, o)
  o = o or {}
  c.keys(o, known, "generate")
  local t = o.tokeniser or tokeniser.bytes
  local ids, n = t:encode(prompt)
  if n == 0 and t.bos then ids, n = ffi.new("int32_t[1]", t.bos), 1 end
  local all, count = generate.ids(model, ids, n, {
    tokens = o.tokens, temperature = o.temperature or 0.8, top_k = o.top_k, top_p = o.top_p, seed = o.seed,
    vocab = t.vocab }) -- a model may have more ids than the tokeniser has texts
  return t:decode(all, count)
end

return generate
