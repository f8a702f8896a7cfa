-- test_json.lua: JSON read into Lua tables and written back; and the file functions of pg.fs.
local check = require "tests.check"
local json, fs = require "pg.json", require "pg.fs"
local equal, is_true, throws = check.equal, check.is_true, check.throws
local tests = {}

local function same(text, value) -- reads as value, and value is written as text
  equal(json.decode(text), value)
  equal(json.encode(value), text)
end

function tests.test_both_ways()
  same('{"a":[1,2.5,-3],"b":{"c":"x"},"d":true,"e":false}',
       { a = { 1, 2.5, -3 }, b = { c = "x" }, d = true, e = false })
  same("[]", json.array {})
  same("{}", {})
  same("[[],{},[1]]", { json.array {}, {}, { 1 } })
  same('"text"', "text")
  same("17", 17)
  same("true", true)
end

function tests.test_null_is_absent_in_objects_and_kept_in_arrays()
  equal(json.decode '{"a":null,"b":1}', { b = 1 })
  local list = json.decode "[1,null,3]"
  is_true(#list == 3 and list[2] == json.null)
  equal(json.encode(list), "[1,null,3]")
  is_true(json.decode "null" == json.null)
  equal(json.encode { mfu = json.null }, '{"mfu":null}')
end

function tests.test_keys_are_sorted_whatever_the_order_of_insertion()
  local a, b = {}, {}
  for i = 1, 50 do a["k" .. i] = i end
  for i = 50, 1, -1 do b["k" .. i] = i end
  equal(json.encode(a), json.encode(b))
  equal(json.encode { z = 1, Z = 2, a = 3 }, '{"Z":2,"a":3,"z":1}')
end

function tests.test_numbers_survive()
  same("9007199254740991", 9007199254740991)
  equal(json.encode(json.decode "9007199254740993"), "9007199254740993")
  equal(json.encode(json.decode "10151188881778163"), "10151188881778163")
  equal(json.encode(json.decode "-9223372036854775808"), "-9223372036854775808")
  is_true(json.decode "9007199254740993" == 9007199254740993LL)
  equal(json.encode { 18446744073709551615ULL, -5LL }, "[18446744073709551615,-5]")
  for _, x in ipairs { 0.1, 1 / 3, 1e-300, 5e-324, 1.7976931348623157e308, 123456789.125, 2^53,
                       2^70, -1e15 - 0.5 } do
    equal(json.decode(json.encode(x)), x)
  end
  equal(json.encode(0.1), "0.1")
  equal(json.encode(1e15), "1000000000000000")
  equal(json.encode(123456789012345), "123456789012345")
  equal(1 / json.decode(json.encode(-0.0)), -math.huge)
  equal(json.encode({ 1 / 3, 7 }, { digits = 9 }), "[0.333333333,7]")
end

function tests.test_numbers_that_json_cannot_hold()
  throws(function() json.encode { a = { 1, 0 / 0 } } end, "value.a[2] is nan")
  throws(function() json.encode(1 / 0) end, "value is inf")
  equal(json.encode({ 1 / 0, -1 / 0, 0 / 0 }, { nonfinite = "null" }), "[null,null,null]")
end

function tests.test_strings()
  same('"\\"\\\\\\n\\r\\t\\b\\f"', '"\\\n\r\t\b\f')
  equal(json.encode "\1\0\127", '"\\u0001\\u0000\\u007f"')
  equal(json.decode '"\\u0001\\u0000\\u007f"', "\1\0\127")
  equal(json.decode '"\\u00e9\\ud83d\\ude00/"', "\195\169\240\159\152\128/")
  same('"\195\169 \228\189\160 \240\159\153\130"', "\195\169 \228\189\160 \240\159\153\130")
  same('{"\195\169\\n":1}', { ["\195\169\n"] = 1 })
end

function tests.test_strings_that_are_no_utf8()
  local bad = { "a\255", "\195", "\195(", "\192\175", "\224\128\128", "\237\160\128",
                "\240\128\128\128", "\244\144\128\128", "\128", "\226\130", "\240\159\153" }
  for _, s in ipairs(bad) do
    throws(function() json.encode { x = s } end, "value.x is no UTF-8 at byte")
    is_true(json.decode(json.encode(s, { replace = true })):find("\239\191\189", 1, true) ~= nil)
  end
  equal(json.encode("a\255\195\169\195b", { replace = true }),
        '"a\239\191\189\195\169\239\191\189b"')
  equal(json.encode("\226\130", { replace = true }), '"\239\191\189\239\191\189"')
end

function tests.test_what_cannot_be_written()
  throws(function() json.encode { 1, a = 2 } end, "list elements and keys")
  throws(function() json.encode { [3] = 1 } end, "key 3")
  throws(function() json.encode { f = print } end, "value.f is a function")
  local loop = {}
  loop.loop = loop
  throws(function() json.encode(loop) end, "hold itself")
  throws(function() json.encode(1, { indnet = 2 }) end, "did you mean indent?")
end

function tests.test_what_cannot_be_read()
  throws(function() json.decode '{"a":1,\n "a":2}' end, "line 2, column 4: duplicate object key")
  throws(function() json.decode("[1,]", "config.json") end, "config.json: json: line 1")
  throws(function() json.decode "[9223372036854775808]" end, "too big")
  throws(function() json.decode(nil) end, "wants a string, got nil")
end

function tests.test_indent()
  equal(json.encode({ a = { 1, 2 }, b = {}, c = json.array {} }, { indent = 2 }),
        '{\n  "a": [\n    1,\n    2\n  ],\n  "b": {},\n  "c": []\n}')
end

function tests.test_deep_and_long()
  local deep = ("["):rep(2000) .. ("]"):rep(2000)
  equal(json.encode(json.decode(deep)), deep)
  local long = {}
  for i = 1, 20000 do long["token" .. i] = i end
  equal(json.decode(json.encode(long)), long)
end

function tests.test_files()
  local folder = (os.getenv "SCRATCH" or os.tmpname() .. ".d") .. "/json"
  fs.mkdir(folder .. "/sub")
  is_true(fs.is_dir(folder) and fs.exists(folder .. "/sub") and not fs.exists(folder .. "/none"))
  json.write(folder .. "/b.json", { x = 1 }, { indent = 1 })
  equal(fs.read(folder .. "/b.json"), '{\n "x": 1\n}\n')
  equal(json.read(folder .. "/b.json"), { x = 1 })
  fs.write(folder .. "/a.bin", "\0\1\n")
  equal(fs.read(folder .. "/a.bin"), "\0\1\n")
  equal(fs.size(folder .. "/a.bin"), 3)
  is_true(math.abs(fs.mtime(folder .. "/a.bin") - os.time()) < 60)
  equal(fs.list(folder), { "a.bin", "b.json", "sub" })
  equal(fs.list(folder .. "/sub"), {})
  equal(fs.glob(folder .. "/*.json"), { folder .. "/b.json" })
  equal(fs.glob(folder .. "/*.none"), {})
  fs.rename(folder .. "/a.bin", folder .. "/sub/c")
  is_true(not fs.is_dir(folder .. "/sub/c") and fs.exists(folder .. "/sub/c"))
  fs.sync(folder)
  throws(function() fs.read(folder .. "/none") end, "none: No such file")
  throws(function() fs.size(folder .. "/none") end, "none: No such file")
  throws(function() fs.list(folder .. "/none") end, "none: No such file")
  throws(function() json.read(folder .. "/sub/c") end, "sub/c: json: line 1")
  fs.remove(folder)
  is_true(not fs.exists(folder) and #fs.hostname() > 0)
end

check.run(tests)
