-- parallel/reducer.lua: gradients summed over the dp axis, a segment at a time, started while backward
-- still runs.  All ranks issue segments in one order (the last segment first, as backward fills them), so
-- a segment waits for its turn; what backward never filled counts as zero and is sent at the end.
-- By level of ZeRO: 0 all ranks get the sum; from 1 on each gets its window of it; from 2 on that happens in
-- every backward of a step, and the gradient of the whole is dropped when its sum has come (segment.lua).
-- At level 3 values travel over dp during backward as well, and in one order with the gradients on all ranks, also
-- where these do not use the same parameters: so a segment is sent when the first item that has it is through.
local c = require "pg.c"
local same_weights = require "pg.parallel.same_weights"
local watch = require "pg.watch"
local zero = require "pg.parallel.zero"
local Tensor = require "pg.tensor"
local C = c.C

local reducer = {}
local Reducer, Pass = {}, {}
Reducer.__index, Pass.__index = Reducer, Pass
local FLIGHT = 2 -- gradients under way from level 2 on, each as large as its segment

-- Nothing to do for anyone: one rank, and nothing that other axes add to.
local function alone(segments)
  for _, s in ipairs(segments) do
    if s.axis.size > 1 or #s.sums > 0 or s.tied then return false end
  end
  return true
end

--- reducer.new(segments, look) -> a reducer for one step.  For each backward pass r:hook(last) as options.done (and to
-- tape.finish), then call r:after(last); at the end r:finish().  look: note what is not finite.
function reducer.new(segments, look)
  return setmetatable({ segments = segments, works = {}, flying = {}, passes = {}, sent = {}, look = look,
                        alone = alone(segments) }, Reducer)
end

-- A bad number spreads to all ranks with the sum, so the rank that made it is noted before: r.bad is the
-- name of this rank's first gradient that is not finite.  The host waits for the device to know.
function Reducer:note_bad(s)
  if self.bad or watch.nonfinite(s.grad) == 0 then return end
  self.bad = watch.first_bad(s:pieces(s.grad))
end

