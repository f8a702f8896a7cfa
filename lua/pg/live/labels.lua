-- live/labels.lua: which ranks a line of the prompt is for, and whose answer is whose.
local labels = {}

-- "0,3" or "0-2" -> true where `rank` is among them; nil and the reason where that is no list of ranks.
local function among(list, rank, size)
  local mine = false
  for part in list:gmatch "[^,]+" do
    local first, last = part:match "^(%d+)%-(%d+)$"
    if not first then first, last = part:match "^%d+$", part end
    if not first then return nil, ("@%s: ranks are written 0 or 0,3 or 0-2, axes tp=1,pp=0"):format(list) end
    first, last = tonumber(first), tonumber(last)
    if last >= size or first > last then
      return nil, ("@%s: there %s"):format(list, size == 1 and "is one rank, 0" or "are ranks 0 to " .. size - 1)
    end
    mine = mine or rank >= first and rank <= last
  end
  return mine
end

-- "tp=1,pp=0" -> true where this rank has that place.
local function at_place(list, mesh)
  local mine = true
  for part in list:gmatch "[^,]+" do
    local name, n = part:match "^(%a+)=(%d+)$"
    local axis = (name == "pp" or name == "dp" or name == "tp") and mesh[name]
    if not axis then return nil, ("@%s: places are written tp=1,pp=0; the axes are pp, dp and tp"):format(list) end
    if tonumber(n) >= axis.size then
      return nil, ("@%s: axis %s has %s"):format(list, name, axis.size == 1 and "one place, 0"
        or "places 0 to " .. axis.size - 1)
    end
    mine = mine and axis.rank == tonumber(n)
  end
  return mine
end

--- labels.selects(where, mesh) -> true where this rank is meant | nil, reason: all ranks find the same fault.
function labels.selects(where, mesh)
  if where == "all" then return true end
  if where:find "=" then return at_place(where, mesh) end
  if not where:find "%d" then return nil, ("@%s: a line is for @all, @0,3 or @tp=1"):format(where) end
  return among(where, mesh.world.rank, mesh.world.size)
end

--- labels.name({ 0, 1, 2, 5 }, 8) -> "0-2,5"; all of them: "all".
function labels.name(ranks, size)
  if #ranks == size then return "all" end
  local parts, i = {}, 1
  while i <= #ranks do
    local last = i
    while ranks[last + 1] == ranks[last] + 1 do last = last + 1 end
    parts[#parts + 1] = last > i and ranks[i] .. "-" .. ranks[last] or tostring(ranks[i])
    i = last + 1
  end
  return table.concat(parts, ",")
end

--- labels.join(answers) -> one text, each line labelled by who said it, equal answers once; all went well.
-- answers: { { ok =, text = }, ... } by rank; {} on ranks that need not know.
function labels.join(answers)
  local order, by_text, well = {}, {}, true
  for i, a in ipairs(answers) do
    well = well and a.ok
    if a.text ~= "" then
      if not by_text[a.text] then
        by_text[a.text] = {}
        order[#order + 1] = a.text
      end
      table.insert(by_text[a.text], i - 1)
    end
  end
  if #answers < 2 then return answers[1] and answers[1].text or "", well end
  local out = {}
  for _, text in ipairs(order) do
    local label = "[" .. labels.name(by_text[text], #answers) .. "] "
    for line in (text .. "\n"):gmatch "(.-)\n" do out[#out + 1] = label .. line end
  end
  return table.concat(out, "\n"), well
end

return labels
