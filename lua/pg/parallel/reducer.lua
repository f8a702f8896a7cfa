-- parallel/reducer.lua: gradients summed over the dp axis, a segment at a time, started while backward
-- still runs.  All ranks issue segments in one order (the last segment first, as backward fills them), so
-- a segment waits for its turn; what backward never filled counts as zero and is sent at the end.
local c = require "pg.c"
local same_weights = require "pg.parallel.same_weights"
local mesh = require "pg.mesh"
local watch = require "pg.watch"
local C = c.C

local reducer = {}
local Reducer = {}
Reducer.__index = Reducer

--- reducer.new(segments) -> a reducer for one backward: pass r:hook() as options.done of the last
-- micro-batch's backward, then call r:finish().
function reducer.new(segments)
  local r = setmetatable({ segments = segments, left = {}, works = {}, turn = #segments,
                           axis = mesh.ready().dp }, Reducer)
  for _, s in ipairs(segments) do
    r.left[s] = #s.params
    r.busy = r.busy or r.axis.size > 1 or #s.sums > 0
  end
  return r
end

-- A bad number spreads to all ranks with the sum, so the rank that made it is noted before: r.bad is the
-- name of this rank's first gradient that is not finite.
function Reducer:note_bad(s)
  if self.bad or watch.nonfinite(s.grad) == 0 then return end
  for _, piece in ipairs(s:pieces(s.grad)) do
    if not self.bad and watch.nonfinite(piece.view) > 0 then self.bad = piece.name end
    piece.view:free()
  end
end

function Reducer:send(s)
  s:zero_unused()
  self:note_bad(s)
  for _, sum in ipairs(s.sums) do
    local stretch = s.grad:view({ sum.count }, sum.first)
    sum.axis:all_reduce(stretch)
    stretch:release()
  end
  self.works[#self.works + 1] = self.axis:all_reduce(s.grad, "sum", true)
end

--- r:hook() -> a function of a leaf whose gradient is whole, or nil where there is nothing to reduce.
function Reducer:hook()
  if not self.busy then return nil end
  return function(p)
    local s = p.segment
    if not s or not self.left[s] then return end
    self.left[s] = self.left[s] - 1
    while self.turn > 0 and self.left[self.segments[self.turn]] <= 0 do
      self:send(self.segments[self.turn])
      self.turn = self.turn - 1
    end
  end
end

--- r:finish(): send what is left, wait for all.
function Reducer:finish()
  if self.busy then
    for i = self.turn, 1, -1 do self:send(self.segments[i]) end
    self.turn = 0
    for _, work in ipairs(self.works) do work:wait() end
  end
  self.works = {}
end

--- reducer.average(segments): their gradients averaged over the ranks, without overlap: what a loss of a plain
-- script wants, as DistributedDataParallel does it.
function reducer.average(segments)
  local r = reducer.new(segments)
  r:finish()
  local size = r.axis.size
  if size == 1 then return end
  for _, s in ipairs(segments) do c.check(C.pg_axpby(s.grad.raw, s.grad.raw, 1 / size, 0)) end
end

-- What an optimiser does before it updates: once, see that all ranks hold the same weights; then average,
-- unless the trainer has summed the gradients of its shares during backward.
local function before_step(optim, reduced)
  if not optim.agreed then
    same_weights.check(optim.segments)
    optim.agreed = true
  end
  if not reduced then reducer.average(optim.segments) end
end

--- reducer.attach(optim) -> optim, whose step() now works over the dp axis.
function reducer.attach(optim)
  optim.before_step = before_step
  return optim
end

return reducer
