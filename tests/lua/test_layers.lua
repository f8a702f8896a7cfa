-- test_layers.lua: scripts/check_layers.lua passes a tree that points down and names each arrow up.
local check = require "tests.check"
local tests = {}

local CHECKER = os.getenv "PGRUN" .. " scripts/check_layers.lua "

-- Write a small tree under SCRATCH and run the checker on it -> its output, ending in "exit N".
local function judge(files)
  local root = os.getenv "SCRATCH" .. "/tree"
  os.execute("rm -rf " .. root)
  for path, text in pairs(files) do
    os.execute("mkdir -p " .. root .. "/" .. path:match "^(.*)/")
    local file = assert(io.open(root .. "/" .. path, "w"))
    file:write(text)
    file:close()
  end
  local pipe = io.popen(CHECKER .. root .. " 2>&1; echo exit $?")
  local output = pipe:read "*a"
  pipe:close()
  return output
end

local function says(files, text)
  local output = judge(files)
  check.is_true(output:find(text, 1, true) ~= nil, output)
  return output
end

local down = {
  ["runtime/base/status.h"] = '#include "../pg.h"\n',
  ["runtime/core/ops.c"] = '#include "../base/status.h"\n#include <math.h>\n',
  ["runtime/host/main.c"] = '#include <lua.h>\n#include "../core/ops.h"\n',
  ["lua/pg/c.lua"] = 'local ffi = require "ffi"\nlocal text = require "pg.header"\n',
  ["lua/pg/tape.lua"] = 'local c = require("pg.c")\n-- require "pg.train" comes later\n',
  ["models/tiny.lua"] = 'local llama = require "models.llama"\n',
}

local function with(path, text)
  local files = { [path] = text }
  for p, t in pairs(down) do files[p] = files[p] or t end
  return files
end

function tests.test_arrows_down_pass() says(down, "none points up\nexit 0") end

function tests.test_an_include_that_points_up_is_named()
  local output = says(with("kernels/norm.c", '/* x */\n#include "../runtime/core/tensor.h"\n'),
    "kernels/norm.c:2: kernels/ uses runtime/core/tensor.h, which lies above it")
  check.is_true(output:find("exit 1", 1, true) ~= nil, output)
end

function tests.test_a_require_that_points_up_is_named()
  says(with("lua/pg/tape.lua", 'local c = require "pg.c"\nlocal f = require "pg.train"\n'), "lua/pg/tape.lua:2: ")
  says(with("lua/pg/ops/norm.lua", 'return require("pg.nn." .. name)'), "lua/pg/ops/norm.lua:1: ")
  says(with("lua/pg/optim/sgd.lua", 'require "pg.new_at_the_top"'), "lua/pg/optim/sgd.lua:1: ")
  says(with("lua/pg/nn/mlp.lua", "require 'models.llama'"), "lua/pg/nn/mlp.lua:1: ")
end

function tests.test_only_the_host_knows_lua_and_only_c_lua_calls_c()
  says(with("runtime/file/json.c", "#include <lua.h>\n"), "runtime/file/json.c:1: <lua.h>")
  says(with("lua/pg/data/tokens.lua", 'local ffi = require "ffi"\n'), 'lua/pg/data/tokens.lua:1: require "ffi"')
end

function tests.test_a_file_without_a_room_is_named()
  says(with("runtime/misc/x.c", "int x;\n"), "runtime/misc/x.c:1: in no room")
  says({ ["elsewhere/x.lua"] = "return 1\n" }, "no source files")
end

check.run(tests)
