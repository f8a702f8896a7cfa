-- live/groups.lua: the groups of ranks that lines of the prompt use.  A line may leave a collective half done;
-- so where a training goes on afterwards it works on duplicates, and either way they are made whole again:
-- cancelled by the rank that found it out, then reformed by all.
-- An axis of the mesh keeps its identity, since models and optimisers hold it: only its comm is exchanged.
local c = require "pg.c"
local mesh = require "pg.mesh"
local C, ffi = c.C, c.ffi

local Groups = {}
Groups.__index = Groups
local AXES = { "world", "pp", "dp", "tp", "layout", "groups" }

--- groups.new(duplicate) -> the groups of a session.  duplicate: lines must not touch those there are.
local function new(duplicate)
  return setmetatable({ duplicate = duplicate, twins = {} }, Groups)
end

local function copy_of(axis)
  local n = #axis.members
  local ranks = ffi.new("int32_t[?]", n)
  for i = 1, n do ranks[i - 1] = axis.members[i] end
  return mesh.split(ranks, n, axis.name)
end

--- groups:own(name) -> an axis of all ranks that no line knows; all ranks call it.
function Groups:own(name)
  local world = mesh.world
  local axis = setmetatable({ name = name, rank = world.rank, size = world.size }, getmetatable(world))
  if world.size > 1 then
    axis.members = world.members
    axis.comm = copy_of(axis)
  end
  return axis
end

--- groups:prepare(): duplicates of what has come since; all ranks call it, before a line.
function Groups:prepare()
  if not self.duplicate then return end
  for _, axis in ipairs(mesh.groups) do
    if axis.size > 1 and not self.twins[axis] then self.twins[axis] = copy_of(axis) end
  end
end

--- groups:enter(), groups:leave(): the line runs in between.
function Groups:enter()
  self.mesh = {}
  for _, name in ipairs(AXES) do self.mesh[name] = mesh[name] end
  self.comms = {}
  if not self.duplicate then return end
  for axis, twin in pairs(self.twins) do
    self.comms[axis], axis.comm = axis.comm, twin
  end
end

function Groups:leave()
  for axis, comm in pairs(self.comms) do axis.comm = comm end
  if self.duplicate then -- a line may have laid out a mesh of its own
    for _, name in ipairs(AXES) do mesh[name] = self.mesh[name] end
  end
end

-- The communicators that lines use, in the order of making.
function Groups:comms_of_lines()
  local list = {}
  for _, axis in ipairs(mesh.groups) do
    if axis.size > 1 then list[#list + 1] = self.duplicate and self.twins[axis] or axis.comm end
  end
  return list
end

--- groups:cancel(reason): whoever waits in one of them, or comes later, is told so.
function Groups:cancel(reason)
  for _, comm in ipairs(self:comms_of_lines()) do c.check(C.pg_comm_cancel(comm, reason)) end
end

--- groups:reform(): whole again; all ranks call it, after the line.
function Groups:reform()
  for _, comm in ipairs(self:comms_of_lines()) do c.check(C.pg_comm_reform(comm)) end
end

return { new = new }
