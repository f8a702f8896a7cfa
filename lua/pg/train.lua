-- train.lua: the training loop of a recipe.  setup() builds what a step needs, Trainer:step() makes one, and
-- Trainer:run() decides what follows a step: evaluation, samples, lines, checkpoints, an early end.
-- One small collective a step carries the loss, the wish to stop (a signal may reach ranks between
-- different steps) and whether a rank's loss is not finite; so all ranks decide alike.
local c = require "pg.c"
local agree = require "pg.agree"
local busy = require "pg.busy"
local checkpoint = require "pg.checkpoint"
local choices = require "pg.choices"
local elementwise = require "pg.ops.elementwise"
local engine = require "pg.parallel.engine"
local host = require "pg.host"
local json = require "pg.json"
local layout = require "pg.parallel.layout"
local loader = require "pg.data.loader"
local live = require "pg.live"
local log = require "pg.log"
local measured = require "pg.parallel.measured"
local mesh = require "pg.mesh"
local parts = require "pg.train_parts"
local random = require "pg.random"
local recipe = require "pg.recipe"
local run = require "pg.run"
local scope = require "pg.scope"
local step_block = require "pg.step"
local swap = require "pg.live.swap"
local tape = require "pg.tape"
local watch = require "pg.watch"
local C, ffi = c.C, c.ffi

local train = {}
local Trainer = {}
Trainer.__index = Trainer
local SIGPIPE, SIGTERM = 13, 15
local CLOSED = 2^20 -- says that nobody reads rank 0's lines; more than there are ranks that may be asked to stop
local LINES, SILENCE = 30, 60 -- of a run, where the recipe does not say; seconds after which a line comes anyhow

-- ---- setting up ----

--- train.model(settings) -> the model that they name, in a single process, to be run and not trained.
function train.model(r) return pg.build(parts.described(r), { train = false }) end

local function setup(r, info)
  local t = setmetatable({ recipe = r, info = info }, Trainer)
  t.model, t.plan = unpack(recipe.guard(info, "model", parts.place, r))
  t.set = parts.set(r, info, t.model)
  t.held_out = parts.held_out(r, info, t.set, t.model)
  t.about = parts.about(r)
  t.optim = recipe.guard(info, "optim.rate", pg.optim[r.optim[1]], t.model:parameters(), parts.optim(r), t.about)
  -- model: the trainer's, or what stands for it on a pipeline's last stage
  t.engine = engine.new(t.model, t.optim.segments, { plan = t.plan, schedule = r.layout.schedule,
    loss = function(model, batch) return parts.loss(t.recipe, t.info, model, batch) end })
  parts.record(r, t)
  t.settings = run.settings(r)
  t.mfu = parts.mfu(r, t.model)
  t.state = { step = 0, steps = r.steps, tokens = 0, epoch = 0, position = 0 }
  t.shown, t.busy = {}, busy.new()
  t.loader = parts.loader(r, info, t.set)
  return t
end

-- Ranks that train the same have the same.
function Trainer:fingerprint()
  return tostring(c.hash(json.encode(self.settings)))
end

-- Where the run is kept, and what it goes on from; the ranks hear it from rank 0.
function Trainer:open_run()
  local source -- the run that it goes on from
  local seconds = tonumber(agree.text(function()
    source = self.info.resume and run.find(self.info)
    return tostring(source and checkpoint.reading(source) or 0)
  end))
  mesh.patient(seconds, self.open_folder, self, source)
end

function Trainer:open_folder(source)
  local info, state = self.info, self.state
  local resumed
  local told = agree.text(function()
    local from, m
    if source then
      from, m = checkpoint.newest(source, function(text) log.text("%s", text) end)
      checkpoint.fits(m, self.settings, self.set.train, source)
    end
    local stays = source and (not info.run or run.folder(info.run) == source)
    local folder = stays and source or run.place(info)
    if stays then live.claim(folder) end
    run.begin(folder, info, self.settings, stays and m)
    return ("%s\n%s\n%s"):format(folder, from or "", self:fingerprint())
  end)
  local first
  state.run, resumed, first = told:match "^([^\n]*)\n([^\n]*)\n(.*)$"
  if first ~= self:fingerprint() then
    error(("%s: rank %d has other settings than rank 0; a recipe must not depend on the rank")
          :format(info.path, host.rank), 0)
  end
  if resumed ~= "" then self:resume(resumed) end
  choices.share()
  if host.rank == 0 then self.files = log.open(state.run) end
