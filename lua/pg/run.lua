-- run.lua: the folder of a run: runs/NAME with recipe.lua (as run), recipe.json (its plain settings),
-- metrics.jsonl and TensorBoard events (log.lua), checkpoints/ (checkpoint.lua).  Rank 0 alone works here.
local c = require "pg.c"
local checkpoint = require "pg.checkpoint"
local describe = require "pg.describe"
local fs = require "pg.fs"
local host = require "pg.host"
local json = require "pg.json"
local log = require "pg.log"
local process = require "pg.live.process"

local run = {}
local ROOT = "runs"

--- run.folder(name) -> its path: a name lies under runs/, a path stays one.
function run.folder(name)
  if name:find "%c" then c.fail("%q is no name for a run: it has a control character in it", name) end
  if name == "." or name == ".." then c.fail("%s is no name for a run; give a name such as first, or a path", name) end
  if name:find "/" then return (name:gsub("(.)/+$", "%1")) end
  return ROOT .. "/" .. name
end

local function stem(path) return (path or "recipe"):match "([^/]*)$":gsub("%.lua$", "") end

-- runs/tiny-20261130-025103, with a number where that is taken.
local function fresh(path)
  local base = ("%s/%s-%s"):format(ROOT, stem(path), os.date "%Y%m%d-%H%M%S")
  local folder, n = base, 1
  while fs.exists(folder) do
    n = n + 1
    folder = base .. "-" .. n
  end
  return folder
end

--- run.place(info) -> the folder of a new run.  One that holds something already is refused.
function run.place(info)
  if not info.run then return fresh(info.path) end
  local folder = run.folder(info.run)
  if #checkpoint.list(folder) > 0 then
    c.fail("--run=%s: %s holds a run already; go on with it by --run=%s --resume, or choose another name",
           info.run, folder, info.run)
  elseif fs.exists(folder .. "/recipe.json") or fs.exists(folder .. "/checkpoints") then
    c.fail("--run=%s: %s holds a run already, that has no checkpoint to go on from; choose another name; where it "
           .. "still trains, pgrun stop ends it", info.run, folder)
  elseif fs.is_dir(folder) and #fs.list(folder) > 0 then
    c.fail("--run=%s: %s holds other files; a run wants a folder of its own", info.run, folder)
  end
  return folder
end

-- Settings as plain values: descriptions by name and fields, functions by where they stand.
local function plain(value)
  if type(value) == "function" then
    local at = debug.getinfo(value, "S")
    return ("function at %s:%d"):format(at.short_src, at.linedefined)
  end
  if type(value) ~= "table" then return value end
  if value.is_module then return "module " .. tostring(value.class_name) end
  local out = {}
  if describe.is(value) then out.name = describe.name(value) end
  for k, v in pairs(value) do out[k] = plain(v) end
  return out
end

--- run.settings(recipe) -> the recipe as plain values, for recipe.json and manifests.
function run.settings(r)
  local out = plain(r)
  out.optim.name, out.optim[1] = out.optim[1], nil
  return out
end

--- run.begin(folder, info, settings, from): make it and write down what runs.  from: the checkpoint it
-- goes on from, or nil; metrics beyond its step are cut.
function run.begin(folder, info, settings, from)
  local made, why = pcall(fs.mkdir, folder .. "/checkpoints")
  if not made then c.fail("run: no folder %s: %s; give a place that can be written, as --run=/PATH", folder, why) end
  checkpoint.clean(folder)
  if from then log.cut(folder .. "/metrics.jsonl", from.step) end
  local words = {}
  for i, word in ipairs(info.args or {}) do words[i] = word end
  local note = ("\n-- run as: pgrun %s %s\n"):format(info.path, table.concat(words, " "))
  fs.write(folder .. "/recipe.lua", (info.text or "") .. note)
  local _, file = host.source(info.path)
  local told = { recipe = info.path, file = file, args = json.array(words), settings = settings }
  json.write(folder .. "/recipe.json", told, { indent = 2, replace = true })
end

--- run.recipe(folder) -> what the script of a run returns, what recipe.json tells of it, its text.  What it requires is
-- looked for where it stood.
function run.recipe(folder)
  if not fs.exists(folder .. "/recipe.json") then c.fail("%s is no run (no recipe.json in it)", folder) end
  local told = json.read(folder .. "/recipe.json")
  if type(told) ~= "table" or type(told.recipe) ~= "string" or type(told.args) ~= "table" then
    c.fail("%s/recipe.json does not tell of a recipe", folder)
  end
  local place = type(told.file) == "string" and told.file:match "^(.*)/[^/]*$"
  if place then
    package.path = ("%s/?.lua;%s/?/init.lua;%s/../?.lua;%s"):format(place, place, place, package.path)
  end
  local text = fs.read(folder .. "/recipe.lua")
  local chunk, wrong = loadstring(text:gsub("^#[^\n]*", ""), "@" .. told.recipe)
  if not chunk then c.fail("%s/recipe.lua: %s", folder, wrong) end
  local given = chunk()
  if type(given) ~= "table" then c.fail("%s/recipe.lua returns no recipe but a %s", folder, type(given)) end
  return given, told, text
end

-- Runs of a recipe, the newest first.
local function runs_of(path)
  local found = {}
  for _, file in ipairs(fs.glob(ROOT .. "/*/recipe.json")) do
    local ok, written = pcall(json.read, file)
    if ok and type(written) == "table" and written.recipe == path then
      found[#found + 1] = { folder = file:match "^(.*)/", at = fs.mtime(file) }
    end
  end
  table.sort(found, function(a, b)
    if a.at ~= b.at then return a.at > b.at end
    return a.folder > b.folder
  end)
  return found
end

--- run.find(info) -> the folder whose training goes on: info.resume names it, else info.run, else it is the
-- newest run of the recipe that has a checkpoint.
function run.find(info)
  local name = info.resume ~= "" and info.resume or info.run
  if name then
    local folder = run.folder(name)
    if #checkpoint.list(folder) == 0 then
      if not fs.is_dir(folder) then
        local near = c.nearest(name:match "[^/]*$", process.names())
        c.fail("--resume: %s has no checkpoint to go on from: there is no such folder%s", folder,
               near and "; did you mean --resume=" .. near .. "?" or "")
      end
      c.fail("--resume: %s has no checkpoint to go on from; start without --resume, under another name or after "
             .. "removing it, with save = { every = ... } in the recipe", folder)
    end
    return folder
  end
  for _, r in ipairs(runs_of(info.path)) do
    if #checkpoint.list(r.folder) > 0 then return r.folder end
  end
  c.fail("--resume: no run of %s under %s/ has a checkpoint; name one with --resume=RUN, or start without --resume",
         info.path, ROOT)
end

return run
