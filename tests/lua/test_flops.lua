-- test_flops.lua: which card a name means.
local check = require "tests.check"
local flops = require "pg.flops"
local tests = {}

function tests.test_a_card_is_known_by_whole_words()
  check.equal(flops.peak("NVIDIA H200", "bf16"), 989e12)
  check.equal(flops.peak("NVIDIA H20", "bf16"), 148e12)
  check.equal(flops.peak("NVIDIA H100 PCIe", "bf16"), 756e12)
  check.equal(flops.peak("NVIDIA H100 80GB HBM3", "bf16"), 989e12)
  check.equal(flops.peak("NVIDIA A100-SXM4-80GB", "fp32"), 19.5e12)
  check.equal(flops.peak("NVIDIA A100-SXM4-80GB", "tf32"), 156e12)
  check.equal(flops.peak("NVIDIA GB200", "bf16"), 2.5e15)
  check.equal(flops.peak("NVIDIA GH200 480GB", "bf16"), 989e12)
end

function tests.test_others_are_not_taken_for_one_of_them()
  check.equal(flops.peak("NVIDIA L40", "bf16"), nil)
  check.equal(flops.peak("NVIDIA RTX A1000", "bf16"), nil)
end

check.run(tests)
