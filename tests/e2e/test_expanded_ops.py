"""Ops that others stand for when they are compiled: no step of the host, the same results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bitwright.ir.dtype import dtype
from bitwright.ir.graph import Graph
from bitwright.ir.types import TensorType
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.ops.core.opdef import Sample
from bitwright.ops.core.registry import get
from bitwright.pipeline import compile_graph

EXPANDED = ("einsum", "quantize", "dequantize", "dynamic_quantize", "f8_matmul")
CASES = [(op, number) for op in EXPANDED for number in range(len(get(op).samples()))]


def graph_of(op: str, case: Sample) -> tuple[Graph, dict[str, Any]]:
    b = Builder(op)
    given = {f"x{i}": np.asarray(x) for i, x in enumerate(case.inputs) if x is not None}
    inputs = {n: b.input(n, TensorType(dtype(x.dtype), x.shape)) for n, x in given.items()}
    operands = [inputs.get(f"x{i}") for i in range(len(case.inputs))]
    node = b.node(op, operands, case.attrs, [])
    return b.build(**{f"y{i}": value for i, value in enumerate(node.outputs)}), given


@pytest.mark.parametrize("op, number", CASES)
def test_samples(op: str, number: int) -> None:
    graph, given = graph_of(op, get(op).samples()[number])
    executable = compile_graph(graph, threads=2)
    assert not list(executable.engine.fallbacks)  # type: ignore[attr-defined]
    found = executable.run(given)
    for name, want in run(graph, given).items():
        assert (found[name].dtype, found[name].shape) == (want.dtype, want.shape)
        have, exact = found[name].astype(np.float64), want.astype(np.float64)
        if op in ("einsum", "f8_matmul"):
            np.testing.assert_allclose(have, exact, rtol=1e-5, atol=1e-5)
        else:
            np.testing.assert_array_equal(have, exact)


@pytest.mark.parametrize("element", ["float16", "float32", "float64"])
def test_quantized_values_of_halves_are_rounded_as_divided(element: str) -> None:
    """The quotient is rounded to the scale's type before it is rounded to a code."""
    x = np.random.default_rng(0).uniform(-40, 40, (64, 33)).astype(element)
    scale = np.array(0.3, element)
    for to in ("i8", "u4", "f8e4m3fn"):
        graph, given = graph_of("quantize", Sample((x, scale), {"to": to}))
        (found,), (want,) = compile_graph(graph).run(given).values(), run(graph, given).values()
        assert found.tobytes() == want.tobytes()


@pytest.mark.parametrize(
    "equation", ["bhid,bhjd->bhij", "abc,cd->abd", "bij,bkj->bik", "i,j->ij", "ab,ab->"]
)
def test_equations_with_symbolic_sizes(equation: str) -> None:
    sizes = {"a": 3, "b": 2, "c": 5, "d": 4, "h": 3, "i": 7, "j": 6, "k": 5}
    left = equation.split("->", maxsplit=1)[0].split(",")
    b = Builder("einsum")
    rng = np.random.default_rng(0)
    inputs = [b.input(f"x{i}", f"f32[{', '.join(labels)}]") for i, labels in enumerate(left)]
    graph = b.build(y=b.einsum(*inputs, equation=equation))
    given = {
        f"x{i}": rng.standard_normal([sizes[n] for n in labels]).astype(np.float32)
        for i, labels in enumerate(left)
    }
    executable = compile_graph(graph)
    assert not list(executable.engine.fallbacks)  # type: ignore[attr-defined]
    expected = np.einsum(equation, *given.values())
    np.testing.assert_allclose(executable.run(given)["y"], expected, rtol=1e-4, atol=1e-5)