end

function Trainer:resume(folder)
  local state = self.state
  local m = checkpoint.read(folder)
  agree.guard(checkpoint.load, folder, m, self.optim)
  choices.take(m.gemm_choices)
  state.step, state.tokens, state.position, state.epoch = m.step, m.tokens, m.position, m.epoch
  self.loader:seek(m.position)
  self.kept = { step = m.step, run = folder:match "^(.*)/checkpoints/" }
  log.text("resumed from %s: step %d, %s tokens behind it", folder, m.step, log.count(m.tokens))
end

function Trainer:header()
  local r, ranks = self.recipe, mesh.size()
  local context, batch = self.set.train.context, r.data.batch
  local each = self.loader.accumulation
  log.text("%s: %s, %d rank%s, %s parameters in %s", self.info.path, c.device(), ranks,
           ranks == 1 and "" or "s", log.count(self.plan.parameters), r.precision)
  log.text("%s tokens a step: %d sequences x %d, a rank takes %d micro-batch%s of %d", log.count(batch * context),
           batch, context, each, each == 1 and "" or "es", r.micro)
  if r.data.random then
    log.text("tokens: drawn at random, for timing; --data.tokens=GLOB trains on files of pgrun tokenize, "
             .. "--data.text=FILE on a text")
  end
  for _, line in ipairs(layout.lines(self.plan, r.layout, self.optim.segments, each)) do log.text("%s", line) end
  log.text("run: %s", self.state.run)
end

-- ---- a step ----

-- What the recipe's functions see of the state: they may keep things of their own in it and change nothing.
function Trainer:show()
  for _, key in ipairs { "step", "steps", "loss", "tokens", "epoch", "position", "run" } do
    self.shown[key] = self.state[key]
  end
  return self.shown
end

-- How often numbers without a key have been drawn.
local function drawn() return { random.calls, elementwise.dropout_calls } end
local function draw_from(counts) random.calls, elementwise.dropout_calls = counts[1], counts[2] end

-- This rank's share of the loss, and the gradients; o: as engine:gradients takes it.
function Trainer:gradients(o)
  return self.engine:gradients(self.micro, function(i) return self.loader:micro(i) end, o)
end

-- The gradients of this step once more, looked at before they are summed -> this rank's first bad one, by name.  All
-- ranks do it together; nothing was updated and the same is drawn, so they are the same.
function Trainer:blame()
  if engine.looks() then return nil end -- they have been looked at
  draw_from(self.drawn)
  self:gradients { look = true }
  for _, s in ipairs(self.optim.segments) do s:fresh() end
  return self.engine.bad
end

-- One update; the recipe's own rate (nil: it has not been asked) may be at fault.
function Trainer:update(known)
  local ok, norm, rate = pcall(self.optim.step, self.optim,
    { reduced = true, state = self:show(), rate = known, bad = self.engine.bad,
      blame = function() return scope.run(self.blame, self) end })
  if ok then return norm, rate end
  if type(norm) == "string" and norm:find "^rate" then recipe.fail(self.info, "optim.rate", "%s", norm) end
  agree.fail(tostring(norm) .. (self.swapped or ""))
end

local function finite(x) return x == x and x ~= math.huge and x ~= -math.huge end

-- The first of this rank's tensors that is not finite, for the message.
function Trainer:first_bad()
  for _, s in ipairs(self.optim.segments) do
    local found = watch.first_bad(s:pieces(s.own_value))
    if found then return "the parameter " .. found end
  end
  return "none among the parameters: the loss itself (PG_NAN=1 names the op)"
