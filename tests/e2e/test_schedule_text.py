"""The golden text of a schedule: a quantized layer, its kernel calls and its memory plan."""

import re
from dataclasses import replace
from pathlib import Path

import bitwright.backends.cpu.lowering.registered as lowerings
from bitwright.backends.cpu.lowering.context import Lowering
from bitwright.ir import parse
from bitwright.lir.text import planned_text
from bitwright.passes.manager import run_passes
from bitwright.pipeline import CPU
from bitwright.target import named

LAYER = Path(__file__).parents[1] / "passes" / "inputs" / "lower_integer.txt"
assert lowerings.__name__  # the import registers the lowerings


def test_the_schedule_of_a_quantized_layer(golden):
    caches = {"l1_bytes": 32 << 10, "l2_bytes": 1 << 20, "l3_bytes": 32 << 20}
    target = replace(named("avx512vnni"), cores=2, **caches)
    schedule = Lowering(run_passes(parse(LAYER.read_text()), CPU), target).run()
    text = planned_text(schedule, {"n": 8})
    golden("lir/quantized_layer", re.sub(r"_[0-9a-f]{16}\(", "(", text))  # no digests of kernels
