"""Means of quantized values are exact sums, within one scale of the floating-point mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_lower_integer import check, lowered, through, x_of

from bitwright.backends.cpu.backend import CpuBackend
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.passes.fuse.fuse_regions import fuse_regions
from bitwright.rewrite.trace import Trace
from bitwright.target import named


def same_when_compiled(graph: Any, **feeds: Any) -> None:
    """Results equal the interpreter's to the bit on every instruction set and thread count."""
    found = lowered(graph)[0]
    (want,) = run(found, feeds).values()
    fused = fuse_regions(found, Trace())
    for target in ("host", "avx2", "sse2"):
        if named(target).runs_here():
            for threads in (1, 3):
                (got,) = CpuBackend(named(target)).compile(fused, threads).run(feeds).values()
                np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("shape", ["[2, 33, 7, 5]", "[2, 33, h, w]"])
@pytest.mark.parametrize("kind, zero", [("u8", 120), ("i8", None)])
@pytest.mark.parametrize("axes, keepdims", [((2, 3), True), ((-1, -2), False), ((1,), True)])
def test_means(shape: str, kind: str, zero: int | None, axes: Any, keepdims: bool) -> None:
    b = Builder("mean")
    x = through(b, b.input("x", f"f32{shape}"), 0.03, zero, kind)
    graph = b.build(through(b, b.reduce_mean(x, axes=axes, keepdims=keepdims), 0.011, 100))
    feeds = {"x": x_of(2, 33, 7, 5)}
    ops, _ = check(graph, 0.011, **feeds)
    assert "reduce_sum" in ops and ops.count("dequantize") == 1
    same_when_compiled(graph, **feeds)


@pytest.mark.parametrize("kind, zero", [("u8", 120), ("i8", None)])
@pytest.mark.parametrize(
    "attrs",
    [
        {"kernel": (2, 2), "strides": (2, 2)},
        {"kernel": (3, 2), "strides": (1, 2), "pads": (1, 0, 1, 1)},
        {"kernel": (3, 3), "pads": (1, 1, 1, 1), "count_include_pad": True},
        {"kernel": (5, 7)},
    ],
)
def test_average_pools(kind: str, zero: int | None, attrs: Any) -> None:
    b = Builder("pool")
    x = through(b, b.input("x", "f32[2, 17, 9, 7]"), 0.03, zero, kind)
    graph = b.build(through(b, b.relu(b.avg_pool(x, **attrs)), 0.011, 0))
    feeds = {"x": x_of(2, 17, 9, 7)}
    ops, _ = check(graph, 0.011, **feeds)
    wanted = ["integer_conv", "cast", "mul", "requantize", "dequantize"]
    assert ops == ["quantize", *wanted]
    same_when_compiled(graph, **feeds)


def test_a_pool_over_the_whole_image_is_a_mean() -> None:
    b = Builder("pool")
    x = through(b, b.input("x", "f32[2, 17, 20, 17]"), 0.03, 120)
    graph = b.build(through(b, b.avg_pool(x, kernel=(20, 17)), 0.011, 128))
    feeds = {"x": x_of(2, 17, 20, 17)}
    ops, _ = check(graph, 0.011, **feeds)
    assert "reduce_sum" in ops and "avg_pool" not in ops
    same_when_compiled(graph, **feeds)


@pytest.mark.parametrize(
    "shape, attrs, why",
    [
        ("[1, 4, 40, 40]", {"kernel": (20, 20)}, "too large"),
        ("[1, 4, h, w]", {"kernel": (3, 3), "pads": (1, 1, 1, 1)}, "depends on the image size"),
        ("[1, 4, 5, 5]", {"kernel": (2, 2), "strides": (2, 2), "ceil": True}, "beyond the image"),
    ],
)
def test_pools_that_stay_float_have_a_reason(shape: str, attrs: Any, why: str) -> None:
    b = Builder("pool")
    x = through(b, b.input("x", f"f32{shape}"), 0.03, 9)
    _, ops, refused = lowered(b.build(b.avg_pool(x, **attrs)))
    assert "avg_pool" in ops and why in refused
