-- test_segment.lua: segments: windows of the ranks of dp, run tables and norm weights, names of what lies in a window,
-- masters beside bf16 and f16, gradients that come and go.  Ranks are played by one process; tests/ranks/zero*.lua
-- are about real ones.
local check = require "tests.check"
local mesh = require "pg.mesh"
local step = require "pg.step"
local nn = pg.nn
local C = require("pg.c").C
local equal, is_true = check.equal, check.is_true
local tests = {}

-- A module with two parameters of one segment.
local function small(o)
  local module = nn.class "Small"()
  module.a = module:param("a", { 5, 30 }, { init = { "normal", 1 } })
  module.b = module:param("b", { 7 }, { init = { "normal", 1 } })
  return pg.build(module, o)
end

-- f(rank) with this process in the place of each rank of dp, `size` of them, at a level of ZeRO.
local function as_ranks(size, level, f)
  mesh.build {}
  local dp, layout = mesh.dp, mesh.layout
  local ok, message = pcall(function()
    for rank = 0, size - 1 do
      mesh.dp, mesh.layout = { name = "dp", rank = rank, size = size, stride = 1 }, { zero = level, sequence = false }
      f(rank)
    end
  end)
  mesh.dp, mesh.layout = dp, layout
  if not ok then error(message, 0) end
end

-- ---- windows ----

