-- ranks: 3
-- Blocks that do not divide over the stages (C18): 7 on 3, as even as they go and as one wants them.
local compare = require("tests.training").compare
compare { layout = { pp = 3 }, cases = { "micro", "dropout" }, deep = 7, more = { steps = 12 } }
compare { layout = { pp = 3, blocks = { 1, 5, 1 } }, cases = { "micro", "dropout" }, deep = 7, more = { steps = 12 } }
