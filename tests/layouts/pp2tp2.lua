-- ranks: 4
-- Stages whose layers are cut over 2 ranks give the training of a single process.
require("tests.training").compare { layout = { pp = 2, tp = 2 },
                                    cases = { "micro", "dropout", "held_out", "own_loss", "script" } }
