-- recipe.lua: from the table that a script returned, and the command line, to settings that can be trained:
-- every field known, of the right kind and possible here, before the first collective.  Which fields
-- there are: recipe_fields.lua; what happens then: train.lua.
--   pg.recipe.run(recipe, { path =, text =, args = })     pgrun models/tiny.lua --steps=20
local c = require "pg.c"
local agree = require "pg.agree"
local describe = require "pg.describe"
local fields = require "pg.recipe_fields"
local host = require "pg.host"
local layout = require "pg.parallel.layout"
local measured = require "pg.parallel.measured"

local recipe = {}
local RESERVED = { run = true, resume = true }

-- ---- where a mistake is ----

-- Line of the field `path` ("optim.rate.peak") in the recipe's text: of the last part that is found, each
-- looked for behind the one before.
local function line_of(text, path)
  local number, from, found = 0, 1, nil
  local lines = {}
  for line in (text .. "\n"):gmatch "([^\n]*)\n" do lines[#lines + 1] = line:gsub("%-%-.*$", "") end
  for part in path:gmatch "[^.]+" do
    for i = from, #lines do
      if lines[i]:find("%f[%w_]" .. part .. "%f[^%w_]%s*=") then
        number, found = i, true
        break
      end
    end
    from = math.max(number, 1)
  end
  return found and number or nil
end

-- The option that a mistake of field `path` comes from: the one that set the field, or something in it, or the
-- field that the message begins with.
local function option_of(info, path, message)
  local given = info.given or {}
  if info.option or given[path] then return info.option or given[path] end
  local named = message:gsub("^[^%s:]+:%d+: ", ""):match "^[%a_.]+"
  if named and given[named] then return given[named] end
  for name, option in pairs(given) do
    if name:sub(1, #path + 1) == path .. "." then return option end
  end
end

--- recipe.fail(info, path, format, ...): raise a mistake of field `path`, at its line of the recipe or
-- with the option that set it.  info.field: the path, for who catches it.
function recipe.fail(info, path, format, ...)
  info.field = path
  local message = select("#", ...) > 0 and format:format(...) or format
  local option = option_of(info, path, message)
  if option then agree.fail(option .. ": " .. message) end
  local line = info.text and line_of(info.text, path)
  local place = (info.path or "recipe") .. (line and ":" .. line or "") .. ": "
  local file = info.path and info.path .. ":"
  if file and message:sub(1, #file) == file and message:find("^%d+: ", #file + 1) then place = "" end -- it has a line
  agree.fail(place .. message)
end

--- recipe.guard(info, path, f, ...) -> what f returns; its errors become mistakes of the field of the layout, batch or
-- micro that they begin with, else of field `path`.
local function passed(info, path, ok, ...)
  if ok then return ... end
  local message = ...
  local named = tostring(message):gsub("^[^%s:]+:%d+: ", ""):match "^[%a_.]+"
  local fits = named and (named:find "^layout" or named == "micro" or named == "data.batch")
  recipe.fail(info, fits and named or path, "%s", message)
end
function recipe.guard(info, path, f, ...) return passed(info, path, pcall(f, ...)) end

local function unknown(info, path, key, schema)
  local known = c.names(schema)
  local near = c.nearest(tostring(key), known)
  recipe.fail(info, path, "unknown field %s%s (known: %s)", path, near and ", did you mean " .. near .. "?" or "",
              table.concat(known, ", "))
end

local show = describe.show

-- ---- the command line ----

-- Word i of a command line sets no field: what to type instead.
local function misread(args, i)
  local word, follows, words = args[i], args[i + 1], host.option_words(args[i])
  if words > 0 then
    local option = words == 2 and follows and word .. " " .. follows or word
    agree.fail(("%s: an option of pgrun stands before the file: pgrun %s %s"):format(option, option, host.script))
  end
  if args[i - 1] == "--resume" then word, follows = args[i - 1], word end
  if word:find "^%-%-[%w_.]+$" and follows and not follows:find "^%-%-" then
    agree.fail(("%s %s: a field and its value are one word: %s=%s"):format(word, follows, word, follows))
  end
  agree.fail(("%s: fields are set as --optim.clip=1, and a run as --run=NAME, --resume or --resume=RUN"):format(word))
end

--- recipe.arguments(args) -> overrides { { path, text, option } }, options { run =, resume = }.
function recipe.arguments(args)
  local overrides, options = {}, {}
  for i, option in ipairs(args or {}) do
    local name, text = option:match "^%-%-([%w_.]+)=(.*)$"
    if not name and option == "--resume" then name, text = "resume", "" end
    if not name or ("." .. name .. "."):find("..", 1, true) or host.option_words(option) > 0 then misread(args, i) end
    if RESERVED[name] then
      if name == "run" and text == "" then agree.fail "--run=: a name is missing, such as --run=first" end
      options[name] = text
    else
      overrides[#overrides + 1] = { path = name, text = text, option = option }
    end
  end
  return overrides, options
end

-- The schema of what stands inside `value`, a field of kind `entry`; nil and a reason where nothing can.
local function inside(value, entry)
  if type(value) == "function" then return nil, "a function, whose inside only the file can change" end
  if type(value) == "table" and value.is_module then
    return nil, "a built module, whose inside only the file can change"
  end
  if describe.is(value) then return describe.schema(value) end
  if entry.fields then return entry.fields end
  if entry[1] == "optim" then return fields.optimiser(value[1]) end
  return nil, value == nil and "not set" or show(value) .. ", which has no fields"
end

-- The value at the end of an option's path.
local function set_value(info, owner, part, entry, path, text)
  if entry.fields or entry[1] == "model" or entry[1] == "optim" then
    local within = inside(owner[part], entry)
    recipe.fail(info, path, "%s holds fields of its own; set one of them%s", path,
                within and (", such as --%s.%s=..."):format(path, c.names(within)[1]) or " in the file")
  end
  local value = fields.parse(text, entry[1])
  local wants
  if value == nil then wants = fields.fault(text, entry) or "given in the file"
  else wants = fields.fault(value, entry) end
  if wants then
    recipe.fail(info, path, "%s is %s; it must be %s", path, show(value == nil and text or value), wants)
  end
  owner[part] = value
end

-- The table that holds the next part of an option's path, and its schema.
local function step_into(info, owner, part, entry, path)
  if owner[part] == nil then owner[part] = entry.fields and {} or entry[1] == "optim" and { "adamw" } or nil end
  local within, reason = inside(owner[part], entry)
  if not within then recipe.fail(info, path, "%s is %s", path, reason) end
  return owner[part], within
end

-- Set the field that one option names.
local function override(info, settings, o)
  local owner, schema, path = settings, fields.top, nil
  for part, more in o.path:gmatch "([^.]+)(%.?)" do
    path = path and path .. "." .. part or part
    local entry = schema[part]
    info.option = o.option
    if not entry then unknown(info, path, part, schema) end
    if more == "" then set_value(info, owner, part, entry, path, o.text)
    else owner, schema = step_into(info, owner, part, entry, path) end
  end
  info.option = nil
  info.given[o.path] = o.option
  if o.path == "data.random" and not settings.data.random then return end -- chooses nothing
  for _, other in ipairs(fields.sources[o.path] or {}) do settings.data[other] = nil end
end

-- ---- the table ----

-- A copy that the command line may write into; descriptions stay descriptions.
local function copy(value, depth)
  if type(value) ~= "table" or value.is_module or value.is_tensor then return value end
  depth = (depth or 0) + 1
  if depth > 50 then agree.fail "recipe: a table that is deeper than 50 levels; does it hold itself?" end
  local out = {}
  for k, v in pairs(value) do out[k] = copy(v, depth) end
  return setmetatable(out, getmetatable(value))
end

local check_fields

-- Each value of `values` against `schema`, and its defaults filled in.  prefix: "" or "optim.".
function check_fields(info, values, schema, prefix)
  for key in pairs(values) do
    if not schema[key] then unknown(info, prefix .. tostring(key), key, schema) end
  end
  for _, key in ipairs(c.names(schema)) do
    local entry, path = schema[key], prefix .. key
    if values[key] == nil then
      if entry.fields and not entry.optional then values[key] = {}
      else values[key] = copy(entry[2]) end
    end
    local value = values[key]
    if value ~= nil and entry.fields then
      if type(value) ~= "table" then
        recipe.fail(info, path, "%s is %s; it must be a table of fields", path, show(value))
      end
      check_fields(info, value, entry.fields, path .. ".")
    elseif value ~= nil then
      local wants = fields.fault(value, entry)
      if wants then recipe.fail(info, path, "%s is %s; it must be %s", path, show(value), wants) end
      if entry[1] == "seed" then values[key] = fields.seed(value) end
      if describe.is(value) then check_fields(info, value, describe.schema(value), path .. ".") end
    end
  end
end

local function check_optim(info, optim)
  local name = optim[1]
  local schema = fields.optimiser(name)
  if not schema then
    recipe.fail(info, "optim", 'optim is { %s, ... }; its first entry must be "adamw" or "sgd"', show(name))
  end
  optim[1] = nil
  check_fields(info, optim, schema, "optim.")
  optim[1] = name
end

local function need(info, value, path, what)
  if value == nil then recipe.fail(info, path, "%s is missing: %s", path, what) end
end

-- Ranks over the axes, batch over dp over micro-batches.
local function check_layout(info, r)
  r.layout = recipe.guard(info, "layout", layout.resolve, r.layout, host.ranks)
  r.micro = recipe.guard(info, "layout.schedule", layout.share, r.layout, r.data.batch, r.micro)
  if not r.log.timeline then return end
  recipe.guard(info, "log.timeline", measured.wanted, r.layout.pp, "log.timeline")
  if r.log.timeline > r.steps then
    recipe.fail(info, "log.timeline", "log.timeline is %d, and the last step is %d; name one on the way",
                r.log.timeline, r.steps)
  end
end

-- What is looked at after every op, or on the host, a graph cannot have in it.
local function check_graphs(info, r)
  if not r.graphs then return end
  if host.ranks > 1 then
    recipe.fail(info, "graphs", "graphs = true goes with one rank, and there are %d, which compare their collectives "
                .. "on the host in every step; leave graphs out", host.ranks)
  end
  for _, name in ipairs { "PG_NAN", "PG_TRACE", "PG_PROFILE" } do
    if os.getenv(name) == "1" then
      recipe.fail(info, "graphs", "graphs = true launches a step's ops as a whole, and %s=1 looks at every one; unset "
                  .. "it, or leave graphs out", name)
    end
  end
end

local function check_data(info, r)
  if (r.data.tokens and 1 or 0) + (r.data.text and 1 or 0) + (r.data.random and 1 or 0) > 1 then
    recipe.fail(info, "data.tokens", "data has more than one of tokens (files of ids), text (a file of text) and "
                .. "random; keep one")
  end
  if not (r.data.tokens or r.data.text or r.data.random) then
    r.data.text = recipe.guard(info, "data", function() return pg.demo_text() end)
  end
  if r.eval and not r.eval.tokens and r.data.held_out == 0 then
    recipe.fail(info, "eval", "eval has nothing to look at; set data.held_out = 0.1, or eval.tokens to other files")
  end
  if r.sample and not r.data.text then
    recipe.fail(info, "sample", "sample: data.tokens are ids whose text nobody knows; leave sample out, or train on "
                .. "data.text")
  end
end

--- recipe.resolve(table, overrides, info) -> a checked copy with every default filled in.
-- info: path and text of the recipe, for messages.
function recipe.resolve(given, overrides, info)
  info.given = info.given or {}
  local what = given.is_tensor and "a tensor" or given.is_module and "a module"
    or describe.is(given) and "a description"
  if what then
    recipe.fail(info, "", "it returns %s; a recipe is a table such as { model = ..., data = ..., steps = 100 }", what)
  end
  local r = copy(given)
  for key in pairs(r) do
    if not fields.top[key] then unknown(info, tostring(key), key, fields.top) end
  end
  for name, entry in pairs(fields.top) do
    if entry.fields and r[name] ~= nil and type(r[name]) ~= "table" then
      recipe.fail(info, name, "%s is %s; it must be a table of fields", name, show(r[name]))
    end
  end
  for _, o in ipairs(overrides or {}) do override(info, r, o) end
  r.optim = r.optim or { "adamw" }
  check_fields(info, r, fields.top, "")
  need(info, r.model, "model", "what to train, such as model = require \"models.llama\" { blocks = 4 }")
  need(info, r.steps, "steps", "how many optimiser steps")
  need(info, r.data.batch, "data.batch", "sequences in a global step")
  check_optim(info, r.optim)
  r.data.seed = r.data.seed or r.seed
  check_layout(info, r)
  check_graphs(info, r)
  check_data(info, r)
  return r
end

--- recipe.model(table, args, info) -> what the recipe's model is under these words of a command line; the other
-- fields are not looked at.
function recipe.model(given, args, info)
  info.given = {}
  local r = copy(given)
  for _, o in ipairs((recipe.arguments(args))) do
    if o.path:find "^model%." then override(info, r, o) end
  end
  need(info, r.model, "model", "what was trained")
  return r.model
end

--- recipe.run(table, info) -> the exit code.  info (all optional): path, text, args.
function recipe.run(given, info)
  info = info or {}
  info.path = info.path or host.script or "recipe"
  info.given = {}
  local overrides, options = recipe.arguments(info.args)
  local settings = recipe.resolve(given, overrides, info)
  info.run, info.resume = options.run, options.resume
  return require("pg.train").run(settings, info)
end

return recipe
