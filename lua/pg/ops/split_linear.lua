-- ops/split_linear.lua: linear layers whose weight is cut over the R ranks of an axis, between activations of which
-- each rank holds n of the R n rows (sequence parallelism, Korthikanti et al. 2022):
--   linear_gathered   weight [out/R,in]   rows of all ranks are gathered, then multiplied
--   linear_scattered  weight [out,in/R]   multiplied, then the ranks' products summed, each rank keeping its rows
-- The gradient of one has the form of the other.  Gathered rows are not kept: backward gathers them again for the
-- weight, while the product for the input runs, and that product is summed while the weight's runs.
-- With more than one chunk (mesh.layout.tp_chunks) rows travel beside products: of gathered rows a rank multiplies its
-- own first, and then the others', which come in chunks - 1 pieces; of two ranks each multiplies the other's rows first
-- and sends them while it multiplies its own; more ranks sum their products in as many pieces as there are chunks.
-- A piece as it travels is [R, rows of the piece, width]; products take it apart, so the order of rows stays.
local c = require "pg.c"
local gemm = require "pg.gemm"
local mesh = require "pg.mesh"
local Tensor = require "pg.tensor"
local tape = require "pg.tape"
local done = require("pg.watch").done
local C = c.C

local ops = {}
local LEAST = 512 -- rows of a chunk on a GPU: with fewer a product does not fill it
local USUAL = 2 -- chunks there: large products lose least

-- Into how many pieces n rows of a rank are cut.
local function chunks_of(n)
  local asked = mesh.layout.tp_chunks
  if not asked then asked = c.device() == "cuda" and math.min(USUAL, math.floor(n / LEAST)) or 1 end
  return math.max(1, math.min(asked, n))
end

-- The i-th (0-based) of `chunks` pieces of n rows -> its first row, its rows.
local function piece(n, chunks, i)
  local first = math.floor(n * i / chunks)
  return first, math.floor(n * (i + 1) / chunks) - first
end

local function rows_of(t, first, count) return t:view({ count, t.shape[2] }, first * t.shape[2]) end

