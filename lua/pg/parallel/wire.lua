-- parallel/wire.lua: what goes between the stages of a pipeline: activations down, their gradients up.
-- Neighbours share a group of two, so that each direction has a queue (on the GPU: a stream) of its own and
-- nothing that waits in one holds up the other.  Sends never wait; what is sent is held until it has gone.
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
  local w = setmetatable({ works = {}, told = {}, shapes = {} }, Wire)
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

local function post(w, axis, t, peer)
  w.works[#w.works + 1] = axis:send(t, peer, true)
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
    post(self, self.below, shape_message(x), 1)
  end
  post(self, self.below, x, 1)
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
function Wire:send_up(dx) post(self, self.above, dx, 0) end

function Wire:receive_up(y)
  local dy = Tensor.empty(y.shape, y.dtype)
  self.below:recv(dy, 1)
  return dy
end

-- ---- what is under way ----

--- w:sweep(most): let go of what has gone; wait for the oldest while more than `most` are under way (nil: never).
function Wire:sweep(most)
  local works, n, kept = self.works, #self.works, 0
  for i = 1, n do
    local work = works[i]
    works[i] = nil
    if work:done() or most and kept + n - i + 1 > most then work:wait()
    else
      kept = kept + 1
      works[kept] = work
    end
  end
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
function Wire:abandon(kept) self.works, self.told, self.shapes = {}, kept.told, kept.shapes end

return wire
