-- test_scope.lua: how long tensors live: scopes, keep, loose scopes, the collector, running out of memory.
local check = require "tests.check"
local c = require "pg.c"
local scope = require "pg.scope"
local Tensor = require "pg.tensor"
local equal, is_true = check.equal, check.is_true
local tests = {}

local MIB = 2^20
local function live() return pg.memory().tensors end
local function leaf()
  local x = pg.randn { 3 }
  x.requires_grad = true
  return x
end

function tests.test_what_is_born_in_a_scope_dies_with_it()
  local before = pg.memory()
  local kept
  pg.scope(function()
    local x = pg.randn { 100 }
    for _ = 1, 10 do x = pg.exp(x) end
    kept = x
  end)
  equal(pg.memory().tensors, before.tensors)
  equal(pg.memory().in_use, before.in_use)
  equal(kept.raw, nil)
end

-- From 128 MiB on a block is at most a 64th larger than what was asked: the segments of a large model.
function tests.test_large_blocks_waste_little()
  if os.getenv "PG_POOL" == "0" then return end -- which writes to every byte
  for _, bytes in ipairs { 128 * MIB, 128 * MIB + 4, 145000000, 256 * MIB - 4, 404766720 } do
    local before = pg.memory().in_use
    local x = Tensor.empty { bytes / 4 }
    local taken = pg.memory().in_use - before
    is_true(taken >= bytes and taken <= bytes * 65 / 64, ("%d bytes took %d"):format(bytes, taken))
    x:free()
    local kept = pg.memory().kept
    local again = Tensor.empty { bytes / 4 }
    equal(pg.memory().kept, kept - taken) -- the same block
    again:free()
  end
  c.C.pg_mem_trim()
  equal(pg.memory().kept, 0)
  c.collect() -- the next collection's bound follows from what lives now
end

function tests.test_returned_tensors_go_to_the_scope_around()
  local inner, outer
  pg.scope(function()
    local list = pg.scope(function()
      local dead = pg.ones { 2 }
      return { pg.exp(dead), { name = pg.ones { 3 }, { { pg.ones { 4 } } } } }, pg.ones { 5 }
    end)
    local deep = list[2][1][1]
    inner = list[1]
    check.close(inner, { math.exp(1), math.exp(1) }, check.f32)
    equal(list[2].name:totable(), { 1, 1, 1 })
    equal(deep.raw, nil) -- tables are searched three deep
    outer = list
  end)
  equal(inner.raw, nil)
  equal(outer[2].name.raw, nil)
end

function tests.test_values_come_through_in_order()
  equal({ pg.scope(function(a, b) return b, nil, a end, 1, 2) }, { 2, nil, 1 })
end

function tests.test_keep_lifts_a_tensor_out()
  local kept
  pg.scope(function() pg.scope(function() kept = pg.ones({ 3 }):keep() end) end)
  equal(kept:totable(), { 1, 1, 1 })
end

function tests.test_an_error_frees_all_and_keeps_its_message()
  local before = live()
  local depth = scope.depth()
  local ok, message = pcall(pg.scope, function()
    local _ = pg.ones { 3 }
    pg.scope(function()
      local _ = pg.ones { 4 }
      error("boom", 0)
    end)
  end)
  equal({ ok, message }, { false, "boom" })
  equal(live(), before)
  equal(scope.depth(), depth)
end

-- A module whose output is also saved by its own record: the scopes around hand the tensor on and must
-- not count its owners anew.
function tests.test_an_output_that_a_record_saved_outlives_its_module()
  local Soft = pg.nn.class "Soft"
  function Soft.forward(_, x) return pg.softmax(x) end
  local Outer = pg.nn.class "Outer"
  function Outer:init() self.soft = self:add("soft", Soft {}) end
  function Outer:forward(x) return pg.scale(self.soft(x), 2) end
  local x = leaf()
  local y = pg.mul(Outer {}(x), pg.tensor { 1, 2, 3 })
  pg.sum(y):backward()
  local p = pg.softmax(x:detach())
  local mean = pg.sum(pg.mul(p, pg.tensor { 2, 4, 6 }))
  check.close(x.grad, p * (pg.tensor { 2, 4, 6 } - mean), check.f32)
end

function tests.test_records_end_with_their_scope()
  local x = leaf()
  local y = pg.scope(function() return pg.exp(x) end)
  check.throws(function() pg.sum(y):backward() end, "exp was walked already, or its scope has ended")
end

function tests.test_a_broken_loop_leaves_nothing_behind()
  local before = live()
  local x = leaf()
  local token = scope.open "loose"
  local y = pg.exp(x)
  for _ = 1, 3 do y = pg.exp(y) end -- "break": nobody closes the scope
  y = nil -- luacheck: ignore
  collectgarbage() collectgarbage()
  equal(live(), before + 1)
  is_true(scope.plain())
  for _ = 1, 20000 do local _ = pg.exp(x) end -- later work in the scope that is still open
  collectgarbage() collectgarbage()
  equal(live(), before + 1)
  local kept = pg.ones { 2 }
  scope.close(token)
  equal(kept.raw, nil)
end

function tests.test_a_loose_scope_closes_like_any_other()
  local x = leaf()
  local token = scope.open "loose"
  local loss = pg.sum(pg.exp(x))
  loss:backward()
  local again = pg.sum(pg.exp(x))
  scope.close(token)
  equal(loss.raw, nil)
  equal(again.record.dropped, true)
end