end

-- End, on all ranks, where a loss is not finite: the first rank that has such a one is named.
function Trainer:stop_nonfinite(loss)
  local function told(what)
    return ("step %d, rank %d: %s; nothing was updated"):format(self.state.step, mesh.rank(), what)
  end
  local first = agree.first(not finite(loss) and told(("the loss is %s; first bad tensor: %s"):format(
    tostring(loss), self:first_bad())) or nil)
  first = first or ("step %d: the sum of the ranks' losses is not finite"):format(self.state.step)
  agree.fail(first .. (self.swapped or ""))
end

-- A global batch with a target that counts; those without are passed over, and do not count as steps.
function Trainer:next_batch()
  local most = math.ceil(self.set.train.samples / self.recipe.data.batch) + 1
  for _ = 1, most do
    local batch = self.loader:next_step()
    self.state.position, self.state.epoch = batch.position, batch.epoch
    if batch.valid > 0 then return batch end
    log.text("step %d: the batch before sample %d has no target that counts: loss 0, passed over", self.state.step,
             batch.position)
  end
  agree.fail(("step %d: a whole epoch without a target that counts; look at data.pad"):format(self.state.step))
end

-- Before the first step of a deterministic run, the GPU's ranks agree on how each product is done: a rehearsal with
-- the same batch, whose gradients nobody uses, has made all choices.
function Trainer:settle_choices()
  if not (self.recipe.deterministic and c.device() == "cuda") then return end
  self:gradients()
  for _, s in ipairs(self.optim.segments) do s:fresh() end
  draw_from(self.drawn)
  choices.share()
end

--- trainer:gather(reshaped) -> { told, share, valid, bad }: a step up to its update: the gradients of the next batch
-- are there, and all ranks know its loss and who has been asked to stop.  reshaped: batches of another shape.
function Trainer:gather(reshaped)
  local state = self.state
  state.step = state.step + 1
  C.pg_status_step(state.step)
  local batch = self:next_batch()
  self.micro, self.drawn = batch.micro, drawn()
  if reshaped or state.step == self.first then self:settle_choices() end
  local share = self:gradients { trace = state.step == self.recipe.log.timeline }
  local stop = log.closed and CLOSED or host.stop_requested() and 1 or 0
  local numbers = { share, stop, finite(share) and 0 or 1 }
  self.busy:add(numbers)
  local told = mesh.world:sum_numbers(numbers)
  self.busy:note(told)
  state.loss, state.tokens = told[1], state.tokens + batch.valid
  self.about.tokens = state.tokens
  return { told = told, share = share, valid = batch.valid, bad = told[3] > 0 or not finite(told[1]) }
end

-- One optimiser step -> its record for the log.  Sets self.stopping where a rank has been asked to stop.
function Trainer:step()
  local state, before = self.state, C.pg_time()
  C.pg_mem_reset_peak()
  local made = self.change and swap.first_step(self) or self:gather()
  if made.bad then self:stop_nonfinite(made.share) end
  self.stopping = made.told[2] > 0 and (made.told[2] < CLOSED and SIGTERM or SIGPIPE)
  local norm, rate = self:update(made.rate)
  self.made = state.step
  local seconds = C.pg_time() - before
  self.seconds_of_step = seconds
  local speed = made.valid / seconds
  return { step = state.step, loss = state.loss, rate = rate, grad_norm = norm, tokens = state.tokens,
           tokens_per_s = speed, seconds = seconds, memory_peak = pg.memory().peak,
           mfu_causal = self.mfu and self.mfu.causal * speed, mfu_full = self.mfu and self.mfu.full * speed }
end

-- ---- between steps ----