local function flat(t) return t:view({ -1, t.shape[#t.shape] }) end

-- Rows [first, first + a's rows) of y (and of o.aux) from a: y = epilogue(a w + bias) + beta y; o.name: for messages.
local function product(y, first, a, w, o)
  local part = rows_of(y, first, a.shape[1])
  local aux = o.aux and rows_of(o.aux, first, a.shape[1])
  done(o.name, C.pg_matmul(part.raw, a.raw, w.raw, gemm.options(false, o.tb, 1, o.beta, o.bias, o.epilogue, aux)), part)
  part:release()
  if aux then aux:release() end
end

local function gather_whole(axis, x, async)
  local whole = Tensor.empty({ axis.size * x.shape[1], x.shape[2] }, x.dtype)
  return whole, axis:all_gather(whole, x, async)
end

-- The pieces of all ranks' rows, under way -> { { rows = [R,rows,width], first, count, work }, ... }.
local function send_pieces(axis, x, chunks)
  local pieces = {}
  for i = 0, chunks - 1 do
    local first, count = piece(x.shape[1], chunks, i)
    local own, rows = rows_of(x, first, count), Tensor.empty({ axis.size, count, x.shape[2] }, x.dtype)
    pieces[i + 1] = { rows = rows, first = first, count = count, work = axis:all_gather(rows, own, true) }
    own:release()
  end
  return pieces
end

-- The products of all rows but this rank's, in at most two pieces.
local function products_of_others(axis, y, whole, n, w, o)
  local before, behind = axis.rank * n, (axis.rank + 1) * n
  for _, range in ipairs { { 0, before }, { behind, axis.size * n - behind } } do
    if range[2] > 0 then
      local part = rows_of(whole, range[1], range[2])
      product(y, range[1], part, w, o)
      part:release()
    end
  end
end

-- The same where they come in pieces; their rows go to `whole` as well, if it is given.
local function products_of_pieces(axis, y, pieces, n, w, o, whole)
  for _, p in ipairs(pieces) do
    p.work:wait()
    for r = 0, axis.size - 1 do
      local part = p.rows:view({ p.count, p.rows.shape[3] }, r * p.count * p.rows.shape[3])
      if r ~= axis.rank then product(y, r * n + p.first, part, w, o) end
      if whole then
        local place = rows_of(whole, r * n + p.first, p.count)
        place:copy_from(part)
        place:release()
      end
      part:release()
    end
    p.rows:release()
  end
end

-- y [R n,out] = (the rows x [n,in] of all ranks) w, with o = { name, tb, bias, epilogue, aux, beta, keep } -> the
-- gathered rows, where o.keep asks for them.
local function product_of_gathered(axis, y, x, w, o)
  local n, chunks = x.shape[1], chunks_of(x.shape[1])
  local whole
  if chunks == 1 then
    whole = gather_whole(axis, x)
    product(y, 0, whole, w, o)
  elseif chunks == 2 then
    local work
    whole, work = gather_whole(axis, x, true)
    product(y, axis.rank * n, x, w, o)
    work:wait()
    products_of_others(axis, y, whole, n, w, o)
  else
    local pieces = send_pieces(axis, x, chunks - 1)
    whole = o.keep and Tensor.empty({ axis.size * n, x.shape[2] }, x.dtype) or nil
    product(y, axis.rank * n, x, w, o)
    products_of_pieces(axis, y, pieces, n, w, o, whole)
  end
  if whole and not o.keep then return whole:release() end
  return whole
end

-- Of two ranks: the product of the other's rows travels while this rank multiplies its own.
local function exchange_products(axis, out, x, w, o)
  local n, peer = out.shape[1], 1 - axis.rank
  local theirs, ours = rows_of(x, peer * n, n), rows_of(x, axis.rank * n, n)
  local away, addend = Tensor.like(out), Tensor.like(out)
  product(away, 0, theirs, w, o)
  local receiving, sending = axis:recv(addend, peer, true), axis:send(away, peer, true)
  product(out, 0, ours, w, o)
  for _, t in ipairs { theirs, ours, away } do t:release() end
  local function finish()
    receiving:wait()
    c.check(C.pg_axpby(out.raw, addend.raw, 1, 1))
    addend:release()
  end
  return { sending, { wait = finish } }
end

-- All ranks' products of a piece are summed, while the next piece is multiplied.
local function sum_in_pieces(axis, out, x, w, o, chunks)
  local n, works = out.shape[1], {}
  for i = 0, chunks - 1 do
    local first, count = piece(n, chunks, i)
    local addends = Tensor.empty({ axis.size * count, out.shape[2] }, out.dtype)
    if chunks == 1 then product(addends, 0, x, w, o)
    else
      for r = 0, axis.size - 1 do
        local part = rows_of(x, r * n + first, count)
        product(addends, r * count, part, w, o)
        part:release()
      end
    end
    local place = rows_of(out, first, count)
    works[i + 1] = axis:reduce_scatter(place, addends, "sum", true)
    place:release()
    addends:release()
  end
  return works
end

-- out [n,width] = this rank's rows of the sum over ranks of x [R n,in] w, with o = { name, tb } -> works to wait for.
local function scatter_product(axis, out, x, w, o)
  local chunks = chunks_of(out.shape[1])
  if chunks > 1 and axis.size == 2 then return exchange_products(axis, out, x, w, o) end
  return sum_in_pieces(axis, out, x, w, o, chunks)
end

local function wait_all(works)
  for _, work in ipairs(works) do work:wait() end
end

-- dw (+)= dy^T x
local function weight_gradient(dw, dy, x, add) gemm.product(dw, dy, x, true, false, add) end

-- Rows in, columns out ----------------------------------------------------------------------------

local BACK = { name = "matmul" } -- of gradients: the tape says whose

local GATHERED = { name = "linear_gathered", weights = { [2] = true, [3] = true }, mixed = true, remakes = { true },
                   again_if = function(r) return r.a.activation end, again = gemm.again,
                   again_needs = gemm.again_needs }

-- The rows of all ranks for the weight's gradient: saved or made again here, and sent.
local function gather_saved(r, async)
  local x, again = tape.saved(r, 1)
  local own = flat(x)
  r.whole, r.gathering = gather_whole(r.a.axis, own, async)
  own:release()
  if again then x:release() end
end

function GATHERED.grad_input(r, dy, d, add)
  local axis, g = r.a.axis, flat(gemm.before_epilogue(r, dy))
  if tape.wanted(r.inputs[2]) and not r.put_off then gather_saved(r, true) end
  if d[1] then
    local into = flat(d[1])
    local sum = add[1] == 1 and Tensor.like(into) or into
    r.under_way = { works = scatter_product(axis, sum, g, r.saved[2], BACK), sum = sum, into = into }
  end
  g:release()
end

function GATHERED.settle(r)
  local u = r.under_way
  if not u then return end
  r.under_way = nil
  wait_all(u.works)
  if u.sum ~= u.into then
    c.check(C.pg_axpby(u.into.raw, u.sum.raw, 1, 1))
    u.sum:release()
  end
  u.into:release()
end

function GATHERED.grad_weight(r, dy, d, add)
  local g = flat(gemm.before_epilogue(r, dy))
  if d[2] then
    if not r.whole then gather_saved(r) end
    r.gathering:wait()
    weight_gradient(d[2], g, r.whole, add[2])
    r.whole:release()
    r.whole, r.gathering = nil, nil
  end
  if d[3] then c.check(C.pg_reduce(d[3].raw, g.raw, C.PG_SUM, 0, add[3])) end
  g:release()
end

--- linear_gathered(x, w, bias, activation, axis) -> y [R n,out] = activation(rows of all ranks w^T + bias).
-- x [n,in] are this rank's rows; w [out,in] and bias [out] its rows of the whole weight.  activation as in linear.
function ops.linear_gathered(x, w, bias, activation, axis)
  local own = flat(x:alive())
  local records, epilogue = tape.wants(x, w, bias), gemm.epilogue(activation)
  local y = Tensor.empty({ axis.size * own.shape[1], w:alive().shape[1] }, x.dtype)
  local aux = epilogue and records and Tensor.like(y) or nil
  product_of_gathered(axis, y, own, w, { name = "linear_gathered", tb = true, bias = bias and bias:alive(),
                                         epilogue = epilogue, aux = aux })
  own:release()
  if records then
    tape.record(GATHERED, { x, w, bias }, 3, { x, w, aux or false }, 3, y, { activation = activation, axis = axis })
  end
  return y
end

-- Columns in, rows out ----------------------------------------------------------------------------

local SCATTERED = { name = "linear_scattered", weights = { [2] = true, [3] = true }, mixed = true, remakes = { true } }

function SCATTERED.grad_input(r, dy, d, add)
  if not d[1] then return end
  local into, o = flat(d[1]), { name = "matmul", beta = add[1], keep = tape.wanted(r.inputs[2]) }
  local epilogue, aux = gemm.slope(r.inputs[1], add[1])
  o.epilogue, o.aux = epilogue, aux and flat(aux)
  local whole = product_of_gathered(r.a.axis, into, dy, r.saved[2], o)
  if whole then r.extra = whole:keep() end -- dy of all rows, for the weight
  if aux then o.aux:release() end
  into:release()
end

function SCATTERED.grad_weight(r, dy, d, add)
  if d[2] then
    if not r.extra then r.extra = gather_whole(r.a.axis, dy):keep() end
    local x, again = tape.saved(r, 1)
    local rows = flat(x)
    weight_gradient(d[2], r.extra, rows, add[2])
    rows:release()
    if again then x:release() end
  end
  if d[3] then c.check(C.pg_reduce(d[3].raw, dy.raw, C.PG_SUM, 0, add[3])) end
end

--- linear_scattered(x, w, bias, axis) -> y [n,out] = this rank's rows of (the sum over ranks of x w^T) + bias.
-- x [R n,in] are all rows of this rank's columns, w [out,in] its columns of the weight; bias [out] is whole.
function ops.linear_scattered(x, w, bias, axis)
  local all = flat(x:alive())
  local n = all.shape[1] / axis.size
  if n ~= math.floor(n) then
    c.fail("linear_scattered: x is %s: %d rows, which %d ranks do not divide", x:describe(), all.shape[1], axis.size)
  end
  local y = Tensor.empty({ n, w:alive().shape[1] }, x.dtype)
  wait_all(scatter_product(axis, y, all, w, { name = "linear_scattered", tb = true }))
  all:release()
  if bias then c.check(C.pg_binary(y.raw, y.raw, bias:alive().raw, C.PG_ADD, 0)) end
  done("linear_scattered", 0, y)
  if tape.wants(x, w, bias) then tape.record(SCATTERED, { x, w, bias }, 3, { x, w }, 2, y, { axis = axis }) end
  return y
end

return ops
