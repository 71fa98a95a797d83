"""Convolutions of mobile networks, one thread: time and rate of the kernel alone.

    python benchmarks/conv.py [dense|depthwise]

Every layer runs repeatedly on the same memory; the minimum time counts.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from bitwright.backends.cpu.backend import CpuBackend
from bitwright.backends.cpu.runtime.emitted import STEP_BYTES
from bitwright.backends.cpu.runtime.program import Program
from bitwright.ops.core.builder import Builder
from bitwright.passes.fuse.fuse_regions import fuse_regions
from bitwright.passes.manager import run_passes
from bitwright.target import host

# height, width, channels in and out, filter, stride, is depthwise
LAYERS = [
    (224, 224, 3, 32, 3, 2, False),
    (112, 112, 32, 16, 1, 1, False),
    (112, 112, 16, 96, 1, 1, False),
    (56, 56, 24, 144, 1, 1, False),
    (56, 56, 144, 24, 1, 1, False),
    (28, 28, 192, 32, 1, 1, False),
    (14, 14, 96, 576, 1, 1, False),
    (14, 14, 576, 96, 1, 1, False),
    (7, 7, 960, 160, 1, 1, False),
    (12, 58, 240, 240, 1, 1, False),
    (3, 58, 480, 480, 1, 1, False),
    (1, 1, 480, 120, 1, 1, False),
    (56, 56, 64, 64, 3, 1, False),
    (112, 112, 32, 32, 3, 1, True),
    (112, 112, 96, 96, 3, 2, True),
    (56, 56, 144, 144, 3, 1, True),
    (28, 28, 192, 192, 3, 1, True),
    (14, 14, 384, 384, 3, 1, True),
    (14, 14, 512, 512, 3, 1, True),
    (7, 7, 960, 960, 3, 1, True),
    (12, 58, 240, 240, 5, 1, True),
    (3, 58, 480, 480, 5, 1, True),
]


def measure(layer: tuple[int, int, int, int, int, int, bool]) -> None:
    height, width, inner, outer, side, stride, is_depthwise = layer
    rng = np.random.default_rng(0)
    b = Builder("conv")
    groups = inner if is_depthwise else 1
    x = b.input("x", f"f32[1, {inner}, {height}, {width}]")
    first = b.relu(x)  # makes the image an intermediate value in NHWC layout
    spread = b.conv(first, b.constant(np.ones((inner, 1, 1, 1), np.float32)), None, groups=inner)
    weight = rng.normal(size=(outer, inner // groups, side, side)).astype(np.float32)
    pad, shift = side // 2, rng.normal(size=(outer, 1, 1)).astype(np.float32)
    y = b.conv(
        spread,
        b.constant(weight),
        None,
        strides=[stride, stride],
        pads=[pad] * 4,
        groups=groups,
    )
    graph = run_passes(b.build(y=b.clip(b.add(y, b.constant(shift)), 0, 6)), [fuse_regions])
    program = CpuBackend(host()).compile(graph, 1)
    program.run({"x": rng.normal(size=(1, inner, height, width)).astype(np.float32)})
    _, (table,) = next(iter(program._plans.tables.values()))
    times = {step.kernel: 1e9 for step in table.steps}
    idle = min(_seconds(program, table.address, 0) for _ in range(100))
    for _ in range(90):
        for number, step in enumerate(table.steps):
            taken = _seconds(program, table.address + STEP_BYTES * number, 1) - idle
            times[step.kernel] = min(times[step.kernel], taken)
    seconds = times[table.steps[-2].kernel]  # the last step transposes the result
    padding = sum(taken for kernel, taken in times.items() if kernel.startswith("pad"))
    count = outer * (height // stride) * (width // stride) * (inner // groups) * side * side
    kind = "depthwise" if is_depthwise else "dense"
    print(
        f"{kind:9} {height}x{width} {inner}->{outer} {side}x{side}/{stride}: "
        f"{seconds * 1e6:8.1f} us {2 * count / seconds / 1e9:6.1f} GFLOP/s"
        + (f"  (padding {padding * 1e6:.1f} us)" if padding else "")
    )


def _seconds(program: Program, steps: int, count: int) -> float:
    start = time.perf_counter()
    program._pool.run(steps, count)
    return time.perf_counter() - start


if __name__ == "__main__":
    for layer in LAYERS:
        if len(sys.argv) < 2 or sys.argv[1] == ("depthwise" if layer[-1] else "dense"):
            measure(layer)
