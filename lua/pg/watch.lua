-- watch.lua: looking over the shoulder of every op.
--   PG_TRACE=1  prints each op with its output's shape and the time since the op before
--   PG_NAN=1    stops at the first number that is not finite and names the op that made it
--   PG_PROFILE=1  adds up the time of each kind of op, waiting for the device after every one (pg.timings)
local c = require "pg.c"
local Tensor = require "pg.tensor"
local C, ffi = c.C, c.ffi

local watch = { trace = os.getenv "PG_TRACE" == "1", nan = os.getenv "PG_NAN" == "1" }
local count = ffi.new "int64_t[1]"
local last = C.pg_time()
local sums, since -- seconds and calls by kind of op, while they are added up; the end of the op before

--- watch.nonfinite(t) -> how many numbers of t are NaN or infinite.
function watch.nonfinite(t)
  if not Tensor.floating[t.dtype] then return 0 end
  c.check(C.pg_count_nonfinite(count, t:alive().raw))
  return tonumber(count[0])
end

--- watch.first_bad(pieces) -> the name of the first with a number that is NaN or infinite, or nil.  pieces: what
-- segment:pieces gives; their views are freed.
function watch.first_bad(pieces)
  local found
  for _, piece in ipairs(pieces) do
    if not found and watch.nonfinite(piece.view) > 0 then found = piece.name end
    piece.view:free()
  end
  return found
end

local function inspect(name, y)
  if watch.trace then
    local now = C.pg_time()
    io.stderr:write(("pg: %-22s %-24s %9.1f us\n"):format(name, y:describe(), (now - last) * 1e6))
    last = C.pg_time()
  end
  if watch.nan and Tensor.floating[y.dtype] then
    local n = watch.nonfinite(y)
    if n > 0 then
      c.fail("%s: %d of %d numbers of its result %s are not finite", name, n, y.count, y:describe())
    end
  end
end

--- watch.timings(on) -> { { name, calls, seconds }, ... }, the longest first: what each kind of op took since
-- timings(true) began to add up; gradients under "NAME backward".  timings(false) ends it.  Waiting for the
-- device after every op costs time of its own, which the sums hold as well (about 10 us an op on a GPU).
function watch.timings(on)
  local list = {}
  for name, entry in pairs(sums or {}) do
    list[#list + 1] = { name = name, calls = entry.calls, seconds = entry.seconds }
  end
  table.sort(list, function(a, b) return a.seconds > b.seconds end)
  if on ~= nil then
    sums = on and {} or nil
    c.check(C.pg_sync())
    since = C.pg_time()
  end
  return list
end

--- watch.mark(name): what the device did since the last mark was an op of this kind.
function watch.mark(name)
  if not sums then return end
  c.check(C.pg_sync())
  local now = C.pg_time()
  local entry = sums[name] or { calls = 0, seconds = 0 }
  entry.calls, entry.seconds = entry.calls + 1, entry.seconds + now - since
  sums[name], since = entry, now
end
if os.getenv "PG_PROFILE" == "1" then sums, since = {}, last end

-- What C says under the name the user knows: "linear: matmul: a is ...".
local function refuse(name, rc)
  local text = ffi.string(C.pg_errmsg())
  if rc == C.PG_EINTR or text:sub(1, #name + 1) == name .. ":" then c.check(rc) end
  c.code = rc
  c.fail("%s: %s", name, text)
end

--- watch.looks() -> true where something is wanted of every single op.
function watch.looks() return watch.nan or watch.trace or sums ~= nil end

--- watch.done(name, rc, y) -> y.  Ends every op: raises where rc says so, inspects where asked.
function watch.done(name, rc, y)
  if rc < 0 then refuse(name, rc) end
  if watch.trace or watch.nan then inspect(name, y) end
  if sums then watch.mark(name) end
  return y
end

--- watch.gradients(r, d): the same for the gradients that record r has just written.
function watch.gradients(r, d)
  if sums then watch.mark(r.op.name .. " backward") end
  if not (watch.trace or watch.nan) then return end
  for i = 1, r.count do
    if d[i] then inspect(("gradient %d of %s"):format(i, r.op.name), d[i]) end
  end
end

return watch
