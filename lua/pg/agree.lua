-- agree.lua: what all ranks must know before they go on: one rank's word for all, one rank's failure
-- told to all.  A mistake that every rank sees is reported once, by rank 0.
local c = require "pg.c"
local host = require "pg.host"
local mesh = require "pg.mesh"
local Tensor = require "pg.tensor"
local ffi = c.ffi

local agree = {}
local PATIENCE = 3 -- seconds that rank 0 has to report what all have seen
local PACKET = 16384 -- bytes that go with the length of a text
local trying = false

--- agree.fail(message): raise a mistake that all ranks are about to report.  Where others ran into it as
-- well, rank 0 speaks first and the launcher ends the rest; where this rank is alone with it, it speaks.
function agree.fail(message)
  if not trying and host.rank > 0 and host.first_failed(PATIENCE) then -- rank 0 has told it
    c.C.pg_status_fail(tostring(message)) -- later than rank 0, so that this end is not taken for the first
    os.exit(1, true)
  end
  error(message, 0)
end

--- agree.try(f, ...) -> as pcall.  What f raises ends no rank, so agree.fail in it waits for nobody.
function agree.try(f, ...)
  local before = trying
  trying = true
  local function done(...)
    trying = before
    return ...
  end
  return done(pcall(f, ...))
end

--- agree.guard(f, ...) -> what f returns; what it raises goes through agree.fail.
local function passed(ok, ...)
  if not ok then agree.fail((...)) end
  return ...
end
function agree.guard(f, ...) return passed(pcall(f, ...)) end

-- One broadcast of bytes; on the root they are `bytes` from `first` on.
local function broadcast_bytes(bytes, first, n, root, axis)
  local buffer = ffi.new("uint8_t[?]", n)
  local part = axis.rank == root and bytes:sub(first + 1, first + n) or ""
  ffi.copy(buffer, part, #part)
  local t = Tensor.empty({ n }, "u8"):write(buffer)
  axis:broadcast(t, root)
  local got = ffi.string((t:buffer()), n)
  t:release()
  return got
end

-- The text of rank `root` of the axis (the world) on its every rank; nobody else's is looked at.  One broadcast for
-- short texts, two for others.
local function broadcast(text, root, axis)
  axis = axis or mesh.world
  local head = broadcast_bytes(("%16d%s"):format(#text, text), 0, PACKET, root, axis)
  local n = tonumber(head:sub(1, 16))
  if n <= PACKET - 16 then return head:sub(17, 16 + n) end
  return head:sub(17) .. broadcast_bytes(text, PACKET - 16, n - PACKET + 16, root, axis)
end

--- agree.text(f, ...) -> on every rank the text that f(...) returns on rank 0.  What it raises there is
-- raised on all.
function agree.text(f, ...)
  if mesh.size() == 1 then return f(...) end
  local ok, text = true, ""
  if mesh.rank() == 0 then ok, text = pcall(f, ...) end
  local got = broadcast((ok and "+" or "-") .. text, 0)
  if got:sub(1, 1) == "-" then agree.fail(got:sub(2)) end
  return got:sub(2)
end

--- agree.tell(text, axis) -> rank 0's text, on every rank (of the axis, the world).
function agree.tell(text, axis)
  if mesh.size() == 1 then return text end
  return broadcast(text or "", 0, axis)
end

--- agree.texts(text) -> the texts of all ranks, in their order, on every rank.
function agree.texts(text)
  local size, rank = mesh.size(), mesh.rank()
  if size == 1 then return { text } end
  local lengths, most, out = {}, 1, {}
  for r = 0, size - 1 do lengths[r + 1] = r == rank and #text or 0 end
  lengths = mesh.world:sum_numbers(lengths)
  for _, n in ipairs(lengths) do most = math.max(most, n) end
  local buffer = ffi.new("uint8_t[?]", most)
  ffi.copy(buffer, text, #text)
  local part, all = Tensor.empty({ most }, "u8"):write(buffer), Tensor.empty({ size * most }, "u8")
  mesh.world:all_gather(all, part)
  local got = all:buffer()
  for r, n in ipairs(lengths) do out[r] = ffi.string(got + (r - 1) * most, n) end
  part:release()
  all:release()
  return out
end

--- agree.together(f, ...) -> what f(...) returns.  Where it raises on any rank, the message of the first such rank
-- is raised on all.
function agree.together(f, ...)
  local ok, result = pcall(f, ...)
  local mine = not ok and tostring(result) or nil
  if mine and mesh.rank() > 0 then mine = ("rank %d: %s"):format(mesh.rank(), mine) end
  local wrong = agree.first(mine)
  if wrong then error(wrong, 0) end
  return result
end

--- agree.first(message, axis) -> nil where no rank (of the axis, the world) brings a message, else that of the first
-- rank that does, and this rank.  One small collective where all is well.
function agree.first(message, axis)
  local size = mesh.size()
  if size == 1 then return message, message and 0 end
  axis = axis or mesh.world
  local first = axis:sum_numbers({ message and axis.rank or axis.size }, "min")[1]
  if first == axis.size then return nil end
  return broadcast(message or "", first, axis), first
end

--- agree.origin(message): as agree.first, but ranks of a later stage of a pipeline come first: what spoils
-- gradients spreads towards the first stage.
function agree.origin(message)
  for stage = mesh.pp.size - 1, 0, -1 do
    local found = agree.first(mesh.pp.rank == stage and message or nil)
    if found then return found end
  end
end

return agree
