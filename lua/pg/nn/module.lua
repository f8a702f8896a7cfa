-- nn/module.lua: a module is a Lua table with forward and named parameters.  Calling it runs forward in
-- a light scope, so that what backward does not need is gone when it returns.
--   local Mine = nn.class "Mine"
--   function Mine:init(o)
--     self.w, self.norm = self:param("w", { o.to, o.from }), self:add("norm", nn.RMSNorm { width = o.from })
--   end
--   function Mine:forward(x)  return ops.linear(self.norm(x), self.w)  end
local c = require "pg.c"
local params = require "pg.params"
local scope = require "pg.scope"

local Module = { is_module = true }
Module.__index = Module

--- Module.class(name, parent) -> a class; calling it makes an instance through init(settings).
function Module.class(name, parent)
  local class = setmetatable({ class_name = name, is_module = true }, {
    __index = parent or Module,
    __call = function(class, settings)
      local self = setmetatable({ own = {}, lent = {}, children = {} }, class)
      if self.init then self:init(settings or {}) end
      return self
    end })
  class.__index = class
  class.defined_at = debug.getinfo(2, "Sl") -- where help finds its comment
  class.__call = function(self, ...) return scope.light(self.forward, self, ...) end
  class.__tostring = Module.describe
  return class
end

--- module:param(name, shape, o) -> a parameter of this module (see params.new).
function Module:param(name, shape, o)
  local p = params.new(shape, o or {})
  self.own[#self.own + 1] = { name = name, p = p }
  return p
end

--- module:add(name, child, segment) -> child.  An empty name adds nothing to the full names; a segment
-- name (or true: the child's full name) gives the child's parameters a segment of their own.
function Module:add(name, child, segment)
  if type(child) ~= "table" or not child.is_module then c.fail("add: %s is no module", name) end
  self.children[#self.children + 1] = { name = name, module = child, segment = segment }
  return child
end

local function join(prefix, name) return name == "" and prefix or prefix .. name .. "." end

--- module:lend(p): p is another module's parameter that this one uses as well (a tied head).
function Module:lend(p)
  self.lent[#self.lent + 1] = p
  return p
end

--- module:each_parameter(f): f(parameter, prefix, name, segment name, absent, kin), depth first in order of adding;
-- absent: it belongs to a child that another rank holds (a pipeline's other stages); kin: what segments of children of
-- one module have in common, as long as no absent child is between them (buckets.lua).  A parameter lent to a
-- module comes again after that module's own, without prefix and names.
function Module:each_parameter(f, prefix, segment, absent, kin)
  prefix, segment = prefix or "", segment or "rest"
  local near = {}
  for _, own in ipairs(self.own) do f(own.p, prefix, own.name, segment, absent, kin) end
  for _, p in ipairs(self.lent) do f(p, nil, nil, nil, absent) end
  for _, child in ipairs(self.children) do
    local inner = join(prefix, child.name)
    local own = child.segment == true and (inner:gsub("%.$", "")) or child.segment
    if child.absent then near = {} end
    child.module:each_parameter(f, inner, own or segment, absent or child.absent or false, own and near or kin)
  end
end

--- module:parameters() -> its parameters that this rank holds, each once.
function Module:parameters()
  local list, seen = {}, {}
  self:each_parameter(function(p, _, _, _, absent)
    if not seen[p] and not absent then
      seen[p] = true
      list[#list + 1] = p
    end
  end)
  return list
end

--- module:named() -> list of { name, parameter, piece } for every named piece (after pg.build).
function Module:named()
  local list = {}
  for _, p in ipairs(self:parameters()) do
    for _, piece in ipairs(p.pieces) do list[#list + 1] = { name = piece.name, parameter = p, piece = piece } end
  end
  return list
end

--- module:gradient(name) -> a view of the gradient of that named piece, as the last step has left it.  Not where dp
-- shares gradients out: no rank has it whole.
function Module:gradient(name)
  local names = {}
  for i, entry in ipairs(self:named()) do
    names[i] = entry.name
    if entry.name == name then
      local p, piece = entry.parameter, entry.piece
      if not p.grad then c.fail("gradient: %s has none yet", name) end
      if p.segment and p.segment.level > 0 then
        c.fail("gradient: under layout.zero = %d no rank has that of %s whole; pg.gradients(model, name) tells of its "
               .. "shares", p.segment.level, name)
      end
      local shape = { unpack(piece.shape) }
      for _, run in ipairs(p.pieces) do -- its other runs of rows lie behind it
        if run ~= piece and run.name == name then shape[1] = shape[1] + run.shape[1] end
      end
      return p.grad:view(shape, piece.first)
    end
  end
  local near = c.nearest(tostring(name), names)
  c.fail("gradient: no parameter is named %s%s", tostring(name), near and ", did you mean " .. near .. "?" or "")
end

--- module:each_module(f): f(module, full name), itself first.
function Module:each_module(f, prefix)
  prefix = prefix or ""
  f(self, (prefix:gsub("%.$", "")))
  for _, child in ipairs(self.children) do child.module:each_module(f, join(prefix, child.name)) end
end

-- A piece's numbers out of the tensor t that it is a window of.
local function load_piece(v, piece, t)
  local dim = piece.dim
  if not dim or v.count == 0 then
    if v.count > 0 then v:copy_from(t) end
    return
  end
  local same = t.dtype == v.dtype and t or t:to(v.dtype)
  c.check(c.C.pg_slice(v.raw, same.raw, dim - 1, piece.start, 0))
  if same ~= t then same:release() end
end

-- The tensor of a piece among the numbers given, checked.
local function tensor_for(entry, numbers)
  local piece = entry.piece
  local t = numbers[entry.name] or c.fail("load: there is no tensor for parameter %s", entry.name)
  if table.concat(t.shape, ",") ~= table.concat(piece.whole, ",") then
    c.fail("load: %s is %s, the parameter is [%s] %s", entry.name, t:describe(), table.concat(piece.whole, ","),
           entry.parameter.dtype)
  end
  return t
end

--- module:load_numbers{ [name] = tensor }: set named pieces from whole tensors, of which this rank may hold a part;
-- unknown and missing names are errors, with nothing changed.  Masters follow.
function Module:load_numbers(numbers)
  local left, by_segment, order = {}, {}, {}
  for name in pairs(numbers) do left[name] = true end
  for _, entry in ipairs(self:named()) do
    tensor_for(entry, numbers)
    left[entry.name] = nil
    local s = entry.parameter.segment
    if not by_segment[s] then by_segment[s], order[#order + 1] = {}, s end
    table.insert(by_segment[s], entry)
  end
  local extra = next(left)
  if extra then c.fail("load: no parameter is named %s", extra) end
  for _, s in ipairs(order) do
    s:edit(function(flat)
      for _, entry in ipairs(by_segment[s]) do
        local v = flat:view(entry.piece.shape, entry.parameter.offset + entry.piece.first)
        load_piece(v, entry.piece, numbers[entry.name])
        v:free()
      end
    end)
  end
end

--- tostring(module) -> its classes and parameters as an indented tree.
function Module:describe(indent)
  indent = type(indent) == "string" and indent or ""
  local lines = { self.class_name or "Module" }
  for _, own in ipairs(self.own) do
    lines[#lines + 1] = ("%s  %s {%s}"):format(indent, own.name, table.concat(own.p.shape, ","))
  end
  for _, child in ipairs(self.children) do
    lines[#lines + 1] = ("%s  %s%s"):format(indent, child.name == "" and "" or child.name .. ": ",
                                            child.module:describe(indent .. "  "))
  end
  return table.concat(lines, "\n")
end

return Module
