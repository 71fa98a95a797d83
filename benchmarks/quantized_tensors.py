"""Times statistics, calibration methods, quantization and quantized matmul.

    python benchmarks/quantized_tensors.py

CPU time of this process, the minimum of several repetitions.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

import bitwright as bw
from bitwright.quant import Statistics, choose
from bitwright.quant.tensor.observer import parameters_for


def min_seconds(function: Callable[[], object], repetitions: int = 5) -> float:
    function()
    times = []
    for _ in range(repetitions):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


def main() -> None:
    rng = np.random.default_rng(0)
    images = rng.normal(size=(8, 64, 56, 56)).astype(np.float32)
    for axis in (None, 1):
        seconds = min_seconds(lambda axis=axis: Statistics(axis).add(images))
        print(f"statistics, axis {axis}: {images.nbytes / seconds / 1e6:.0f} MB/s of f32")
    statistics = Statistics()
    statistics.add(rng.laplace(size=1_000_000))
    for kind, scheme in (("int8", "symmetric"), ("uint8", "asymmetric"), ("f8e4m3fn", "symmetric")):
        for method in ("minmax", "percentile", "entropy", "mse", "adaptive"):
            seconds = min_seconds(lambda k=kind, s=scheme, m=method: choose(statistics, k, s, m))
            print(f"{method} of {scheme} {kind}: {seconds * 1e3:.2f} ms")
    w = rng.normal(size=(384, 1536)).astype(np.float32)
    granularities = {
        "per tensor": {},
        "per axis": {"axis": 0},
        "in blocks of 32": {"axis": 1, "block": 32},
    }
    for words, axes in granularities.items():
        for method in ("minmax", "mse"):
            seconds = min_seconds(lambda m=method, p=axes: parameters_for(w, "int4", m, **p), 3)
            print(f"{method} of int4 weights {words}: {w.size / seconds / 1e6:.1f} M weights/s")
    x, y = bw.quantize_tensor(w, "int8"), bw.quantize_tensor(w.T, "int8", "minmax", axis=1)
    seconds = min_seconds(lambda: bw.quant.qmatmul(x, y), 3)
    print(f"qmatmul 384 x 1536 x 384: {2 * 384 * 1536 * 384 / seconds / 1e9:.1f} GOPS")


if __name__ == "__main__":
    main()
