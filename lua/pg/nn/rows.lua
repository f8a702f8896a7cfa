-- nn/rows.lua: which rows of the batch this rank's activations hold.  Under sequence parallelism (layout.sequence)
-- the residual stream of a tensor parallel rank is [n, D]: n = B T / tp of the flattened rows of tokens; without
-- it, and within attention and MLP, it is [B, T, D], all rows.  nn.LM says what a batch is; the layers ask.
--   tape.context.rows = { B, T, first =, count =, sequence = }: this rank's rows are [first, first + count)
local c = require "pg.c"
local mesh = require "pg.mesh"
local params = require "pg.params"
local tape = require "pg.tape"

local rows = {}

--- rows.check(B, T): raises where a micro-batch of B sequences of T tokens cannot be dealt to the ranks of tp.
function rows.check(B, T)
  local size = mesh.tp and mesh.tp.size or 1
  if not mesh.layout.sequence or B * T % size == 0 then return end
  local micro = B
  repeat micro = micro + 1 until micro * T % size == 0
  c.fail("layout.tp = %d: a micro-batch of %d x %d = %d tokens does not divide by %d; set layout.sequence = false, or "
         .. "micro = %d, or use %s", size, B, T, B * T, size, micro,
         params.fitting(size, B * T, function(n) return B * T % n == 0 end))
end

-- The rows of a batch [B,T].  Where they cannot be dealt out and no gradient is asked for, every rank has all.
local function describe(B, T)
  local tp = mesh.tp
  local r = { B, T, first = 0, count = B * T, sequence = mesh.layout.sequence }
  if not r.sequence then return r end
  if B * T % tp.size ~= 0 then
    if tape.enabled then rows.check(B, T) end
    r.sequence = false
  else
    r.count = B * T / tp.size
    r.first = tp.rank * r.count
  end
  return r
end

--- rows.enter(B, T): what is computed from here on belongs to a batch [B,T].  The context is replaced, not
-- changed: records of an earlier batch may still look into theirs.
function rows.enter(B, T)
  local new, context = describe(B, T), {}
  for key, value in pairs(tape.context) do context[key] = value end
  context.rows = new
  tape.context = context
end

--- rows.own(what) -> tape.context.rows where ranks hold rows of their own now, else nil.
function rows.own(what)
  if not mesh.layout.sequence then return nil end
  local r = tape.context.rows
  if r then return r.sequence and r or nil end
  if not tape.enabled then return nil end
  c.fail("%s: under layout.sequence it must know its batch: use it within an nn.LM, or set layout.sequence = false",
         what)
end

return rows
