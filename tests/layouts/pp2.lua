-- ranks: 2
-- A pipeline of 2 stages gives the training of a single process (tests/training.lua has the cases).
require("tests.training").compare { layout = { pp = 2 } }
