-- cmd/version.lua: pgrun version: the same as pgrun --version.
local c = require "pg.c"
io.write("pgrun ", require("pg.host").version, "\nLuaJIT   ", jit.version, "\n", c.ffi.string(c.C.pg_version_info()))
return 0