function tests.test_windows_tile_the_whole()
  local whole = small()
  local want = whole.segments[1].value:totable()
  equal(#want, 256) -- 150 and 7, each on a multiple of 64
  for level = 1, 2 do
    local got = {}
    as_ranks(4, level, function(rank)
      local s = small().segments[1]
      equal({ s.level, s.count, s.size, s.first }, { level, 256, 64, rank * 64 })
      equal(s.value:totable(), want)
      for _, x in ipairs(s.own_value:totable()) do got[#got + 1] = x end
      equal(s.own_grad.count, 64)
    end)
    equal(got, want)
  end
  as_ranks(3, 1, function(rank) -- a whole that three ranks divide
    local s = small().segments[1]
    equal({ s.count, s.size, s.first }, { 384, 128, 128 * rank })
  end)
end

-- The same two parameters in an item of a Sequential: at level 3 its values come and go -> the item, the segment.
local function item(o)
  local module, inner = nn.class "Holder"(), nn.class "Inner"()
  inner.a, inner.b = inner:param("a", { 5, 30 }, { init = { "normal", 1 } }),
                     inner:param("b", { 7 }, { init = { "normal", 1 } })
  module.layers = module:add("", nn.Sequential { { "", inner, "rest" } })
  return inner, pg.build(module, o).segments[1]
end

function tests.test_values_at_level_3_are_elsewhere()
  local want, got = small().segments[1].value:totable(), {}
  as_ranks(4, 3, function()
    local inner, s = item()
    check.throws(function() inner.a:totable() end, "the numbers of rest are not here now")
    check.throws(function() pg.scale(inner.a, 2) end, "the numbers of rest are not here now")
    for _, x in ipairs(s.own_value:totable()) do got[#got + 1] = x end
    s:put_away() -- twice is nothing
  end)
  equal(got, want)
end

function tests.test_names_of_what_lies_in_a_window()
  local seen = { a = {}, b = {} }
  as_ranks(4, 1, function()
    local s = small().segments[1]
    for _, piece in ipairs(s:pieces(s.own_value)) do
      local numbers = piece.view:view({ piece.view.count }, 0):totable()
      for i, x in ipairs(numbers) do seen[piece.name][piece.first + i] = x end
      equal(piece.piece.name, piece.name)
    end
    equal(#s:pieces(s.value), 2)
  end)
  local whole = small()
  equal(seen.a, whole.a:view({ 150 }, 0):totable())
  equal(seen.b, whole.b:totable())
  equal(whole.segments[1]:pieces(whole.segments[1].value)[1].view.shape, { 5, 30 })
end

-- ---- runs ----

local function tables(s, decay)
  local ends, factors, weights = s:run_tables(decay)
  return ends:totable(), factors:totable(), weights:totable()
end

function tests.test_runs_of_a_window_are_counted_from_its_start()
  local ends, factors = tables(small().segments[1], 0.5)
  equal(ends, { 192, 256 })
  equal(factors, { 0.5, 1, 0, 1 })
  local got = {}
  as_ranks(4, 2, function(rank)
    local s = small()
    s.b.requires_grad = false
    local e, f, w = tables(s.segments[1], 0.5)
    got[rank + 1] = { e, f, w }
  end)
  local decayed, frozen = { { 64 }, { 0.5, 1 }, { 1 } }, { { 64 }, { 0, 0 }, { 1 } }
  equal(got, { decayed, decayed, decayed, frozen })
end

function tests.test_every_parameter_counts_once_in_the_norm()
  local function weights_of(o)
    mesh.build {}
    local dp, tp, layout = mesh.dp, mesh.tp, mesh.layout
    mesh.dp, mesh.layout = { name = "dp", rank = 0, size = o.dp, stride = 1 }, { zero = o.zero, sequence = false }
    local module = small()
    module.a.stages, module.a.cut = o.stages, o.cut
    if o.copies then module.a.pieces[1].copies = o.copies end
    mesh.tp = { name = "tp", rank = 0, size = o.tp or 1, stride = 1 }
    local _, _, weights = tables(module.segments[1], 0)
    mesh.dp, mesh.tp, mesh.layout = dp, tp, layout
    return weights
  end
  equal(weights_of { dp = 1, zero = 0 }, { 1, 1 })
  equal(weights_of { dp = 4, zero = 0 }, { 1 / 4, 1 / 4 })
  equal(weights_of { dp = 2, zero = 1 }, { 1 }) -- of the first window
  equal(weights_of { dp = 1, zero = 0, stages = 2 }, { 1 / 2, 1 })
  equal(weights_of { dp = 2, zero = 0, tp = 4, cut = true }, { 1 / 2, 1 / 8 })
  equal(weights_of { dp = 1, zero = 0, tp = 4, cut = true, copies = 2 }, { 1 / 2, 1 / 4 })
end

-- ---- masters ----

function tests.test_half_precision_starts_from_the_numbers_of_f32()
  local want = small().segments[1].value
  for dtype, master in pairs { bf16 = "i16", f16 = "f32" } do
    local s = small({ dtype = dtype }).segments[1]
    equal({ s.value.dtype, s.master.dtype, s.grad.dtype }, { dtype, master, "f32" })
    equal(s:read_numbers():totable(), want:totable())
    check.close(s.value, want, check.bf16)
    as_ranks(4, 1, function(rank)
      local part = small({ dtype = dtype }).segments[1]
      equal(part.master.count, 64)
      equal(part:read_numbers():totable(), want:view({ 64 }, 64 * rank):totable())
    end)
  end
end

function tests.test_a_model_that_is_not_trained_has_values_alone()
  for _, dtype in ipairs { "f32", "bf16", "f16" } do
    local module, trained = small { dtype = dtype, train = false }, small { dtype = dtype }
    local s = module.segments[1]
    is_true(s.grad == nil and s.master == nil)
    equal(s.value:totable(), trained.segments[1].value:totable())
    local optim = pg.optim.sgd(module:parameters(), { rate = 0.5 }) -- after all
    equal(s:read_numbers():totable(), s.value:totable())
    module.b.grad:fill(1)
    module.b.grad_fresh = false
    local before = module.b:totable()
    optim:step()
    for i, x in ipairs(before) do before[i] = x - 0.5 end
    check.close(module.b, before, dtype == "f32" and check.f32 or check.bf16)
  end
end

function tests.test_numbers_written_are_read()
  for _, dtype in ipairs { "f32", "f64", "bf16", "f16" } do
    local s = small({ dtype = dtype }).segments[1]
    local want = {}
    for i = 1, s.size do want[i] = 1 + i / 1024 end -- exact in f32, not in bf16
    local t = pg.tensor(want, dtype == "f64" and "f64" or "f32")
    s:write_numbers(t)
    equal(s:read_numbers():totable(), want)
    s:edit(function(flat) flat:fill(0.125) end)
    equal(s:read_numbers():at(3), 0.125)
    equal(s.value:at(200), 0.125)
  end
end

-- A small module of half precision and its twin in f32, each with an optimiser whose rate is a power of two.
local function twins(dtype)
  local out = {}
  for i, of in ipairs { dtype, "f32" } do
    local module = small { dtype = of }
    out[i] = { module = module, s = module.segments[1], optim = pg.optim.sgd(module:parameters(), { rate = 2^-9 }) }
  end
  return out
end

local function step_with_gradient_one(twin)
  for _, p in ipairs { twin.module.a, twin.module.b } do
    p.grad:fill(1)
    p.grad_fresh = false
  end
  twin.optim:step()
end

-- Ways to write into a parameter (or a view of one), the same for a module of any dtype.
local bf16_bytes = { [0] = 0x3f81, 0xbe80, 0x4049, 0x3dcc, 0x3c23, 0x0001, 0xc2c8 }
local writes = {
  fill = function(m) m.a:fill(0.1) end,
  copy_from = function(m) m.a:copy_from(pg.randn({ 5, 30 }, { key = "written" })) end,
  copy_from_f64 = function(m) m.b:copy_from(pg.randn({ 7 }, { key = "written", dtype = "f64" })) end,
  view = function(m) m.a:view({ 30 }, 60):fill(-0.3) end,
  view_of_a_view = function(m) m.a:detach():view({ 75 }, 60):view({ 2 }, 73):copy_from(pg.tensor { 0.7, 0.2 }) end,
  no_grad = function(m) pg.no_grad(function() m.b:copy_from(pg.full({ 7 }, 1 / 3)) end) end,
  of_its_own_dtype = function(m)
    local ffi, numbers = require("pg.c").ffi, pg.empty({ 7 }, "bf16")
    numbers:write(ffi.new("uint16_t[7]", bf16_bytes))
    m.b:copy_from(numbers)
  end,
}

for name, write in pairs(writes) do
  tests["test_masters_follow_a_write_by_" .. name] = function()
    for _, dtype in ipairs { "bf16", "f16" } do
      local half, plain = unpack(twins(dtype))
      for _, twin in ipairs { half, plain } do
        step_with_gradient_one(twin)
        write(twin.module)
        step_with_gradient_one(twin)
      end
      equal(half.s:read_numbers():totable(), plain.s.value:totable())
      check.close(half.s.value, plain.s.value, check.bf16)
    end
  end
end

-- Bytes written are all there is to know of the numbers.
function tests.test_masters_follow_bytes_written()
  local twin = twins("bf16")[1]
  step_with_gradient_one(twin)
  twin.module.b:write(require("pg.c").ffi.new("uint16_t[7]", bf16_bytes))
  local got = twin.s:read_numbers()
  equal(got:view({ 7 }, twin.module.b.offset):totable(), twin.module.b:totable())
  equal(twin.module.b:at(0), 1.0078125)
end

function tests.test_a_write_reaches_the_windows_that_hold_it()
  local whole = small { dtype = "bf16" }
  whole.a:fill(0.1)
  local want = whole.segments[1]:read_numbers()
  for level = 1, 3 do
    as_ranks(4, level, function(rank)
      local inner, s = item { dtype = "bf16" }
      if level == 3 then
        check.throws(function() inner.a:fill(0.1) end, "the numbers of rest are not here now")
        C.pg_storage_fill(s.value.raw)
      end
      inner.a:fill(0.1)
      equal(s:read_numbers():totable(), want:view({ 64 }, 64 * rank):totable())
    end)
  end
end

-- C06: weights that do not stand still.
function tests.test_small_updates_are_not_lost_in_bf16()
  local function weight_after(dtype)
    local module = nn.class "One"()
    module.w = module:param("w", { 3 }, { init = { "ones" } })
    pg.build(module, { dtype = dtype })
    local optim = pg.optim.adamw(module:parameters(), { rate = 6e-4 })
    for _ = 1, 100 do
      module.w.grad:fill(1)
      module.w.grad_fresh = false
      optim:step()
    end
    return module.w:at(0), module.segments[1]:read_numbers():at(0)
  end
  local w, master = weight_after "bf16"
  equal(w, 0.94140625)
  check.close(master, 0.94, check.f32)
  check.close(weight_after "f32", 0.94, check.f32)
  w, master = weight_after "f16"
  check.close(w, 0.94, check.bf16)
  check.close(master, 0.94, check.f32)
end

-- C07: gradients beside bf16 weights add up in f32.
function tests.test_small_gradients_are_not_lost_in_bf16()
  local module = nn.class "One"()
  module.w = module:param("w", { 3 }, { init = { "ones" } })
  pg.build(module, { dtype = "bf16" })
  for _ = 1, 1024 do pg.sum(module.w):backward() end
  equal(module.w.grad:totable(), { 1024, 1024, 1024 })
end

function tests.test_moments_in_bf16()
  local function train(o, dtype)
    local module = small { dtype = dtype }
    local optim = pg.optim.adamw(module:parameters(), o)
    for i = 1, 10 do
      pg.sum(pg.square(module.a)):backward()
      pg.sum(pg.scale(module.b, i)):backward()
      optim:step()
    end
    return module.segments[1]:read_numbers():totable(), optim
  end
  local want = train({ rate = 1e-2 }, "bf16")
  local got, optim = train({ rate = 1e-2, moments = "bf16" }, "bf16")
  equal(optim.states[optim.segments[1]].exp_avg.dtype, "bf16")
  check.close(got, want, check.bf16)
  is_true(check.error(got, want) > 0)
  check.throws(function() optim:swap { rate = 1e-2, betas = { 0.9, 0.95 }, decay = 0 } end,
    'optim.moments was "bf16", is "fp32" now')
  check.throws(function() train({ moments = "bf16" }, "f32") end,
    'optim.moments = "bf16" goes with bf16 or f16 weights, those of segment rest are f32')
  check.throws(function() train({ moments = "f16" }, "bf16") end, "moments")
end

-- ---- gradients that come and go ----

function tests.test_the_gradient_of_the_whole_comes_with_the_first()
  as_ranks(2, 2, function()
    local module = small()
    local s = module.segments[1]
    check.throws(function() module.a.grad:totable() end, "the numbers of the gradient of rest are not here now")
    pg.sum(module.b):backward()
    s:zero_unused()
    local sum = 0
    for _, x in ipairs(s.grad:totable()) do sum = sum + x end -- what lies between the parameters is 0
    equal(sum, 7)
    s.flight = { part = s.own_grad, work = { wait = function() end } }
    s:land()
    check.throws(function() module.a.grad:totable() end, "the numbers of the gradient of rest are not here now")
    equal(s.own_grad.count, s.size)
  end)
end

step.block() -- lives as long as the process
mesh.build {}
check.run(tests)
