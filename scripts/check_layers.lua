-- check_layers.lua: reads every #include and require and fails on an arrow that points up.
--
--   pgrun scripts/check_layers.lua [ROOT]        `make layers`; plain luajit runs it too
--
-- The tower, lowest room first.  A file may use its own room and the rooms below it, no other.
-- pg.h is the door: all C may include it, and no Lua reaches C but through lua/pg/c.lua.
local TOWER = {
  { "runtime/base/" },
  { "kernels/" },
  { "runtime/backend/" },
  { "runtime/core/" },
  { "runtime/file/" },
  { "runtime/host/" }, -- beside the tower: includes everything and is included by nobody
  { "lua/pg/c.lua", "lua/pg/log.lua", "lua/pg/describe.lua", "lua/pg/tensor.lua", "lua/pg/random.lua",
    "lua/pg/scope.lua", "lua/pg/watch.lua", "lua/pg/fs.lua", "lua/pg/json.lua", "lua/pg/step.lua", "lua/pg/gemm.lua" },
  { "lua/pg/tape.lua", "lua/pg/mesh.lua", "lua/pg/agree.lua" },
  { "lua/pg/params.lua", "lua/pg/buckets.lua", "lua/pg/segment.lua", "lua/pg/ops/", "lua/pg/ops.lua" },
  { "lua/pg/nn/", "lua/pg/nn.lua", "lua/pg/optim/", "lua/pg/optim.lua" },
  { "lua/pg/parallel/", "lua/pg/parallel.lua", "lua/pg/graph.lua" },
  { "lua/pg/checkpoint.lua", "lua/pg/fragments.lua", "lua/pg/shards.lua", "lua/pg/data/", "lua/pg/data.lua" },
  { "lua/pg/" }, -- all other files there: init, train, recipe, repl, cmd/ and whatever they share
  { "models/" },
}
local DOOR, HOST, FFI_FILE = "runtime/pg.h", "runtime/host/", "lua/pg/c.lua"
local LUA_HEADERS = { ["lua.h"] = true, ["lauxlib.h"] = true, ["lualib.h"] = true, ["luajit.h"] = true }

local root = (arg and arg[1] or ".") .. "/"
local faults, arrows = {}, 0

local function fault(file, line, format, ...)
  faults[#faults + 1] = ("%s:%d: "):format(file, line) .. format:format(...)
end

--- room(path) -> height, name.  nil where the tower has no place for the path.
local function room(path)
  for height, names in ipairs(TOWER) do
    for _, name in ipairs(names) do
      local is_folder = name:sub(-1) == "/"
      if path == name or (is_folder and path:sub(1, #name) == name) then return height, name end
    end
  end
end

--- "runtime/core/../base/x.h" -> "runtime/base/x.h"
local function normal(path)
  local parts = {}
  for part in path:gmatch("[^/]+") do
    if part == ".." then parts[#parts] = nil elseif part ~= "." then parts[#parts + 1] = part end
  end
  return table.concat(parts, "/")
end

local function arrow(from, line, to)
  arrows = arrows + 1
  local low, low_name = room(from)
  local high, high_name = room(to)
  if not high then
    fault(from, line, "%s is in no room of the tower", to)
  elseif high > low then
    fault(from, line, "%s uses %s, which lies above it in %s", low_name, to, high_name)
  end
end

local function check_include(from, line, text)
  local system = text:match('^%s*#%s*include%s*<([^>]+)>')
  if system and LUA_HEADERS[system] and from:sub(1, #HOST) ~= HOST then
    fault(from, line, "<%s>: only %s knows Lua", system, HOST)
  end
  local quoted = text:match('^%s*#%s*include%s*"([^"]+)"')
  if not quoted then return end
  local to = normal(from:gsub("[^/]*$", "") .. quoted)
  if to ~= DOOR then arrow(from, line, to) end
end

--- "pg.ops.matmul" -> "lua/pg/ops/matmul.lua"; "pg.cmd." (a name made at run time) -> "lua/pg/cmd/"
local function module_path(name)
  if name == "pg" then return "lua/pg/init.lua" end
  if name == "pg.header" or name == "pg.host" then return nil end -- inside pgrun, runtime/host/
  local path = name:gsub("%.", "/")
  if path:match("^pg/") then path = "lua/" .. path elseif not path:match("^models/") then return nil end
  return path:sub(-1) == "/" and path or path .. ".lua"
end

local function check_require(from, line, text)
  text = text:gsub("^%s*%-%-.*", ""):gsub("%s%-%-.*", "")
  for name in text:gmatch("require%s*%(?%s*[\"']([^\"']+)[\"']") do
    local to = module_path(name)
    if to then
      arrow(from, line, to)
    elseif name == "ffi" and from ~= FFI_FILE then
      fault(from, line, "require \"ffi\": only %s calls C", FFI_FILE)
    end
  end
end

local function check_file(path)
  local check = path:match("%.lua$") and check_require or check_include
  if path == DOOR then return end
  if not room(path) then
    return fault(path, 1, "in no room of the tower: move it, or give it a place in scripts/check_layers.lua")
  end
  local number = 0
  for text in io.lines(root .. path) do
    number = number + 1
    check(path, number, text)
  end
end

local find = "cd '%s' && find runtime kernels lua models -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh'"
  .. " -o -name '*.lua' 2>/dev/null | LC_ALL=C sort"
local listing = io.popen(find:format(root))
local files = 0
for path in listing:lines() do
  files = files + 1
  check_file(path)
end
listing:close()

for _, text in ipairs(faults) do print(text) end
if files == 0 then print("no source files under " .. root) end
if #faults > 0 or files == 0 then os.exit(1) end
print(("layers: %d files, %d arrows, none points up"):format(files, arrows))
