
-- run as: pgrun tests/training.lua --run=./resumed --resume
