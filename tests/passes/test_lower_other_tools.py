"""i32 products, which importers write for integer operators of other tools, become integer ops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.passes.lower_integer.lower_integer import lower_integer
from bitwright.passes.simplify.canonicalize import canonicalize
from bitwright.pipeline import compile_graph
from bitwright.rewrite.trace import Trace

RNG = np.random.default_rng(0)


def wide(b: Builder, qvalues: Any, zero: Any = None) -> Any:
    x = b.cast(qvalues if not isinstance(qvalues, np.ndarray) else b.constant(qvalues), to="i32")
    return x if zero is None else b.sub(x, b.cast(b.constant(zero), to="i32"))


@pytest.mark.parametrize("zero", [(), (1,), (16,), (1, 16), None])
@pytest.mark.parametrize("limit", ["0", "1000000"])
@pytest.mark.parametrize("transposed", ["", "quantized", "widened"])
def test_weights_too_large_to_fold_are_read_quantized(
    zero: tuple[int, ...] | None, limit: str, transposed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BITWRIGHT_FOLD_LIMIT", limit)
    b = Builder("wide")
    qvalues = RNG.integers(-128, 128, (24, 16)).astype(np.int8)
    offset = None if zero is None else RNG.integers(-9, 9, zero).astype(np.int8)
    if transposed == "quantized":
        w = wide(b, b.transpose(b.constant(np.ascontiguousarray(qvalues.T)), perm=(1, 0)), offset)
    elif transposed == "widened":
        column = offset if offset is None or offset.size == 1 else offset.reshape(-1, 1)
        w = b.transpose(wide(b, np.ascontiguousarray(qvalues.T), column), perm=(1, 0))
    else:
        w = wide(b, qvalues, offset)
    rows = b.sub(b.cast(b.input("x", "u8[n, 24]"), to="i32"), b.constant(np.int32(7)))
    graph = b.build(y=b.matmul(rows, w))
    found = canonicalize(lower_integer(canonicalize(graph, Trace()), Trace()), Trace())
    assert [n.op for n in found.nodes if not n.is_boundary] == ["integer_matmul"]
    feeds = {"x": RNG.integers(0, 256, (5, 24)).astype(np.uint8)}
    np.testing.assert_array_equal(run(found, feeds)["y"], run(graph, feeds)["y"])


@pytest.mark.parametrize("groups, channels", [(1, 8), (8, 1)])
def test_a_bias_near_the_limits_of_i32_is_exact(groups: int, channels: int) -> None:
    """Quantizers clip the biases of unimportant channels to the limits of i32."""
    b = Builder("conv")
    x = b.sub(b.cast(b.input("x", "u8[1, 8, 9, 9]"), to="i32"), b.constant(np.int32(11)))
    w = wide(b, RNG.integers(-127, 128, (8, channels, 3, 3)).astype(np.int8))
    bias = np.array([-(2**31) + 214748, 7, -2, 2**31 - 9, 0, 5, -(2**31), 1], np.int32)
    attrs = {"pads": (1, 1, 1, 1), "groups": groups}
    graph = b.build(y=b.conv(x, w, b.constant(bias), **attrs))
    found = canonicalize(lower_integer(canonicalize(graph, Trace()), Trace()), Trace())
    assert [n.op for n in found.nodes if not n.is_boundary] == ["integer_conv"]
    feeds = {"x": RNG.integers(0, 256, (1, 8, 9, 9)).astype(np.uint8)}
    exact = run(graph, feeds)["y"]
    np.testing.assert_array_equal(run(found, feeds)["y"], exact)
    np.testing.assert_array_equal(compile_graph(graph).run(feeds)["y"], exact)
