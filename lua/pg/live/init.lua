-- live/init.lua: a training that people can reach while it goes on.  Trainer:run calls live.boundary(trainer)
-- before each step and live.close(trainer) at its end.  Between steps the first rank looks at its socket
-- (runtime/host/control.c), which costs one poll() where nobody is there, and at the recipe's files, which costs a
-- stat() each; a line to run or a recipe to take calls all ranks together at the next boundary (board.c, or a
-- collective where ranks share no page), and they run it (lines.lua) or try it (swap.lua).
-- Messages, by their kind:
--   to the run:     A attach   L a line   I stop the line   Q how it stands   T stop the run   W take this recipe
--   to the client:  K yes, with a text   E no, with the reason   R what a line said, "+" or "-" first   S json
local host = require "pg.host"
local graph = require "pg.graph"
local json = require "pg.json"
local lines = require "pg.live.lines"
local log = require "pg.log"
local mesh = require "pg.mesh"
local process = require "pg.live.process"
local sources = require "pg.live.sources"
local swap = require "pg.live.swap"

local live = {}
local Run = {}
Run.__index = Run
local STOPPING = -1 -- the turn that stands on the board once the run has been asked to end
local AT_ONCE = 64  -- messages looked at between two steps
local claimed       -- the folder whose socket this process has

--- live.claim(folder): rank 0 makes the folder its own; raises where a live run has it.  Where no socket can be made
-- (a file system without them) the training goes on unreachable.
function live.claim(folder)
  if claimed == folder then return end
  local ok, why, taken = host.control_listen(folder)
  claimed = ok and folder or nil
  if taken then error(("%s: %s; pgrun stop ends it"):format(folder, why), 0) end
  if not ok then log.text("no socket in %s: %s; pgrun attach and stop will not reach this run", folder, why) end
end

local function open(trainer)
  local run = setmetatable({ turn = 0, queue = {} }, Run)
  trainer.live = run
  run.shared = host.shared()
  if host.rank == 0 then
    local state = trainer.state
    live.claim(state.run)
    if host.meeting() > 0 then host.meet(0) end -- of a training before this one
    run.told = process.begin(state.run, { recipe = trainer.info.path, ranks = mesh.size(), step = state.step,
                                          steps = state.steps })
    run:look_at(trainer, trainer.info.text and sources.running(trainer.info.path) or {})
  end
  return run
end

-- From now on these files, where the recipe wants it.
function Run:look_at(trainer, files)
  self.watch = trainer.recipe.live.watch and #files > 0 and sources.watch(files) or nil
end

-- ---- messages ----

function Run:status(trainer)
  local state = trainer.state
  return json.encode { step = state.step, steps = state.steps, loss = state.loss, ranks = mesh.size(),
                       recipe = trainer.info.path, run = state.run, attached = self.client ~= nil }
end

local take = {}

function take.A(self, id, text, trainer)
  if self.client and self.client ~= id then
    host.control_send(id, "E", ("%s attached already; one at a time"):format(self.who))
    return host.control_drop(id)
  end
  self.client, self.who = id, text ~= "" and text or "somebody is"
  host.control_keep(id)
  host.control_send(id, "K", self:status(trainer))
end

function take.L(self, id, text)
  if id ~= self.client then return host.control_send(id, "E", "attach first") end
  table.insert(self.queue, { id = id, text = "L" .. text })
end

function take.W(self, id, text)
  host.control_keep(id)
  self:propose(text, function(kind, answer) host.control_send(id, kind, answer) end, id)
end

function take.I() end -- the line that it was to stop has ended

function take.Q(self, id, _, trainer) host.control_send(id, "S", self:status(trainer)) end

function take.T(_, id, _, trainer)
  host.request_stop()
  host.meet(STOPPING)
  host.control_keep(id) -- it waits for the end, which closes the socket
  host.control_send(id, "K", tostring(trainer.state.step))
end

-- What peer `id`, which has left, had sent is not answered; only a wish to stop the run stays.
local function drop_heard(heard, id)
  for i = #heard, 1, -1 do
    if heard[i].id == id and heard[i].kind ~= "T" then table.remove(heard, i) end
  end
end

