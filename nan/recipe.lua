
-- run as: pgrun tests/training.lua --run=./nan
