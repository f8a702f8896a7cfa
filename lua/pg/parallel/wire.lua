-- parallel/wire.lua: what goes between the stages of a pipeline: activations down, their gradients up.
-- Neighbours share a group of two, so that each direction has a queue (on the GPU: a stream) of its own and
-- nothing that waits in one holds up the other.  Sends never wait; what is sent is held until it has gone: until the
-- host sees that, or, where it is far ahead of a GPU, until a message comes that the receiver has sent later.
-- A stage does not know what shape another model's half makes.  So the first activation of each kind (chunk
-- and shape of the token batch, which both sides know) is preceded by a message that tells its shape.
local c = require "pg.c"
local mesh = require "pg.mesh"
local Tensor = require "pg.tensor"
local ffi = c.ffi

local wire = {}
local Wire = {}
Wire.__index = Wire
local HEAD = 10 -- numbers of a message that tells a shape: dtype, dims, up to 8 dims

--- wire.new(chunks) -> the wires of this stage; chunks: of each stage (more than one: the last stage also sends
-- to the first).  All ranks of mesh.pp call it.
function wire.new(chunks)
  local pp = mesh.pp
  local w = setmetatable({ down = { sent = 0 }, up = { sent = 0 }, told = {}, shapes = {} }, Wire)
  for a = 0, pp.size - (chunks > 1 and 1 or 2) do
    local b = (a + 1) % pp.size
    if a == pp.rank or b == pp.rank then
      local axis = pp:group({ a, b }, ("stages %d and %d"):format(a, b))
      if a == pp.rank then w.below = axis end
      if b == pp.rank then w.above = axis end
    end
  end
  return w
end

-- Into a queue of works, oldest first; each knows which message of w:begin() it belongs to.
local function post(queue, axis, t, peer)
  local work = axis:send(t, peer, true)
  work.message = queue.sent + 1
  queue[#queue + 1] = work
end

-- ---- activations ----

--- wire.kind(chunk, shape) -> a text for the activations that go into a chunk, of token batches of this shape.
function wire.kind(chunk, shape) return chunk .. ":" .. table.concat(shape, "x") end

local names = {}
for name, code in pairs(Tensor.codes) do names[tonumber(code)] = name end

local function shape_message(t)
  local numbers = ffi.new("int64_t[?]", HEAD)
  numbers[0], numbers[1] = Tensor.codes[t.dtype], #t.shape
  for i, d in ipairs(t.shape) do numbers[i + 1] = d end
  return Tensor.empty({ HEAD }, "i64"):write(numbers)
end

--- w:send_down(x, kind): an activation to the next stage.  kind: a text that both sides have for its shape.
function Wire:send_down(x, kind)
  if not self.told[kind] then
    self.told[kind] = true
    post(self.down, self.below, shape_message(x), 1)
  end
  post(self.down, self.below, x, 1)
  self.down.sent = self.down.sent + 1
end

--- w:receive_down(kind) -> the activation that the stage before has sent.
function Wire:receive_down(kind)
  local known = self.shapes[kind]
  if not known then
    local t = Tensor.empty({ HEAD }, "i64")
    self.above:recv(t, 0)
    local numbers, shape = t:buffer(), {}
    for i = 1, tonumber(numbers[1]) do shape[i] = tonumber(numbers[i + 1]) end
    known = { shape = shape, dtype = names[tonumber(numbers[0])] }
    self.shapes[kind] = known
  end
  local x = Tensor.empty(known.shape, known.dtype)
  self.above:recv(x, 0)
  return x
end

-- An activation of token batches [b,t] as it would be of [B,T]: rows in its first dim, or samples and positions.
local function resized(shape, b, t, B, T)
  local out = { unpack(shape) }
  if #shape > 2 and shape[1] == b and shape[2] == t then out[1], out[2] = B, T
  else out[1] = math.ceil(shape[1] * B * T / (b * t)) end
  return out
end

--- w:like_down(chunk, { B, T }) -> a tensor as chunk would receive it of such a token batch, judged by what it has
-- received: its numbers are not set.
function Wire:like_down(chunk, batch)
  local known = self.shapes[wire.kind(chunk, batch)]
  if known then return Tensor.empty(known.shape, known.dtype) end
  for kind, other in pairs(self.shapes) do
    local b, t = kind:match("^" .. chunk .. ":(%d+)x(%d+)$")
    if b then return Tensor.empty(resized(other.shape, tonumber(b), tonumber(t), batch[1], batch[2]), other.dtype) end
  end
  c.fail("chunk %d has received nothing yet", chunk)
end

-- ---- gradients ----

--- w:send_up(dx): the gradient of an activation to the stage before; w:receive_up(y) -> that of y.
function Wire:send_up(dx)
  post(self.up, self.above, dx, 0)
  self.up.sent = self.up.sent + 1
end

function Wire:receive_up(y)
  local dy = Tensor.empty(y.shape, y.dtype)
  self.below:recv(dy, 1)
  return dy
end

-- ---- what is under way ----

-- Lets go of the oldest `n` works of a queue after a wait (on a GPU the device's), and of others that have gone.
local function let_go(queue, n)
  local kept, count = 0, #queue
  for i = 1, count do
    local work = queue[i]
    queue[i] = nil
    if i <= n or work:done() then work:wait()
    else
      kept = kept + 1
      queue[kept] = work
    end
  end
end

--- w:begin(): messages are counted from 1 again; nothing is under way.
function Wire:begin() self.down.sent, self.up.sent = 0, 0 end

--- w:arrived(queue, number): the first `number` messages of w.down or w.up have been received: waiting for them, as
-- the memory's next user must, holds up nothing.
function Wire:arrived(queue, number)
  local n = 0
  while queue[n + 1] and queue[n + 1].message <= number do n = n + 1 end
  if n > 0 then let_go(queue, n) end
end

--- w:sweep(most): let go of what has gone; wait for the oldest while more than `most` each way are under way (nil:
-- never).
function Wire:sweep(most)
  for _, queue in ipairs { self.down, self.up } do let_go(queue, most and #queue - most or 0) end
end

local function copy(t)
  local out = {}
  for k, v in pairs(t) do out[k] = v end
  return out
end

--- w:forget(): what travels may have other shapes from now on; both sides of a wire forget between the same two steps.
function Wire:forget() self.told, self.shapes = {}, {} end

--- w:keep() -> what w:abandon(kept) takes: between two steps nothing is under way, and both sides of a wire have told
-- one another of the same kinds.
function Wire:keep() return { told = copy(self.told), shapes = copy(self.shapes) } end
function Wire:abandon(kept)
  self.down, self.up = { sent = 0 }, { sent = 0 }
  self.told, self.shapes = kept.told, kept.shapes
end

return wire
