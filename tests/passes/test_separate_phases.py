"""Transposed convolutions become convolutions of all phases with the same results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bitwright as bw
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.passes.simplify.canonicalize import canonicalize
from bitwright.passes.simplify.separate_phases import separate_phases
from bitwright.rewrite.trace import Trace

RNG = np.random.default_rng(0)


def normal(*shape: int) -> Any:
    return RNG.normal(size=shape).astype(np.float32)


def transposed(x: str, w: Any, function: str = "", **attrs: Any) -> Any:
    b = Builder("up")
    y = b.conv_transpose(
        b.input("x", f"f32{x}"), b.constant(w), b.constant(normal(w.shape[1])), **attrs
    )
    return b.build(getattr(b, function)(y) if function else y)


GEOMETRIES = {
    "side by side": ((5, 6, 2, 2), {"strides": (2, 2)}),
    "overlapping": ((5, 6, 4, 4), {"strides": (2, 2), "pads": (1, 1, 1, 1)}),
    "uneven": ((5, 6, 3, 3), {"strides": (2, 2), "pads": (1, 1, 1, 1), "output_padding": (1, 1)}),
    "one way": ((5, 6, 5, 3), {"strides": (3, 1), "pads": (0, 2, 2, 0)}),
    "plain": ((5, 6, 3, 3), {"pads": (1, 1, 1, 1)}),
    "cut at the start": ((5, 6, 4, 6), {"strides": (2, 3), "pads": (3, 4, 0, 1)}),
}


@pytest.mark.parametrize("form", GEOMETRIES)
@pytest.mark.parametrize("function", ["", "relu", "sigmoid"])
@pytest.mark.parametrize("shape", ["[2, 5, 7, 4]", "[n, 5, h, w]"])
def test_phases_give_the_same_numbers(form: str, function: str, shape: str) -> None:
    taps, attrs = GEOMETRIES[form]
    graph = transposed(shape, normal(*taps), function, **attrs)
    found = canonicalize(separate_phases(graph, Trace()), Trace())
    ops = [n.op for n in found.nodes if not n.is_boundary]
    assert "conv" in ops and "conv_transpose" not in ops
    assert not function or ops.index(function) == ops.index("conv") + 1
    feeds = {"x": normal(2, 5, 7, 4)}
    (want,), (got,) = run(graph, feeds).values(), run(found, feeds).values()
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_1d() -> None:
    graph = transposed("[2, 5, n]", normal(5, 3, 4), "tanh", strides=(2,), pads=(1, 1))
    found = canonicalize(separate_phases(graph, Trace()), Trace())
    feeds = {"x": normal(2, 5, 9)}
    (want,), (got,) = run(graph, feeds).values(), run(found, feeds).values()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_an_empty_result() -> None:
    graph = transposed("[1, 5, n]", normal(5, 3, 5), "tanh", strides=(1,), pads=(3, 3))
    found = separate_phases(graph, Trace())
    (want,), (got,) = (run(g, {"x": normal(1, 5, 2)}).values() for g in (graph, found))
    assert got.shape == want.shape == (1, 3, 0)


@pytest.mark.parametrize(
    "taps, attrs, why",
    [
        ((5, 6, 1, 1), {"strides": (2, 2)}, "4.0 times as many taps"),
        ((4, 3, 2, 2), {"strides": (2, 2), "groups": 2}, "groups"),
        ((5, 6, 2, 2), {"dilations": (2, 2)}, "dilations"),
    ],
)
def test_what_stays_has_a_reason(taps: Any, attrs: Any, why: str) -> None:
    b, trace = Builder("up"), Trace()
    y = b.conv_transpose(
        b.input("x", f"f32[1, {taps[0]}, 7, 7]"), b.constant(normal(*taps)), **attrs
    )
    found = separate_phases(b.build(y), trace)
    assert "conv_transpose" in [n.op for n in found.nodes]
    assert why in "\n".join(map(str, trace.events))


def test_quantized_transposed_convolutions_run_in_int8() -> None:
    b = Builder("head")
    x = b.relu(b.conv(b.input("x", "f32[n, 8, h, w]"), b.constant(normal(16, 8, 1, 1))))
    x = b.relu(b.conv_transpose(x, b.constant(normal(16, 16, 2, 2)), strides=(2, 2)))
    graph = b.build(b.conv(x, b.constant(normal(4, 16, 1, 1))))
    batches = [{"x": normal(2, 8, 12, 12)} for _ in range(4)]
    q = bw.quantize(graph, data=batches)
    assert len(q.report.layers) == 3
    assert not [layer for layer in q.report.layers if layer.scheme == "float"]
    (want,), (got,) = run(graph, batches[0]).values(), bw.compile(q.graph).run(batches[0]).values()
    assert got.shape == want.shape
    assert np.square(want - got).mean() < 1e-3 * np.square(want).mean()
