
-- run as: pgrun tests/training.lua --run=./goes-on
