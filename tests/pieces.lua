-- pieces.lua: the named tensors of a model, for the tests of ZeRO and of checkpoints; a small model with every way in
-- which a layout cuts a parameter, and its passage through a checkpoint.
local c = require "pg.c"
local checkpoint = require "pg.checkpoint"
local fs = require "pg.fs"
local mesh = require "pg.mesh"
local nn = require "pg.nn"
local params = require "pg.params"
local C = c.C

local pieces = {}
local WIDTH, KV = 12, 2 -- numbers of a row; heads of k and v
local BLOCK = 0.0012 -- MiB

-- Rows that are padded when they are cut: 5 over 4 ranks are 2, 2, 1 and none.
local Table = nn.class "Table"
function Table:init() self.weight = self:param("weight", { 5, WIDTH }, { split = 1 }) end
function Table:split_over() params.cut(self.weight, { pad = true }) end

-- Rows in pieces, of which k and v may be on several ranks; columns; what nobody cuts.
local Block = nn.class "Block"
function Block:init()
  self.qkv = self:param("qkv", { 8 + 2 * KV, WIDTH }, { split = 1, pieces = {
    { name = "q.weight", rows = 8 }, { name = "k.weight", rows = KV }, { name = "v.weight", rows = KV } } })
  self.norm = self:param("norm.weight", { WIDTH }, { init = { "normal", 1 } })
  self.out = self:param("out.weight", { 7, WIDTH }, { split = 2 })
  self.bias = self:param("out.bias", { 8 }, { split = 1, init = { "uniform", 1 } })
end
function Block:split_over(axis)
  for i = 2, 3 do self.qkv.pieces[i].copies = math.max(1, axis.size / KV) end
  for _, own in ipairs(self.own) do params.cut(own.p) end
end

local Head = nn.class "Head"
function Head:init(o) self.weight = self:lend(o.weight) end

-- Table and a block on the first stage, a block and the head, which has the table's rows, on the last.
local Model = nn.class "Model"
function Model:init()
  local stages = mesh.pp.size
  local function add(stage, name, child)
    self:add(name, child, true)
    self.children[#self.children].absent = stages > 1 and stage ~= mesh.pp.rank
  end
  local rows = Table()
  if stages > 1 then rows.weight.alone, rows.weight.stages = true, stages end
  add(0, "table", rows)
  add(0, "layers.0", Block())
  add(1, "layers.1", Block())
  add(1, "head", Head { weight = rows.weight })
end

--- pieces.trainee(layout, seed, dtype, moments) -> an optimiser of such a model.  Equal seeds: equal weights in every
-- layout.  Segments differ between layouts: all in one, or at odd levels of ZeRO about one for each block.
function pieces.trainee(layout, seed, dtype, moments)
  mesh.build(layout)
  local bucket = (layout.zero or 0) % 2 == 1 and BLOCK or nil
  local model = params.build(Model(), { seed = seed, dtype = dtype, bucket = bucket })
  return pg.optim.adamw(model:parameters(), { rate = 1e-3, moments = moments }, { seed = seed })
end

--- pieces.manifest(step)
function pieces.manifest(step) return { step = step, position = 8 * step, tokens = 256 * step, epoch = 0 } end

--- pieces.states(optim) -> { { name, view, first, piece }, ... }: every moment under MOMENT.PARAMETER, what lies in
-- this rank's window.
function pieces.states(optim)
  local out = {}
  for _, s in ipairs(optim.segments) do
    for _, moment in ipairs(optim.moments) do
      for _, piece in ipairs(s:pieces(optim.states[s][moment])) do
        piece.name = moment .. "." .. piece.name
        out[#out + 1] = piece
      end
    end
  end
  return out
end

--- pieces.moments(optim): numbers that differ everywhere, for a layout where each rank holds all.
function pieces.moments(optim)
  for _, piece in ipairs(pieces.states(optim)) do
    c.check(C.pg_random_normal(piece.view.raw, 5, c.hash(piece.name), 0, 1, 0, 0, 0))
    piece.view:free()
  end
end

local files = { "model.safetensors", "optimizer.safetensors" }

--- pieces.weights(model) -> { name = list of numbers }, whole tensors.  All ranks of dp call it.
function pieces.weights(model)
  local out = {}
  local function read(s, flat)
    for _, piece in ipairs(s:pieces(flat)) do
      out[piece.name] = piece.view:view({ piece.view.count }, 0):totable()
      piece.view:free()
    end
  end
  for _, s in ipairs(model.segments) do s:edit(function(flat) read(s, flat) end) end
  return out
end

--- pieces.same_files(a, b): two checkpoints hold the same bytes.
function pieces.same_files(a, b, what)
  for _, name in ipairs(files) do
    assert(fs.read(a .. "/" .. name) == fs.read(b .. "/" .. name), ("%s: %s differs"):format(what, name))
  end
end

-- The weights of two models, number for number: what this rank updates, and what it has gathered.
local function same_weights(got, want, what)
  for i, s in ipairs(want.segments) do
    local other = got.segments[i]
    local function compare(a, b, name)
      a, b = a:totable(), b:totable()
      for j = 1, #b do
        assert(a[j] == b[j], ("%s: %s[%d] is %.9g, not %.9g"):format(what, name, j, a[j], b[j]))
      end
    end
    compare(other:read_numbers(), s:read_numbers(), s.name)
    for _, one in ipairs { other, s } do
      one:bring()
      one:ready()
    end
    for k, p in ipairs(s.params) do compare(other.params[k], p, p.name) end
  end
end

--- pieces.pass(from, folder, layout, seed, dtype): load a checkpoint in a layout and precision, find the weights of
-- that seed, save it under the folder -> the new checkpoint, which holds the same bytes.
function pieces.pass(from, folder, layout, seed, dtype)
  local what = ("pp %d dp %d tp %d zero %d %s"):format(layout.pp or 1, layout.dp or 1, layout.tp or 1,
                                                       layout.zero or 0, dtype or "f32")
  local optim = pieces.trainee(layout, seed + 1, dtype)
  local m = checkpoint.read(from)
  checkpoint.load(from, m, optim)
  same_weights(optim, pieces.trainee(layout, seed, dtype), what)
  local path = checkpoint.save(folder, optim, pieces.manifest(m.step + 1), 100)
  pg.barrier()
  pieces.same_files(path, from, what)
  return path
end

return pieces
