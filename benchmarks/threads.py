"""Cost of threads: an empty phase, a run after a pause, a call from Python.

    python benchmarks/threads.py [threads]

Minimum and median in microseconds. The pauses show the difference between spinning and sleeping
workers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np

from bitwright.backends.cpu.runtime.native import runtime
from bitwright.backends.cpu.runtime.pool import Pool
from bitwright.backends.cpu.runtime.shared_block import BARRIER_AFTER, step_table
from bitwright.ops.core.builder import Builder
from bitwright.pipeline import compile_graph

PHASES = 100
PAUSES = (0.0, 100e-6, 400e-6, 5e-3)


def timed(action: Callable[[], object], pause: float = 0.0, count: int = 300) -> str:
    times = []
    for _ in range(count):
        end = time.perf_counter() + pause
        while time.perf_counter() < end:
            pass
        begin = time.perf_counter()
        action()
        times.append(time.perf_counter() - begin)
    times.sort()
    return f"{times[0] * 1e6:8.2f} {times[count // 2] * 1e6:8.2f}"


def main() -> None:
    threads = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    pool = Pool(threads)
    print(f"{threads} threads{'minimum':>32} {'median':>8}")
    for count in (1, PHASES):
        steps = step_table([(runtime().nothing, 0, BARRIER_AFTER)] * count)
        for pause in PAUSES:
            found = timed(lambda s=steps: pool.run(s.ctypes.data, len(s)), pause)  # type: ignore[misc]
            print(f"{count:4} phases, {pause * 1e6:6.0f} us after the last{found}")
    pool.close()
    b = Builder("tiny")
    executable = compile_graph(b.build(y=b.relu(b.input("x", "f32[n, 64]"))), threads=threads)
    x = np.ones((2, 64), np.float32)
    print(f"{'a call of a tiny model':36}{timed(lambda: executable.run({'x': x}), count=3000)}")


if __name__ == "__main__":
    main()
