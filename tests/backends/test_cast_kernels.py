"""Casts between all computed types equal the interpreter to the bit, alone and inside a region."""

import numpy as np
import pytest
from run_kernel import TARGETS, Run, assert_same, graph_of, lower, reference

from bitwright.ir.dtype import dtype
from bitwright.ops.core.builder import Builder
from bitwright.passes.fuse.fuse_regions import COMPUTED, fuse_regions
from bitwright.rewrite.trace import Trace
from bitwright.target import named

TYPES = sorted(element.name for element in COMPUTED)


def edges(element):
    """Limits of every type, neighbours of halves, denormals, NaN, and random numbers."""
    element = dtype(element)
    random = np.random.default_rng(3)
    if element.name == "bool":
        return np.array([True, False] * 9)
    if element.is_float:
        powers = 2.0 ** np.array([0, 7, 8, 11, 15, 16, 23, 24, 31, 32, 52, 53, 62, 63, 64, 127])
        whole = np.concatenate(
            [powers, powers - 1, powers + 1, powers - 0.5, [65504, 65519, 65520]]
        )
        small = np.array([0.0, 0.49999, 0.5, 1.5, 2.5, 1e-3, 6e-8, 2.9e-8, 1e-40, 5e-324, 3.4e38])
        wild = random.standard_normal(200) * 10.0 ** random.uniform(-12, 20, 200)
        some = np.concatenate([whole, small, wild, random.uniform(-300, 300, 100)])
        some = np.concatenate([some, -some, [np.nan, np.inf, -np.inf]])
        with np.errstate(all="ignore"):
            return some.astype(element.numpy)
    low, high = int(element.min), int(element.max)
    limits = [low, low + 1, high, high - 1, 0, 1]
    limits += [v for p in range(element.bits) for v in (2**p, 2**p - 1, 2**p + 1) if v <= high]
    drawn = random.integers(low, high, 200, element.numpy, endpoint=True)
    return np.concatenate([np.array(limits, element.numpy), drawn])


@pytest.mark.parametrize("source", TYPES)
@pytest.mark.parametrize("target", TARGETS)
def test_every_pair(target, source):
    x = edges(source)
    b = Builder("casts")
    value = b.input("x", f"{source}[{x.size}]")
    graph = b.build(**{f"to_{to}": b.cast(value, to=to) for to in TYPES})
    done = Run(graph, {"x": x}, named(target), threads=2)
    for name, expected in reference(graph, {"x": x}).items():
        assert_same(done.outputs[name], expected)


def test_a_cast_inside_a_region_rounds():
    """f32 -> f16 -> f32 rounds to f16, also without a store in between."""
    x = edges("f32")
    b = Builder("region")
    value = b.input("x", f"f32[{x.size}]")
    half = b.cast(b.mul(value, 3.0), to="f16")
    graph = b.build(y=b.cast(b.cast(half, to="f32"), to="i32"))
    fused = fuse_regions(graph, Trace())
    assert [node.op for node in fused.nodes if not node.is_boundary] == ["fused"]
    done = Run(fused, {"x": x}, threads=2)
    with np.errstate(all="ignore"):
        assert_same(done.outputs["y"], reference(graph, {"x": x})["y"])


@pytest.mark.parametrize("pair", ["f64 f8e4m3fn", "i64 f4e2m1", "c64 f32"])
def test_other_types_fall_back_to_the_interpreter(pair):
    source, to = pair.split()
    x = np.ones(5, dtype(source).numpy)
    steps = lower(graph_of("cast", x, to=to)).schedule.fallbacks
    assert [step.op.op for step in steps] == ["cast"]