-- This rank's sum of losses and count of targets over its share of the held-out samples.  Ranks that work
-- together on a batch stop together.
function Trainer:evaluate_share()
  local r, sum, count, e = self.recipe, 0, 0, self.engine
  local batches = r.eval and r.eval.batches
  local o = { pad = r.data.pad, samples = batches and batches * r.data.batch, even = r.layout.zero == 3 }
  local each, turn = loader.each(self.held_out, r.micro, mesh.dp, o), 0
  local look = mesh.pp.size > 1 and 4 * mesh.pp.size or 1 -- batches between two looks, at which stages wait
  repeat
    turn = turn + 1
    local more = scope.run(function()
      local batch = each() -- born in this scope, so that it ends with it
      if not batch then return false end
      local s, n = e:evaluate(batch)
      if not batch.idle then sum, count = sum + s, count + n end
      return true
    end)
  until not more or turn % look == 0 and e:asked(host.stop_requested())
  e:settle()
  return sum, count
end

--- The mean loss over the held-out data; nil where it has no target that counts, or where a rank has been
-- asked to stop meanwhile: the time left belongs to the save.
function Trainer:evaluate()
  local before = tape.context
  tape.context = { training = false, sample0 = 0, step = step_block.block() }
  local sum, count = tape.no_grad(self.evaluate_share, self)
  tape.context = before
  local told = mesh.world:sum_numbers { sum, count, host.stop_requested() and 1 or 0 }
  if told[3] > 0 then self.stopping = SIGTERM end
  return not self.stopping and told[2] > 0 and told[1] / told[2] or nil
end

-- Those ranks write that hold a model with rank 0, each the same text; rank 0 tells it.
function Trainer:sample()
  if mesh.dp.rank > 0 and mesh.layout.zero < 3 then return end
  local s = self.recipe.sample
  local text = pg.generate(self.engine:writer(), s.prompt, { tokens = s.tokens, temperature = s.temperature,
                                                             seed = self.recipe.seed })
  self.engine:settle()
  if host.rank ~= 0 then return end
  text = text:gsub("[%z\1-\8\11-\31\127]", "?") -- what would move a terminal's cursor
  log.text("---- sample, step %d ----\n%s\n----", self.state.step, text)
  self.files:text("sample", self.state.step, text)
end

function Trainer:manifest()
  local state, r, stream = self.state, self.recipe, self.set.train
  return { step = state.step, position = state.position, tokens = state.tokens, epoch = state.epoch, seed = r.seed,
           random = { step = self.optim.steps }, settings = self.settings, recipe = self.info.path,
           data = { seed = r.data.seed, context = stream.context, samples = stream.samples },
           layout = { dp = mesh.dp.size, pp = mesh.pp.size, tp = mesh.tp.size, zero = r.layout.zero },
           precision = r.precision, gemm_choices = choices.text(),
           optimizer = { name = r.optim[1], steps = self.optim.steps }, libraries = ffi.string(C.pg_version_info()) }
end

-- All ranks write, and all hear how it went.
function Trainer:save()
  local save = self.recipe.save
  local ok, told = pcall(checkpoint.save, self.state.run, self.optim, self:manifest(), save.keep)
  self.unsaved = not ok
  if ok then
    self.kept = { step = self.state.step, run = self.state.run }
    log.text("saved %s", told)
  elseif save.on_error == "stop" then
    agree.fail(told .. "; the checkpoints before it stand; save.on_error = \"go on\" would go on")
  else
    log.text("%s; going on, the checkpoints before it stand", told)
  end
end

local function due(group, step, last)
  if not group then return false end
  return last or (group.every > 0 and step % group.every == 0)
end

-- A line every so often, else the live line.
function Trainer:tell(record, last)
  local state = self.state
  self.seconds = (self.seconds or 0) + record.seconds
  self.counted = (self.counted or 0) + record.tokens_per_s * record.seconds
  self.pace = self.pace and 0.9 * self.pace + 0.1 * record.seconds or record.seconds
  local speed = self.counted / self.seconds
  local left = log.duration(self.pace * (state.steps - state.step))
  local text = ("step %d/%d  loss %.4f  rate %.3g  norm %.3g  %s tokens/s  %s  %s left"):format(
    state.step, state.steps, record.loss, record.rate, record.grad_norm, log.count(speed),
    log.bytes(record.memory_peak), left)
  local slow = self.busy:slowest()
  if slow then text = text .. "  " .. slow end
  if record.val_loss then text = text .. ("  val_loss %.4f"):format(record.val_loss) end
  local every, now = self.recipe.log.every or math.max(1, math.floor(state.steps / LINES)), C.pg_time()
  local silent = not self.recipe.log.every and now - (self.told or now) > SILENCE
  if state.step % every == 0 or state.step == self.first or last or record.val_loss or silent then
    log.text("%s", text)
    self.seconds, self.counted, self.told = 0, 0, now
    self.busy:reset()
  else
    log.live(text)
  end
