"""Products at each precision, one thread: f32 beside bf16 and f16, in Gop/s.

python benchmarks/halves.py
BITWRIGHT_TILES=off python benchmarks/halves.py      without AMX, on a machine that has it
"""

from __future__ import annotations

import time

import numpy as np

import bitwright as bw
from bitwright.target import host

SIZES = ((1, 384, 1536), (16, 384, 1536), (128, 384, 1536), (128, 1536, 384), (1024, 1024, 1024))
POLICIES = ("f32", "mixed_bf16", "f16")
RUNS = 40


def seconds(precision: str, rows: int, depth: int, columns: int) -> float:
    """The quickest of many runs; the product stands between two activations."""
    rng = np.random.default_rng(0)
    b = bw.Builder("product")
    x = b.relu(b.input("x", f"f32[{rows}, {depth}]"))
    w = b.parameter("w", rng.normal(size=(depth, columns)).astype(np.float32))
    exe = bw.compile(b.build(y=b.relu(b.matmul(x, w))), threads=1, precision=precision)
    feeds = {"x": rng.normal(size=(rows, depth)).astype(np.float32)}
    best = float("inf")
    for _ in range(RUNS):
        begin = time.perf_counter()
        exe.run(feeds)
        best = min(best, time.perf_counter() - begin)
    return best


def main() -> None:
    known = [name for name in ("amx-bf16", "avx512bf16", "avx512fp16", "f16c") if host().has(name)]
    print(f"{host().cpu}: {', '.join(known) or 'no instructions for halves'}")
    print("rows x depth x columns".ljust(24), *(name.rjust(12) for name in POLICIES))
    for size in SIZES:
        count = 2 * size[0] * size[1] * size[2]
        rates = [count / seconds(name, *size) / 1e9 for name in POLICIES]
        print(" x ".join(map(str, size)).ljust(24), *(f"{rate:12.1f}" for rate in rates))


if __name__ == "__main__":
    main()
