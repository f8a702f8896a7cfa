-- ranks: 4
-- Data parallel over 4 ranks gives the training of a single process (tests/training.lua has the cases).
require("tests.training").compare()
