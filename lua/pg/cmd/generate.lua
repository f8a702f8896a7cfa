-- cmd/generate.lua: pgrun generate RUN "text" [--tokens=200] [--temperature=0.8] [--top_k=0] [--top_p=1] [--seed=0]
-- The newest checkpoint of a run goes on from a text.  The model is what the run's recipe says.
local c = require "pg.c"
local checkpoint = require "pg.checkpoint"
local generate = require "pg.generate"
local process = require "pg.live.process"
local recipe = require "pg.recipe"
local run = require "pg.run"
local train = require "pg.train"

local options = { tokens = 200, temperature = 0.8, top_k = 0, top_p = 1, seed = 0 }

local function usage(why)
  io.stderr:write("pgrun generate: ", why, '\nusage: pgrun generate RUN "text" [--tokens=200] [--temperature=0.8] ',
                  "[--top_k=0] [--top_p=1] [--seed=0]\n")
  os.exit(2, true)
end

local function arguments(args)
  local words, o = {}, {}
  for k, v in pairs(options) do o[k] = v end
  local plain -- after a "--" all are words
  for _, a in ipairs(args) do
    local name, value = a:match "^%-%-([%w_]+)=(.*)$"
    if plain then words[#words + 1] = a
    elseif a == "--" then plain = true
    elseif name then
      if options[name] == nil then
        local near = c.nearest(name, { "tokens", "temperature", "top_k", "top_p", "seed" })
        usage(("unknown option --%s%s"):format(name, near and ", did you mean --" .. near .. "?" or ""))
      end
      o[name] = name == "seed" and value or tonumber(value) or usage(("--%s=%s is not a number"):format(name, value))
    elseif a:find "^%-%-" then usage(a .. ": options are written --tokens=100")
    else words[#words + 1] = a end
  end
  if #words ~= 2 then usage(("a run and a text are wanted, %d words given"):format(#words)) end
  return words[1], words[2], o
end

-- The model of a run, with the numbers of its newest valid checkpoint.
local function load_model(folder)
  local given, told, text = run.recipe(folder)
  local settings = type(told.settings) == "table" and told.settings or {}
  if type(settings.data) == "table" and settings.data.tokens then
    c.fail("generate: %s has learnt ids whose text nobody knows (data.tokens); only runs of data.text can go on from a "
           .. "text", folder)
  end
  local described = recipe.model(given, told.args, { path = told.recipe, text = text })
  local model = train.model { model = described }
  local newest = checkpoint.newest(folder, function(line) io.stderr:write(line, "\n") end)
  checkpoint.load_model(newest, model.segments)
  return model
end

local name, prompt, o = arguments { ... }
local folder, wrong = name, nil
if not name:find "^%.%.?$" then folder, wrong = process.find(name) end
if not folder then c.fail("generate: %s", wrong) end
print(generate.text(load_model(folder), prompt, o))