-- From level 2 on: own_grad takes the first share of a step, later ones are added to it when they have come.
function Reducer:send_share(s)
  local part = s.own_grad
  if not s.own_fresh then
    C.pg_mem_tag "gradients"
    part = Tensor.empty({ s.size }, s.grad_dtype):keep()
    C.pg_mem_tag "activations"
  end
  s.flight = { part = part, work = s.axis:reduce_scatter(part, s.grad, "sum", true) }
  for _, p in ipairs(s.params) do p.grad_fresh = true end
  s.own_fresh = false
  self.flying[#self.flying + 1] = s
  if #self.flying > FLIGHT then
    local first = table.remove(self.flying, 1)
    if first.flight then first:land() end
  end
end

function Reducer:send(s)
  self.sent[s] = true
  s:zero_unused()
  zero.settle(s)
  if self.look and s.axis.size > 1 then self:note_bad(s) end
  for _, sum in ipairs(s.sums) do
    local v = s.grad:view({ sum.count }, sum.first)
    sum.axis:all_reduce(v)
    v:release()
  end
  if s.axis.size == 1 then return end
  if s.level >= 2 then return self:send_share(s) end
  local work = s.level == 1 and s.axis:reduce_scatter(s.own_grad, s.grad, "sum", true)
    or s.axis:all_reduce(s.grad, "sum", true)
  self.works[#self.works + 1] = work
end

-- ---- one backward ----

function Pass:send_turn()
  self.reducer:send(self.segments[self.turn])
  self.turn = self.turn - 1
end

-- A leaf has its whole gradient.
function Pass:__call(p)
  local s = p.segment
  if not s or not self.left[s] then return end
  self.left[s] = self.left[s] - 1
  while self.turn > 0 and self.left[self.segments[self.turn]] <= 0 do self:send_turn() end
end

--- pass:begin(records): a backward will walk these (tape.lua calls it).
function Pass:begin(records)
  if self.segments[1].level == 3 then self.ends = zero.item_ends(records) end
end

--- pass:item_done(segments): at level 3, backward is through an item of a Sequential that has these.
function Pass:item_done(segments)
  local ends = self.ends
  for _, s in ipairs(segments) do ends[s] = ends[s] - 1 end
  while self.turn > 0 and ends[self.segments[self.turn]] == 0 do self:send_turn() end
end

local function new_pass(r, segments)
  local pass = setmetatable({ reducer = r, segments = segments, turn = #segments, left = {} }, Pass)
  for _, s in ipairs(segments) do
    local left = 0
    for _, p in ipairs(s.params) do if p.requires_grad then left = left + 1 end end
    pass.left[s] = s.level < 3 and left or math.huge -- at level 3 by items alone
  end
  return pass
end

-- Is a backward that is the step's last (or not) followed by sums?
function Reducer:sums_after(last, segments)
  if self.alone or #segments == 0 then return false end
  return last ~= false or segments[1].level >= 2
end

--- r:hook(last, segments) -> what a backward is given as options.done, or nil where nothing is to be summed.
-- last (true): no other backward of this step adds to these segments (all of them).
function Reducer:hook(last, segments)
  segments = segments or self.segments
  if not self:sums_after(last, segments) then return nil end
  local pass = new_pass(self, segments)
  self.passes[#self.passes + 1] = pass
  return pass
end

local function complete(pass)
  while pass.turn > 0 do pass:send_turn() end
end

--- r:after(last, segments): that backward is over, its weight gradients included; what it has not filled is sent.
-- Of several that are under way the oldest.
function Reducer:after(last, segments)
  segments = segments or self.segments
  if not self:sums_after(last, segments) then return end
  for i, pass in ipairs(self.passes) do
    if pass.segments[1] == segments[1] then
      table.remove(self.passes, i)
      return complete(pass)
    end
  end
  complete(new_pass(self, segments))
end

--- r:finish(): the step's last backward is over: send what is left, wait for all, sum what stages share.
function Reducer:finish()
  if self.alone then return end
  for _, pass in ipairs(self.passes) do complete(pass) end
  for i = #self.segments, 1, -1 do
    if not self.sent[self.segments[i]] then self:send(self.segments[i]) end
  end
  for _, work in ipairs(self.works) do work:wait() end
  for _, s in ipairs(self.flying) do if s.flight then s:land() end end
  for _, s in ipairs(self.segments) do if s.tied then s.tied:all_reduce(s.own_grad) end end
  self.works, self.flying, self.passes, self.sent = {}, {}, {}, {}
end

-- ---- plain scripts ----

--- reducer.average(segments) -> the reducer: their gradients averaged over the ranks, without overlap: what a loss of
-- a plain script wants, as DistributedDataParallel does it.
function reducer.average(segments)
  local r = reducer.new(segments, true)
  r:finish()
  for _, s in ipairs(segments) do
    local size = s.axis.size
    if size > 1 then c.check(C.pg_axpby(s.own_grad.raw, s.own_grad.raw, 1 / size, 0)) end
  end
  return r
end

-- Has run:gradients of pg.parallel summed these?  -> true or not, what it found bad, and true if it did not look.
local function summed(segments)
  local all, bad, unseen = true, nil, nil
  for _, s in ipairs(segments) do
    local told = s.summed
    all, bad, unseen = all and told ~= nil, bad or told and told.bad, unseen or told and not told.looked
    s.summed = nil
  end
  return all, bad, unseen
end

-- What an optimiser does before it updates: once, see that all ranks hold the same weights; then average,
-- unless the trainer has summed the gradients of its shares during backward.
local function before_step(optim, reduced)
  local all, bad, unseen = summed(optim.segments)
  optim.unseen = unseen
  reduced, optim.bad_gradient = all or reduced, optim.bad_gradient or bad
  if not optim.agreed then
    zero.ready(optim.segments)
    same_weights.check(optim.segments)
    optim.agreed = true
  end
  if not reduced then optim.bad_gradient = reducer.average(optim.segments).bad end
end

-- The values of a plain script are its own to look at, so they are waited for; a trainer's are where they are used,
-- by the items that have them.
local function after_step(optim, reduced)
  for _, s in ipairs(optim.segments) do
    if not (reduced and s.in_item) then s:ready() end
  end
end

--- reducer.attach(optim) -> optim, whose step() now works over the dp axis.
function reducer.attach(optim)
  optim.before_step, optim.after_step = before_step, after_step
  return optim
end

return reducer
