-- nn/init.lua: the names of pg.nn.
local nn = { class = require("pg.nn.module").class }
for _, file in ipairs { "pg.nn.layers", "pg.nn.block", "pg.nn.lm" } do
  for name, value in pairs(require(file)) do nn[name] = value end
end
return nn