-- Whatever people have sent, up to now.  Who has left is forgotten before anybody is answered, so that a place is not
-- taken by somebody who is gone.  An id may come again, for another peer, once its peer has left.
function Run:listen(trainer)
  local heard = {}
  for _ = 1, AT_ONCE do
    local id, kind, text = host.control_next(0)
    if not id then break end
    if kind then heard[#heard + 1] = { id = id, kind = kind, text = text }
    else
      drop_heard(heard, id)
      self:forget(id)
    end
  end
  for _, m in ipairs(heard) do
    if take[m.kind] then take[m.kind](self, m.id, m.text, trainer)
    else
      host.control_send(m.id, "E", "there is no message of kind " .. m.kind)
      host.control_drop(m.id)
    end
  end
end

-- A peer that is gone, and what it still wanted.
function Run:forget(id)
  if id == self.client then self.client = nil end
  for i = #self.queue, 1, -1 do
    if self.queue[i].id == id then table.remove(self.queue, i) end
  end
end

--- run:propose(path, reply, id): offer the recipe in this file; reply(kind, text) hears what became of it.
function Run:propose(path, reply, id) table.insert(self.queue, { id = id, text = "W" .. path, reply = reply }) end

-- Offer what has been saved, once for each content.
function Run:look(trainer)
  local name = self.watch and self.watch:changed()
  if not name then return end
  log.text("%s was saved", name)
  self:propose(trainer.info.path, function(kind, _, offer)
    if kind == "E" and self.watch then self.watch:add(offer.files or {}) end -- what it would require
  end)
end

-- ---- meetings ----

-- Whether what stands in the queue can be served: recipes wait for the first step of the one before.
function Run:ready(trainer)
  local asked = self.queue[1]
  if not asked or trainer.change then return false end
  return asked.text:sub(1, 1) ~= "W" or trainer.state.step >= trainer.first
end

-- All ranks find the same.
function Run:meets(trainer)
  local asked = host.rank == 0 and self:ready(trainer)
  if mesh.size() == 1 then return asked end
  if not self.shared then return mesh.world:sum_numbers({ asked and 1 or 0 }, "max")[1] > 0 end
  local turn = host.meeting()
  if asked and turn < self.turn and turn ~= STOPPING then host.meet(self.turn + 1) end
  return turn == self.turn
end

function Run:meet(trainer)
  self.session = self.session or lines.new { keep = true }
  while true do
    local asked = self:ready(trainer) and table.remove(self.queue, 1) or { text = "" }
    local text = self.session:hear(asked.text)
    if text == "" then return end
    if text:sub(1, 1) == "L" then self:run_line(text:sub(2), trainer)
    else self:offer(text:sub(2), trainer, asked.reply) end
    if trainer.change then return self:meet_again() end
    if host.rank == 0 then self:listen(trainer) end
  end
end

-- What is left waits for the step between.
function Run:meet_again()
  if host.rank == 0 and self.shared and #self.queue > 0 and host.meeting() ~= STOPPING then host.meet(self.turn + 1) end
end

-- On all ranks.
function Run:run_line(text, trainer)
  local kept = trainer.engine:keep() -- and nothing is under way: a line may look at all, and keep ranks apart
  local at_hand = { model = trainer.model, optim = trainer.optim, state = trainer.state, recipe = trainer.recipe,
                    trainer = trainer }
  local client = self.client
  local said, well, hurt = self.session:run(text, { given = at_hand, client = client })
  if hurt then trainer.engine:abandon(kept) end -- what it has begun of a step's work has no end
  graph.forget() -- it may have changed what a step does
  if host.rank == 0 and client then host.control_send(client, "R", (well and "+" or "-") .. said) end
end

-- On all ranks; the first answers when it is known.
function Run:offer(path, trainer, reply)
  swap.offer(trainer, path, self.session, function(kind, answer, offer)
    if kind == "K" then self:look_at(trainer, offer.files) end
    reply(kind, answer, offer)
  end)
end

--- live.boundary(trainer): before each step, on all ranks.
function live.boundary(trainer)
  local run = trainer.live or open(trainer)
  run.turn = run.turn + 1
  if host.rank == 0 then
    run:listen(trainer)
    run:look(trainer)
  end
  if run:meets(trainer) then run:meet(trainer) end
end

--- live.close(trainer): when the last step is done and saved, on all ranks.
function live.close(trainer)
  local run = trainer.live
  if not run then return end
  trainer.live = nil
  -- its exit code is no failure, by which the launcher would break what another rank is still in
  if trainer.stopping then host.told() end
  if host.rank ~= 0 then return end
  run:listen(trainer)
  for _, asked in ipairs(run.queue) do
    if asked.id then host.control_send(asked.id, "E", ("the run has ended, at step %d"):format(trainer.state.step)) end
  end
  run.told.step = trainer.state.step
  process.finish(trainer.state.run, run.told, trainer.stopping and "stopped" or "done")
  host.control_close()
  claimed = nil
end

return live
