-- test_readme.lua: the README stays true: its tour names every file, and what it prints is what there is.
local check = require "tests.check"
local fs = require "pg.fs"
local tests = {}

local readme = fs.read "README.md"
local tour = readme:match "## A tour of the rooms(.-)\n## " or ""

local function mentioned(name)
  local plain = name:gsub("%p", "%%%0")
  return tour:find("%f[%w_]" .. plain .. "%f[^%w_]") ~= nil
end

-- What `make dist` makes holds a part of the files only.
local function needs_sources()
  if not fs.exists "Makefile" then check.skip "what make dist makes has no sources" end
end

-- The stem of a file, or a part of it beside a "*" in the tour (shm* for shm_ops, *_cudnn for plan_cudnn).
local function in_tour(path)
  local stem = path:match "([^/]+)%.%w+$"
  if mentioned(stem) or mentioned((stem:gsub("_typed$", ""))) then return true end
  for n = #stem, 2, -1 do
    if tour:find(stem:sub(1, n) .. "*", 1, true) or tour:find("`*" .. stem:sub(-n), 1, true) then return true end
  end
  local whole = { cmd = true, ops = true, data = true, help = true } -- folders named as one
  local folder = path:match "([^/]+)/[^/]+$"
  return whole[folder] == true and tour:find(folder .. "/", 1, true) ~= nil
end

function tests.test_tour_names_every_file()
  local missing = {}
  for _, pattern in ipairs { "runtime/*.h", "runtime/*/*.[ch]", "kernels/*.[ch]", "lua/pg/*.lua", "lua/pg/*/*.lua",
                             "models/*.lua", "scripts/*", "tests/*.*" } do
    for _, path in ipairs(fs.glob(pattern)) do
      if not in_tour(path) then missing[#missing + 1] = path end
    end
  end
  check.equal(missing, {})
end

function tests.test_tour_names_no_file_that_is_gone()
  needs_sources()
  for name in tour:gmatch "`([%w_/]+%.%w+)`" do
    local found = false
    for _, pattern in ipairs { name, "*/" .. name, "*/*/" .. name, "*/*/*/" .. name } do
      found = found or #fs.glob(pattern) > 0
    end
    check.is_true(found, name .. " is in the tour and nowhere else")
  end
end

function tests.test_recipe_is_the_one_that_runs()
  local recipe = fs.read "models/tiny.lua":gsub("%s+$", "")
  check.is_true(readme:find(recipe, 1, true) ~= nil, "README.md does not print models/tiny.lua as it is")
end

function tests.test_script_is_the_one_of_the_help_page()
  local script = fs.read "lua/pg/help/scripts.md":match "```lua\n(.-)```"
  check.is_true(readme:find(script, 1, true) ~= nil, "README.md and help/scripts.md print different scripts")
end

function tests.test_commands_are_targets()
  needs_sources()
  local makefile = fs.read "Makefile"
  for target in readme:gmatch "make ([%l-]+)" do
    check.is_true(makefile:find("\n" .. target .. ":", 1, true) ~= nil, "make " .. target)
  end
end

function tests.test_every_recipe_field_has_its_line()
  local page = fs.read "lua/pg/help/recipe.md"
  for name in pairs(require("pg.recipe_fields").top) do
    check.is_true(page:find("`" .. name .. "`", 1, true) ~= nil, name .. " is missing in help/recipe.md")
  end
end

check.run(tests)
