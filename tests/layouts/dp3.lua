-- ranks: 3
-- Data parallel over 3 ranks gives the training of a single process (tests/training.lua has the cases).
require("tests.training").compare()