end

-- What follows a step.
function Trainer:after(record)
  local r, state = self.recipe, self.state
  local last = state.step >= state.steps
  if self.held_out and not self.stopping and due(r.eval or { every = 0 }, state.step, last) then
    record.val_loss = self:evaluate()
  end
  if self.files then self.files:write(record) end
  self:tell(record, last or self.stopping)
  if self.engine.trace then
    measured.tell(self.engine, ("%s/timeline-%d"):format(state.run, state.step), state.step)
  end
  if state.step == self.first then
    choices.share()
    if host.rank == 0 then choices.keep(state.run) end
  end
  if r.save and (due(r.save, state.step, last and r.save.at_end) or self.stopping) then self:save() end
  if r.on_step then r.on_step(self:show()) end -- after the save, which no mistake in it can prevent
  if not self.stopping and due(r.sample, state.step, last) then self:sample() end
end

-- How to go on, and what is lost of the steps that were made.
function Trainer:outlook()
  local made, kept = self.made, self.kept -- kept: { step, run } of the newest checkpoint
  local lost = made - (kept and kept.step or 0)
  local text = lost == 1 and ("step %d is lost"):format(made)
    or ("steps %d to %d are lost"):format(made - lost + 1, made)
  if kept then
    return ("%s--resume=%s goes on from step %d"):format(lost > 0 and text .. "; " or "", kept.run, kept.step)
  elseif lost == 0 then return "nothing was saved" end
  return ("%s: nothing was saved; %s"):format(text, self.recipe.save and "pgrun stop saves first"
                                                or "a recipe with save = {} is saved by pgrun stop")
end

local under_way = setmetatable({}, { __mode = "v" }) -- { trainer } while one runs

-- What is said of Ctrl-C.
local function interrupted()
  local self = under_way[1]
  if not self then return nil end
  local state = self.state
  log.live ""
  return ("interrupted %s step %d of %d; %s"):format(state.step > self.made and "in" or "after", state.step,
                                                     state.steps, self:outlook())
end

function Trainer:run()
  local state, start, tokens = self.state, C.pg_time(), self.state.tokens
  self.first, self.made = state.step + 1, state.step
  under_way[1] = self
  host.when_interrupted(interrupted)
  if self.first > state.steps then log.text("nothing left to do; --steps=%d would go on", state.steps + state.step) end
  while state.step < state.steps and not self.stopping do
    live.boundary(self)
    self:after(scope.run(self.step, self))
  end
  parts.record({ graphs = false }, self)
  live.close(self)
  log.text("%s at step %d of %d: %s tokens in %s%s", self.stopping and "stopped, as asked," or "done", state.step,
           state.steps, log.count(state.tokens - tokens), log.duration(C.pg_time() - start),
           self.stopping and "; " .. self:outlook() or "")
end

--- train.run(settings, info) -> the exit code.  settings: what recipe.resolve returned; info: path, text,
-- args, run and resume (see run.lua).
function train.run(settings, info)
  host.claim_stop(true)
  local t = setup(settings, info)
  t:open_run()
  t:header()
  t:run()
  if t.files then t.files:close() end
  host.claim_stop(false)
  under_way[1] = nil
  if t.stopping then return 128 + t.stopping end -- not all of the work was done
  return (t.unsaved or t.files and t.files.told) and 1 or 0 -- or not all of it was kept
end

return train
