"""Builds a quantized graph twice: with parameters that are states, and with constants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bitwright.backends.cpu.backend import CpuBackend
from bitwright.ir.graph import Graph, Value
from bitwright.ops.core.builder import Builder
from bitwright.passes.manager import run_passes
from bitwright.pipeline import CPU, INFERENCE
from bitwright.target import named

INTEGER = {8: (-127, 127), 4: (-8, 7), 2: (-2, 1), 1: (-1, 1)}


class Model:
    """A builder of one of the two forms; the same seed gives the same parameters."""

    def __init__(self, trains: bool, seed: int = 0) -> None:
        self.b, self.trains, self.rng, self.count = Builder("model"), trains, None, 0
        self.rng = np.random.default_rng(seed)

    def parameter(self, array: Any) -> Value:
        self.count += 1
        array = np.asarray(array)
        if not self.trains:
            return self.b.constant(array)
        return self.b.state(f"p{self.count}", array)

    def through(self, x: Any, scale: float, zero: int | None = None, kind: str = "u8") -> Value:
        """dequantize(quantize(x)) with one scale."""
        number = np.float32(scale * self.rng.uniform(0.9, 1.1))
        s = self.parameter(number)
        element = {"u8": np.uint8, "i8": np.int8}[kind]
        z = None if zero is None else self.parameter(np.array(zero, element))
        return self.b.dequantize(self.b.quantize(x, s, z, to=kind), s, z)

    def weight(
        self, *shape: int, axis: int | None = None, bits: int = 8, scale: float = 0.01
    ) -> Value:
        """A float weight that is quantized to so many bits, held in i8."""
        low, high = INTEGER[bits]
        w = self.parameter(self.rng.normal(size=shape).astype(np.float32) * scale * high / 2)
        counts = () if axis is None else (shape[axis],)
        s = self.parameter((scale * self.rng.uniform(0.5, 1.5, counts)).astype(np.float32))
        q = self.b.quantize(w, s, to="i8", axis=axis)
        if bits < 8:
            q = self.b.clip(q, np.int8(low), np.int8(high))
        return self.b.dequantize(q, s, axis=axis)

    def bias(self, *shape: int, scale: float = 0.3) -> Value:
        return self.parameter(self.rng.normal(size=shape).astype(np.float32) * scale)


def lowered(graph: Graph) -> Graph:
    return run_passes(graph, (*INFERENCE, *CPU))


def ops(graph: Graph) -> list[str]:
    """The names of ops, those in fused regions included."""
    return [node.op for _, node in graph.walk() if not node.is_boundary]


def results(graph: Graph, feeds: Mapping[str, Any], target: str, threads: int) -> list[Any]:
    found = CpuBackend(named(target)).compile(lowered(graph), threads).run(feeds)
    return list(found.values())


def both(make: Callable[[Model], Graph]) -> tuple[Graph, Graph]:
    return make(Model(True)), make(Model(False))


def check(
    make: Callable[[Model], Graph],
    feeds: Mapping[str, Any],
    targets: tuple[str, ...] = ("host", "avx2", "sse2"),
    threads: tuple[int, ...] = (1, 2, 3),
) -> list[str]:
    """Checks that both forms give the same bits; returns the ops of the trained one."""
    trained, frozen = both(make)
    found = ops(lowered(trained))
    for target in targets:
        if not named(target).runs_here():
            continue
        want = results(frozen, feeds, target, 1)
        for count in threads if target == targets[0] else (2,):
            got = results(trained, feeds, target, count)
            for one, other in zip(got, want, strict=True):
                np.testing.assert_array_equal(one, other)
    return found
