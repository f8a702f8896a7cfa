-- test_graph.lua: pg.graph: the bits of the function itself, and memory that nobody else writes; what a recording
-- refuses, and that nothing is lost then.  The CPU runs every function as it is, with the same results; a GPU records
-- (and so does tests/cuda/fake_graphs.cpp, see tests/journey/graphs.sh).
local check = require "tests.check"
local c = require "pg.c"
local fs = require "pg.fs"
local step = require "pg.step"
local training = require "tests.training"
local C, ffi = c.C, c.ffi
local equal, is_true = check.equal, check.is_true
local tests = {}

step.block()
local RECORDS = c.device() == "cuda"

-- How often it was recorded and launched, where the device does.
local function counts(g, recordings, replays)
  local s = g:state()
  if RECORDS then equal({ s.recordings, s.replays }, { recordings, replays }, s.reason)
  else equal({ s.recordings, s.replays, s.reason }, { 0, 0, s.reason }) end
end

local function weight(name, shape)
  local w = pg.randn(shape or { 4, 4 }, { key = name })
  w.requires_grad = true
  return w
end

-- ---- functions ----

function tests.test_results_are_those_of_the_function()
  local function f(x, o) return { y = pg.exp(x + o.b), n = o.n }, x:sum() end
  local g = pg.graph(f)
  for i = 1, 6 do
    local x, b = pg.randn({ 3, 5 }, { key = "x" .. i }), pg.randn({ 5 }, { key = "b" .. i })
    local want, sum = f(x, { b = b, n = 7 })
    local got, other = g(x, { b = b, n = 7 })
    equal(got.y:totable(), want.y:totable())
    equal({ got.n, other:item() }, { 7, sum:item() })
  end
  counts(g, 1, 4)
  g:free()
end

