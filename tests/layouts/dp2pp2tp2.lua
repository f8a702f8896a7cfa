-- ranks: 8
-- limit: 240
-- All three axes at once, with nothing whole on any rank, give the training of a single process.
require("tests.training").compare { layout = { dp = 2, pp = 2, tp = 2, zero = 3 },
                                    cases = { "dropout_micro", "held_out", "script" } }
