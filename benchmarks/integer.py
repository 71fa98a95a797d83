"""GOPS of int8 products on one thread, vs. the f32 kernel on the same shape.

    python benchmarks/integer.py [--target avx2] [--seconds 0.5] [MxNxK ...]

The best of many calls. The epilogue adds a bias, scales per column and requantizes to u8.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import bitwright.backends.cpu.lowering.registered as lowerings
from bitwright.backends.cpu.codegen import jit
from bitwright.backends.cpu.lowering.context import Lowering
from bitwright.ir.graph import Graph
from bitwright.lir.schedule import KernelStep
from bitwright.ops.core.builder import Builder
from bitwright.passes.fuse.fuse_regions import fuse_regions
from bitwright.rewrite import Trace
from bitwright.target import Target, named

SHAPES = (
    "128x1536x384",
    "128x384x1536",
    "128x384x384",
    "1x1536x384",
    "784x32x144",
    "512x1024x1024",
)
_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
assert lowerings.__name__  # importing it registers the lowerings


def layer(m: int, n: int, k: int, is_real: bool) -> Graph:
    rng, b = np.random.default_rng(0), Builder("layer")
    w = rng.normal(size=(k, n))
    w = np.rint(127 * w / np.abs(w).max(0))  # like trained weights: few are large
    if is_real:
        x = b.input("x", f"f32[{m}, {k}]")
        y = b.matmul(x, b.constant(w.astype(np.float32)))
        return fuse_regions(b.build(y=b.add(y, b.constant(np.ones(n, np.float32)))), Trace())
    bias = b.constant(rng.integers(-999, 999, n).astype(np.int32))
    x, zero = b.input("x", f"u8[{m}, {k}]"), b.constant(np.uint8(117))
    total = b.integer_matmul(x, b.constant(w.astype(np.int8)), zero, None, bias)
    factor = b.constant(rng.uniform(1e-4, 1e-3, n).astype(np.float32))
    y = b.requantize(b.mul(b.cast(total, to="f32"), factor), b.constant(np.uint8(33)), to="u8")
    return fuse_regions(b.build(y=y), Trace())


def calls_of(graph: Graph, target: Target) -> list[Callable[[], None]]:
    """One function per kernel call of the graph, in order."""
    ctx = Lowering(graph, target)
    steps = ctx.run().steps
    held: dict[Any, Any] = {}
    calls = []
    for step in steps:
        assert isinstance(step, KernelStep)
        for view in step.pointers.values():
            buffer = view.buffer
            if buffer not in held:
                empty = np.zeros(int(buffer.count), buffer.dtype.numpy)  # type: ignore[call-overload]
                held[buffer] = empty if buffer.array is None else buffer.array
        kernel = ctx.kernels[step.kernel]
        slots = {name: held[view.buffer].ctypes.data for name, view in step.pointers.items()}
        table = kernel.signature.pack(**slots, **step.sizes)  # type: ignore[arg-type]
        library = jit.load(ctx.text(kernel), target)
        calls.append(partial(_call, library, library.address(kernel.name), table, held))
    return calls


def _call(library: object, address: int, table: Any, held: object) -> None:
    _KERNEL(address)(table.ctypes.data, 0, 1)


def best_seconds(graph: Graph, target: Target, seconds: float) -> float:
    """The sum of the shortest times of the graph's kernels."""
    calls = calls_of(graph, target)
    best, end = [float("inf")] * len(calls), time.perf_counter() + seconds
    while time.perf_counter() < end:
        for place, call in enumerate(calls):
            begin = time.perf_counter()
            call()
            best[place] = min(best[place], time.perf_counter() - begin)
    return sum(best)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="*", default=SHAPES)
    parser.add_argument("--target", default="host")
    parser.add_argument("--seconds", type=float, default=0.5)
    options = parser.parse_args()
    target = named(options.target)
    print(f"{target.cpu}, target {target}, one thread")
    print(
        f"{'M x N x K':>16} {'int8 us':>9} {'GOPS':>7} {'f32 us':>9} {'GFLOP/s':>8} {'faster':>7}"
    )
    for shape in options.shapes:
        m, n, k = map(int, shape.split("x"))
        int8, real = (
            best_seconds(layer(m, n, k, is_real), target, options.seconds)
            for is_real in (False, True)
        )
        rates = [2 * m * n * k / seconds / 1e9 for seconds in (int8, real)]
        print(
            f"{shape:>16} {int8 * 1e6:9.1f} {rates[0]:7.0f} {real * 1e6:9.1f} {rates[1]:8.0f}"
            f" {real / int8:6.2f}x"
        )


if __name__ == "__main__":
    main()
