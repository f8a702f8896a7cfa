-- swaps.lua: what the tests of pgrun swap share: a training to which recipes are offered at given steps.
local c = require "pg.c"
local elementwise = require "pg.ops.elementwise"
local fs = require "pg.fs"
local live = require "pg.live"
local training = require "tests.training"

local swaps = {}
local boundary = live.boundary

--- swaps.text{ model =, data =, optim =, steps =, more = } -> the text of a recipe; each a piece of Lua text, or nil:
-- as in swaps.base.
function swaps.text(o)
  o = o or {}
  return ([[return {
  model = %s,
  data = { %s },
  optim = { %s },
  steps = %s, log = { every = 1000 },
  %s
}
]]):format(o.model or swaps.model, o.data or swaps.data, o.optim or swaps.optim, o.steps or swaps.steps,
           o.more or swaps.more)
end

--- swaps.base{ model =, data =, optim =, steps =, more = }: the recipe that the following ones differ from.
function swaps.base(o)
  swaps.model = o.model or 'require "models.llama" { blocks = 1, width = 32, heads = 2, vocab = 259, context = 32 }'
  swaps.data = o.data or ('text = %q, batch = 8'):format(training.text(500))
  swaps.optim = o.optim or '"adamw", clip = 1.0, rate = pg.rate.cosine { peak = 1e-3, warmup = 3 }'
  swaps.steps, swaps.more = o.steps or 12, o.more or ""
end

local number = 0

-- A file with this text, of a name of its own.
local function put(text)
  number = number + 1
  local path = ("%s/offer-%d.lua"):format(training.scratch, number)
  fs.write(path, text)
  return path
end

--- swaps.run(name, text, o) -> records, answers { { step =, kind =, text =, path = }, ... } (of rank 0), the trainer.
-- A training of the recipe of this text.  o.offers[step] = list of texts: each is offered so as to be looked at before
-- that step; o.before(step, trainer): on every rank, before each step; o.path(text, step) -> path, in place of a file.
function swaps.run(name, text, o)
  o = o or {}
  local answers, of = {}, nil
  elementwise.dropout_calls = 0
  live.boundary = function(trainer)
    of = trainer
    local next_step = trainer.state.step + 1
    if o.before then o.before(next_step, trainer) end
    local ahead = pg.ranks() > 1 and 1 or 0 -- several ranks meet one step after it is known
    if trainer.live and pg.rank() == 0 then
      for _, offered in ipairs(o.offers and o.offers[next_step + ahead] or {}) do
        local path = o.path and o.path(offered, next_step + ahead) or put(offered)
        trainer.live:propose(path, function(kind, told)
          answers[#answers + 1] = { step = trainer.state.step, kind = kind, text = told, path = path }
        end)
      end
    end
    return boundary(trainer)
  end
  local given = assert(loadstring(text, "@base.lua"))()
  local ok, code = pcall(require("pg.recipe").run, given, { path = "base.lua",
                         args = { "--run=" .. training.scratch .. "/" .. name } })
  live.boundary = boundary
  if not ok then error(code, 0) end
  if pg.ranks() > 1 then pg.barrier() end
  return training.records(training.scratch .. "/" .. name), answers, of
end

--- swaps.same(got, want, from, to): losses, norms and rates equal to the bit.
function swaps.same(got, want, from, to)
  for step = from or 1, to or #want do
    for _, key in ipairs { "step", "loss", "rate", "grad_norm", "tokens" } do
      local a, b = got[step] and got[step][key], want[step][key]
      assert(a == b, ("step %d: %s is %s, not %s"):format(step, key, tostring(a), tostring(b)))
    end
  end
  assert(to or #got == #want, ("%d steps, not %d"):format(#got, #want))
end

--- swaps.holds(text, part)
function swaps.holds(text, part)
  assert(tostring(text):find(part, 1, true), ("expected %q in: %s"):format(part, tostring(text)))
end

swaps.boundary, swaps.put, swaps.scratch, swaps.time = boundary, put, training.scratch, c.C.pg_time
return swaps
