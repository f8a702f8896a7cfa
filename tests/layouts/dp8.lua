-- ranks: 8
-- Data parallel over 8 ranks gives the training of a single process (tests/training.lua has the cases).
require("tests.training").compare { batch = 32 }
