"""GFLOP/s of the f32 matmul kernel on one thread, vs. numpy and the machine's measured peak.

    python benchmarks/matmul.py [--target avx2] [--tile 9x3] [--seconds 1.0] [MxNxK ...]

The best call of each side; calls are interleaved (a median would depend on other load). The peak is
the best rate so far of independent multiply-adds on the target's registers.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read at the import of numpy
os.environ.setdefault("MKL_NUM_THREADS", "1")

import argparse
import ctypes
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from bitwright.backends.cpu.codegen import jit
from bitwright.backends.cpu.codegen.emit import Module, Signature, f32
from bitwright.backends.cpu.kernels.matmul.matmul import (
    Tile,
    best_tile,
    emit_matmul,
    pack,
    row_tiles_in_cache,
)
from bitwright.target import Target, named

SHAPES = ("128x384x384", "128x1536x384", "128x384x1536", "16x384x384", "49x320x1280")
SHAPES += ("784x64x64", "256x256x256", "512x512x512", "1024x1024x1024")
_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
_PEAK_ITERATIONS = 4000


class Peak:
    """Independent fused multiply-adds."""

    def __init__(self, target: Target) -> None:
        module, vector = Module(target), f32.vector(target.lanes(32))
        sums = target.vector_registers - 4
        with module.kernel("peak", Signature(("y",), ("iterations",))) as f:
            x = f.load(vector, f.args.pointer("y"))
            start = [f.const(vector, float(number)) for number in range(sums)]
            with f.loop(0, f.args.size("iterations"), carry=start) as loop:
                loop.next(*(f.fma(x, x, total) for total in loop.carried))
            f.store(f.combine(loop.results, f.add), f.args.pointer("y"))
        self.library = jit.load(module.text(), target)
        self.call = _KERNEL(self.library.address("peak"))
        self.y = np.zeros(64, np.float32)
        self.table = module.signatures["peak"].pack(
            y=self.y.ctypes.data, iterations=_PEAK_ITERATIONS
        )
        self.flops = 2 * sums * vector.lanes * _PEAK_ITERATIONS

    def __call__(self) -> None:
        self.call(self.table.ctypes.data, 0, 1)


class Ours:
    """The kernel for one target and tile."""

    def __init__(self, target: Target, tile: Tile) -> None:
        self.target, self.tile, module = target, tile, Module(target)
        self.signature = emit_matmul(module, "matmul", tile)
        self.library = jit.load(module.text(), target)
        self.call = _KERNEL(self.library.address("matmul"))

    def bind(self, a: np.ndarray, w: np.ndarray, y: np.ndarray) -> Callable[[], None]:
        packed, (rows, depth), columns = pack(w, self.tile), a.shape, w.shape[1]
        table = self.signature.pack(
            a=a.ctypes.data,
            w=packed.ctypes.data,
            y=y.ctypes.data,
            rows=rows,
            columns=columns,
            depth=depth,
            a_stride=depth,
            y_stride=columns,
            block=row_tiles_in_cache(self.target, self.tile, 4 * depth),
        )
        held = packed, table  # referenced by the closure

        def run() -> None:
            self.call(held[1].ctypes.data, 0, 1)

        return run


def best_times(seconds: float, *sides: Callable[[], None]) -> list[float]:
    """The shortest call of each side; calls are interleaved."""
    best = [float("inf")] * len(sides)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for number, side in enumerate(sides):
            begin = time.perf_counter()
            side()
            best[number] = min(best[number], time.perf_counter() - begin)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="*", default=SHAPES)
    parser.add_argument("--target", default="host")
    parser.add_argument("--tile", default="")
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args()
    target = named(options.target)
    peak, best = Peak(target), 0.0
    print(f"{target.cpu}, target {target}, one thread")
    print(f"{'M x N x K':>18} {'tile':>7}  {'ours':>7}  {'numpy':>7}  {'peak':>7}  of peak")
    rng = np.random.default_rng(0)
    for shape in options.shapes:
        m, n, k = map(int, shape.split("x"))
        tile = best_tile(target, n)
        if options.tile:
            tile = Tile(*map(int, options.tile.split("x")), tile.lanes)
        ours = Ours(target, tile)
        best = max(best, peak.flops / best_times(options.seconds / 4, peak)[0] / 1e9)
        a = rng.normal(size=(m, k)).astype(np.float32)
        w = rng.normal(size=(k, n)).astype(np.float32)
        y, other = np.empty((m, n), np.float32), np.empty((m, n), np.float32)
        run = ours.bind(a, w, y)
        times = best_times(options.seconds, run, partial(np.matmul, a, w, other))
        np.testing.assert_allclose(y, other, 1e-4, 1e-4 * np.abs(other).max())
        rates = [2 * m * n * k / seconds / 1e9 for seconds in times]
        print(
            f"{shape:>18} {tile.rows:>3}x{tile.columns:<3}  {rates[0]:7.1f}  {rates[1]:7.1f}"
            f"  {best:7.1f}  {100 * rates[0] / best:6.0f}%"
        )


if __name__ == "__main__":
    main()