-- PG_POOL=0, as under sanitizers, fills every block twice.
local TEMPORARIES = os.getenv "PG_POOL" == "0" and 2000 or 1e5

-- C36: the collector does not see C memory.
function tests.test_many_temporaries_in_a_plain_loop()
  collectgarbage() collectgarbage()
  local x = pg.ones { 2^18 } -- 1 MiB
  local start = pg.memory().in_use
  c.C.pg_mem_reset_peak()
  local t0 = pg.time()
  local cell = pg.ones { 16 }
  for i = 1, TEMPORARIES do
    local _ = pg.empty { 2^18 }
    if i % 5000 == 0 then cell = pg.exp(cell) end
  end
  local seconds, peak = pg.time() - t0, pg.memory().peak
  is_true(peak <= 2 * start + 64 * MIB, ("peak %.0f MiB from %.0f MiB"):format(peak / MIB, start / MIB))
  is_true(seconds < 10, ("%.1f s"):format(seconds))
  equal(x.count, 2^18)
end

-- With a large live set the bound is twice that set.
function tests.test_temporaries_beside_a_large_live_set()
  collectgarbage() collectgarbage()
  local held = {}
  for i = 1, 100 do held[i] = pg.empty { 2^18 } end
  local start = pg.memory().in_use
  c.C.pg_mem_reset_peak()
  for _ = 1, 5000 do local _ = pg.empty { 2^18 } end
  local peak = pg.memory().peak
  is_true(peak <= 2 * start + 64 * MIB, ("peak %.0f MiB from %.0f MiB"):format(peak / MIB, start / MIB))
  equal(#held, 100)
end

-- In processes of their own ---------------------------------------------------------------------

local PGRUN = os.getenv "PGRUN" or "build/pgrun"

-- Run Lua text in a pgrun of its own -> what it printed, ending in "exit N".
local function child(text, options, environment)
  local path = (os.getenv "SCRATCH" or "build") .. "/child.lua"
  local file = assert(io.open(path, "w"))
  file:write(text)
  file:close()
  local pipe = io.popen(("%s %s %s %s 2>&1; echo exit $?"):format(environment or "", PGRUN, options or "", path))
  local output = pipe:read "*a"
  pipe:close()
  return output
end

local function says(output, text) is_true(output:find(text) ~= nil, output) end

function tests.test_out_of_memory_is_an_error_that_names_who_asked_and_who_holds()
  local output = child([[
    local x = pg.ones { 2^20 } -- 4 MiB
    local held = {}
    local ok, message = pcall(function()
      for i = 1, 100 do held[i] = pg.exp(x) end
    end)
    print(ok, message, #held)
    held = nil
    print(pg.exp(x):at(0)) -- the process goes on
  ]], "--memory 32M")
  says(output, "false\t[^\n]*child.lua:4: exp: out of memory: 4.0 MiB asked, 32.0 MiB in use of 32.0 MiB "
    .. "%(%-%-memory%); largest holders: other 32.0 MiB")
  says(output, "2.71828")
  says(output, "exit 0")
end

function tests.test_garbage_is_collected_before_memory_is_said_to_be_out()
  local output = child([[
    for i = 1, 200 do local x = pg.ones { 2^20 } end
    print "went through"
    collectgarbage "stop" -- no help from Lua's own collector
    for i = 1, 200 do local x = pg.ones { 2^20 } end
    print "again"
  ]], "--memory 16M")
  says(output, "went through\nagain\nexit 0")
end

function tests.test_a_large_request_alone_is_refused_with_the_way_out()
  local output = child([[ local x = pg.zeros { 2^30 } ]], "--memory 16M")
  says(output, "child.lua:1: out of memory: 4096.0 MiB asked, 0.0 MiB in use of 16.0 MiB")
  says(output, "a smaller micro%-batch or context, or recompute, needs less")
  says(output, "exit 1")
end

function tests.test_out_of_memory_in_backward_names_the_gradient()
  local output = child([[
    local x = pg.ones { 2^20 }
    x.requires_grad = true
    local loss = pg.sum(pg.exp(x))
    local held = {}
    while pcall(function() held[#held + 1] = pg.empty { 2^20 } end) do end
    print(pcall(loss.backward, loss))
  ]], "--memory 32M")
  says(output, "gradient of sum: out of memory")
  says(output, "exit 0")
end

function tests.test_pg_nan_names_the_op()
  local text = [[
    local x = pg.tensor { 1, -1 }
    x.requires_grad = true
    local y = pg.sqrt(pg.abs(x))
    local z = pg.log(x)
    print "not reached"
  ]]
  says(child(text, "", "PG_NAN=1"), "child.lua:4: log: 1 of 2 numbers of its result %[2%] f32 are not finite")
  says(child(text), "not reached\nexit 0")
end

function tests.test_pg_nan_names_the_gradient()
  local output = child([[
    local x = pg.tensor { 0, 4 }
    x.requires_grad = true
    local y = pg.sum(pg.sqrt(x))
    y:backward()
  ]], "", "PG_NAN=1")
  says(output, "child.lua:4: gradient of sqrt: gradient 1 of sqrt: 1 of 2 numbers")
end

function tests.test_pg_trace_prints_each_op()
  local output = child([[ local y = pg.sum(pg.exp(pg.ones { 2, 3 })) ]], "", "PG_TRACE=1")
  says(output, "pg: exp +%[2,3%] f32 +[%d.]+ us\npg: sum +%[%] f32 ")
end

check.run(tests)