function tests.test_other_arguments_are_another_recording()
  local g = pg.graph(function(x, factor) return pg.scale(x, factor) end)
  for i = 1, 5 do
    for _, n in ipairs { 2, 3 } do
      for _, factor in ipairs { 0.1, 0.1 + 1e-17 + 2^-56 } do
        equal(g(pg.full({ n }, i, "f64"), factor):totable()[n], i * factor)
      end
    end
  end
  counts(g, 4, 12)
  local _, lines = training.heard(function()
    for _ = 1, 5 do equal(g(pg.full({ 1 }, 3, "f64"), 2):item(), 6) end -- no more of them
    for i = 1, 100 do equal(g(pg.full({ 1 }, 3, "f64"), i):item(), 3 * i) end
  end)
  equal(#lines, RECORDS and 1 or 0)
  counts(g, 4, 12)
  g:free()
end

function tests.test_gradients_are_written_first_and_then_added()
  local w, v, u = weight "w", weight("v", { 4 }), weight "u" -- u gets none
  local function f(x) pg.mul(pg.matmul(x, w), v):sum():backward() end
  local function turns(run)
    local out = {}
    for i = 1, 12 do
      if i % 3 ~= 0 then w.grad_fresh, v.grad_fresh = true, true end -- the third adds
      run(pg.randn({ 2, 4 }, { key = "x" .. i }))
      out[i] = { w.grad:totable(), v.grad:totable(), w.grad_fresh, v.grad_fresh, u.grad }
    end
    return out
  end
  local g, want = pg.graph(f), turns(f)
  w.grad, v.grad = nil, nil
  equal(turns(g), want)
  if RECORDS then is_true(g:state().replays >= 6, "replays") end
  -- one that is frozen gets nothing, and no graph that would write it runs
  v.requires_grad = false
  local before = v.grad:totable()
  w.grad_fresh, v.grad_fresh = true, true
  g(pg.randn({ 2, 4 }, { key = "y" }))
  equal(v.grad:totable(), before)
  equal({ w.grad_fresh, v.grad_fresh }, { false, true })
  g:free()
end

function tests.test_what_others_hold_is_not_written()
  local w, kept = weight("w", { 64, 64 }), {}
  local g = pg.graph(function(x)
    local y = pg.softmax(pg.matmul(x, w))
    return pg.matmul(y, w):sum()
  end)
  for i = 1, 8 do
    local x = pg.randn({ 64, 64 }, { key = "x" .. i })
    kept[i] = { pg.full({ 64, 64 }, i), pg.full({ 64, 64 }, -i, "f64") } -- of the sizes that it works in
    local y = pg.softmax(pg.matmul(x, w))
    equal(g(x):item(), pg.matmul(y, w):sum():item())
    local large = pg.randn({ 4000 + 1000 * i, 8 }, { key = "l" }) -- a larger scratch than before
    local loss = pg.cross_entropy(large, pg.full({ large.shape[1] }, 3, "i32"))
    is_true(loss:item() > 0)
  end
  for i, two in ipairs(kept) do
    for _, t in ipairs(two) do
      local low, high = t:min():item(), t:max():item()
      equal({ low, high }, { two[1] == t and i or -i, two[1] == t and i or -i })
    end
  end
  g:free()
end

function tests.test_a_tensor_that_it_reads_stays_for_it()
  if not RECORDS then check.skip "the CPU runs the function as it is, which needs the tensor" end
  local w = pg.full({ 1000 }, 2)
  local g = pg.graph(function(x) return (x * w):sum() end)
  for i = 1, 3 do equal(g(pg.full({ 1000 }, i)):item(), 2000 * i) end
  w:free()
  local others = {}
  for i = 1, 8 do others[i] = pg.full({ 1000 }, 100 + i) end
  equal(g(pg.full({ 1000 }, 5)):item(), 10000)
  g:free()
  is_true(#others == 8)
end

function tests.test_its_memory_is_its_own_and_comes_back()
  local w = weight("w", { 128, 128 })
  local function f(x) return pg.softmax(pg.matmul(x, w)):sum() end
  local x = pg.randn({ 128, 128 }, { key = "x" })
  f(x)
  c.collect()
  local before = pg.memory()
  local g = pg.graph(f)
  for _ = 1, 5 do g(x) end
  c.collect()
  local holds, during = g:state().bytes, pg.memory()
  if RECORDS then is_true(holds >= 128 * 128 * 4 and during.in_use >= before.in_use + holds, "counted") end
  g:free()
  c.collect()
  equal(pg.memory().in_use, before.in_use)
  equal(pg.memory().tensors, before.tensors)
  -- results that somebody holds stay as they are
  for _ = 1, 4 do g(x) end
  local y = g(x)
  local value = y:item()
  g:free()
  local others = {}
  for i = 1, 8 do others[i] = pg.full({ 1 }, i) end
  equal(y:item(), value)
  is_true(#others == 8)
end

-- ---- refusals ----

-- f cannot be recorded: the reason holds `why`, is told once, and all calls give what f gives.
local function refused(f, why, ...)
  local x, g = pg.randn({ 3, 3 }, { key = "x" }), pg.graph(f, "it")
  local want = f(x, ...):totable()
  local words = { ... }
  local _, lines = training.heard(function()
    for _ = 1, 5 do equal(g(x, unpack(words)):totable(), want) end
  end)
  if RECORDS then
    equal(#lines, 1)
    is_true(lines[1]:find("it runs as it is, without a recording", 1, true) ~= nil, lines[1])
    is_true(lines[1]:find(why, 1, true) ~= nil, lines[1])
    equal(g:state().recordings, 0)
  else
    equal(lines, {})
  end
  g:free()
end

function tests.test_what_needs_the_host_is_refused()
  refused(function(x) return pg.scale(x, x:sum():item()) end, "read: a graph is being recorded")
  refused(function(x) return pg.scale(x, x:at(0, 1)) end, "test_graph.lua:")
  refused(function(x)
    local ok, n = pcall(function() return x:sum():item() end) -- whoever catches it
    return pg.scale(x, ok and n or 0)
  end, "read: a graph is being recorded")
  refused(function(x) return x + pg.tensor { 1, 2, 3 } end, "write: a graph is being recorded")
  refused(function(x) return pg.scale(x, pg.nonfinite(x) + 1) end, "the host sees no numbers")
  refused(function(x)
    c.check(C.pg_sync())
    return pg.scale(x, 2)
  end, "sync: a graph is being recorded")
  refused(function(x, list)
    list[1] = pg.randn({ 1 })
    return pg.scale(x, 2)
  end, "without a key", setmetatable({}, {}))
end

function tests.test_a_mistake_is_the_functions_own()
  local wrong = false
  local w = weight "w"
  local g = pg.graph(function(x)
    local y = pg.matmul(x, w)
    if wrong then y = y + pg.zeros { 7 } end
    y:sum():backward()
    return y
  end)
  local x = pg.randn({ 2, 4 }, { key = "x" })
  for _ = 1, 2 do
    w.grad_fresh = true
    g(x)
  end
  local want = w.grad:totable()
  wrong, w.grad_fresh = true, true
  training.heard(function() check.throws(function() g(x) end, "add: ") end)
  equal(w.grad_fresh, true)
  wrong = false
  g(x)
  equal(w.grad:totable(), want)
  g:free()
end

function tests.test_an_interrupt_ends_it()
  local stop = false
  local g = pg.graph(function(x)
    if stop then C.pg_interrupt(1) end
    return pg.scale(x, 2)
  end)
  local x = pg.full({ 3 }, 1)
  for _ = 1, 2 do g(x) end
  stop = true
  check.throws(function() g(x) end, "interrupted")
  C.pg_interrupt(0)
  stop = false
  for _ = 1, 3 do equal(g(x):totable(), { 2, 2, 2 }) end
  counts(g, 1, 3)
  g:free()
end

function tests.test_a_recording_that_was_given_up()
  if not RECORDS then
    is_true(C.pg_graph_begin() == C.PG_EGRAPH)
    is_true(C.pg_graph_end(nil) == C.PG_EINVAL)
    return
  end
  local x = pg.full({ 3 }, 1)
  c.check(C.pg_graph_begin())
  is_true(C.pg_graph_begin() == C.PG_EGRAPH)
  local y = pg.scale(x, 2)
  x:fill(5)
  is_true(C.pg_graph_end(ffi.new "pg_graph *[1]") == C.PG_EGRAPH) -- the second begin has spoilt it
  check.throws(function() y:item() end, "one" )
  check.throws(function() y:totable() end, "its numbers were never computed")
  equal(x:totable(), { 1, 1, 1 })
  c.check(C.pg_graph_begin())
  x:fill(5)
  c.check(C.pg_graph_end(nil))
  equal(x:totable(), { 1, 1, 1 })
  check.throws(function() pg.graph(3) end, "graph: a function is wanted")
end

function tests.test_an_argument_that_wants_a_gradient()
  local w = weight "w"
  local g = pg.graph(function(x) return x:sum() end)
  check.throws(function() g(pg.exp(w)) end, "wants a gradient")
  check.throws(function() g { deep = { w } } end, "wants a gradient")
end

-- ---- ids and random numbers ----

function tests.test_ids_are_checked_every_time()
  local table_of = pg.randn({ 10, 4 }, { key = "t" })
  local function f(ids) return pg.embedding(table_of, ids) end
  local g = pg.graph(f)
  for i = 1, 4 do
    local ids = pg.tensor({ i, 9, 0 }, "i32")
    equal(g(ids):totable(), f(ids):totable())
  end
  check.throws(function() g(pg.tensor({ 1, 10, 0 }, "i32")) end, "embedding: id 10 at row 0, column 1")
  local made = pg.argmax(pg.randn({ 3, 10 }, { key = "m" })) -- known without a look
  equal(g(made):totable(), f(made):totable())
  local unknown = pg.tensor({ 3, 2, 11 }, "f32"):to "i32"    -- looked at
  check.throws(function() g(unknown) end, "embedding: id 11")
  equal(g(pg.tensor({ 2, 2, 2 }, "i32")):totable(), f(pg.tensor({ 2, 2, 2 }, "i32")):totable())
  counts(g, 1, 4)
  g:free()
  -- ids that it makes itself
  local own = pg.graph(function(x) return pg.embedding(table_of, pg.argmax(x)) end)
  for i = 1, 5 do
    local x = pg.randn({ 3, 10 }, { key = "a" .. i })
    equal(own(x):totable(), pg.embedding(table_of, pg.argmax(x)):totable())
  end
  counts(own, 1, 3)
  own:free()
  refused(function(x) return pg.embedding(table_of, pg.maximum(x, 0):to "i32") end,
          "the ids that it makes cannot be checked")
end

function tests.test_ids_that_it_writes_over_are_unknown()
  local table_of, ids = pg.randn({ 10, 4 }, { key = "t" }), pg.tensor({ 1, 2 }, "i32")
  local g = pg.graph(function(x) ids:copy_from(x) end)
  for i = 1, 5 do
    g(pg.tensor({ i, 3 }, "i32"))
    equal(ids:totable(), { i, 3 })
    ids:write(ffi.new("int32_t[2]", 1, 1)) -- known again
  end
  g(pg.tensor({ 11, 3 }, "i32"))
  check.throws(function() pg.embedding(table_of, ids) end, "embedding: id 11 at row 0, column 0")
  g:free()
end

function tests.test_random_numbers_follow_the_step()
  local function f(x) return pg.dropout(x, 0.5, { key = "d", step = step.block() }) end
  local g, x, seen = pg.graph(f), pg.ones { 64 }, {}
  for i = 1, 6 do
    step.set { RANDOM = step.random_base(1, i) }
    local want = f(x):totable()
    equal(g(x):totable(), want)
    seen[table.concat(want)] = true
  end
  local different = 0
  for _ in pairs(seen) do different = different + 1 end
  equal(different, 6)
  counts(g, 1, 4)
  g:free()
end

function tests.test_new_code_is_recorded_anew()
  local folder = training.scratch .. "/graph"
  fs.mkdir(folder)
  package.path = folder .. "/?.lua;" .. package.path
  fs.write(folder .. "/factor.lua", "return { f = function(x) return pg.scale(x, 2) end }")
  local m = require "factor"
  local g, x = pg.graph(m.f), pg.ones { 2 }
  for _ = 1, 4 do equal(g(x):totable(), { 2, 2 }) end
  fs.write(folder .. "/factor.lua", "return { f = function(x) return pg.scale(x, 3) end }")
  pg.reload "factor"
  for _ = 1, 4 do equal(g(x):totable(), { 3, 3 }) end
  counts(g, 1, 4)
  g:free()
end

-- ---- scripts ----

function tests.test_a_plain_script()
  local function train(wrap)
    local model = pg.build(training.gpt2(), { seed = 3 })
    local optim = pg.optim.adamw(model:parameters(), { rate = 1e-3, clip = 1 })
    local data, losses = pg.data.text(training.text(500), { context = 32, batch = 4, seed = 4 }), {}
    local g = wrap(function(batch)
      local loss = model:loss(batch)
      loss:backward()
      return loss
    end)
    for i, batch in data:steps(8) do
      losses[i] = { g(batch):item() }
      losses[i][2] = optim:step()
    end
    return losses, g
  end
  local want = train(function(f) return f end)
  local got, g = train(pg.graph)
  equal(got, want)
  counts(g, 1, 6)
  g:free()
end

function tests.test_lack_of_memory_on_the_way()
  for after = 1, 3 do -- of the copy of the argument, of what it computes
    local g, x = pg.graph(function(x) return pg.scale(pg.exp(x), 2) end), pg.zeros { 3000 }
    for _ = 1, 2 do g(x) end
    C.pg_mem_fail_after(after)
    equal(g(x):at(7), 2) -- a collection has helped
    C.pg_mem_fail_after(0)
    equal(g(x):at(7), 2)
    g:free()
  end
end

check.run(tests)
