-- What luacheck knows of this project: LuaJIT, and pg as the one global.
std = "luajit"
read_globals = { "pg" }
max_line_length = 120
self = false -- a method need not use its self
unused_args = false -- rules and hooks share one signature
files["lua/pg/init.lua"] = { globals = { "pg" } }
files["tests"] = { globals = { "pg" } }
