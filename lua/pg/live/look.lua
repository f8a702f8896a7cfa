-- live/look.lua: gradients and activations by name, for the prompt:
--   pg.gradients(model, "wq")            statistics of each gradient of the last step whose name has "wq" in it
--   model:gradient "layers.0.wq.weight"  the gradient itself (nn/module.lua)
--   a = pg.watch_activations(model, "mlp")   of the next forward pass; print a afterwards
local c = require "pg.c"
local stats = require "pg.stats"

local look = {}

local function named(pattern, name) return pattern == nil or name:find(pattern, 1, true) or name:find(pattern) end

-- A list of { name, what } that prints as a table; `none` where it is empty.
local List = {}
function List:__tostring()
  local wide, lines = 0, {}
  for _, entry in ipairs(self) do wide = math.max(wide, #entry.name) end
  for i, entry in ipairs(self) do
    lines[i] = entry.name .. (" "):rep(wide - #entry.name) .. "  " .. tostring(entry.stats)
  end
  return #lines > 0 and table.concat(lines, "\n") or rawget(self, "none")
end

local function check_model(model, what)
  if type(model) ~= "table" or not model.is_module then c.fail("%s: a model is wanted, got %s", what, type(model)) end
end

--- pg.gradients(model, pattern) -> a list of { name, stats } of this rank's gradients; pattern: part of a name.  Where
-- dp shares them out (ZeRO), of the share that is here.
function look.gradients(model, pattern)
  check_model(model, "gradients")
  local list = setmetatable({ none = "no gradient has such a name" }, List)
  for _, s in ipairs(model.segments or {}) do
    for _, piece in ipairs(s.own_grad and s:pieces(s.own_grad) or {}) do
      if named(pattern, piece.name) then list[#list + 1] = { name = piece.name, stats = stats.of(piece.view) } end
      piece.view:free()
    end
  end
  return list
end

-- The module's forward until it has run once: then it is the class's again.
local function watched(module, name, list)
  local forward = module.forward
  local own = rawget(module, "forward")
  local function after(...)
    rawset(module, "forward", own)
    for i = 1, select("#", ...) do
      local y = select(i, ...)
      if type(y) == "table" and y.is_tensor then
        local label = i == 1 and name or name .. " #" .. i
        local ok, seen = pcall(stats.of, y) -- a look must not end a training
        list[#list + 1] = { name = label, stats = ok and seen or "not seen: " .. tostring(seen) }
      end
    end
    return ...
  end
  rawset(module, "forward", function(...) return after(forward(...)) end)
end

--- pg.watch_activations(model, pattern) -> a list that fills in the next forward pass: { name, stats } of what each
-- module returns whose name has `pattern` in it, in the order of running.  Each is seen once, in the first micro-batch.
function look.activations(model, pattern)
  check_model(model, "watch_activations")
  local list = setmetatable({ none = "nothing has run yet; look again after the next step" }, List)
  local any = false
  model:each_module(function(module, name)
    if type(module.forward) == "function" and named(pattern, name) then
      any = true
      watched(module, name == "" and "(the model)" or name, list)
    end
  end)
  if not any then c.fail("watch_activations: no module has %q in its name", tostring(pattern)) end
  return list
end

return look
