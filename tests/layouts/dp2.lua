-- ranks: 2
-- Data parallel over 2 ranks gives the training of a single process (tests/training.lua has the cases).
require("tests.training").compare()
