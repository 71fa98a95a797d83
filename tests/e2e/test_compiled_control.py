"""Compiled if, loop and scan: bodies are kernels, results equal the interpreter's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bitwright.errors import RunError
from bitwright.ir.dtype import dtype
from bitwright.ir.graph import Graph
from bitwright.ir.types import TensorType
from bitwright.lir.schedule import ControlStep
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.ops.core.registry import get
from bitwright.pipeline import compile_graph


def check(graph: Graph, *feeds: dict[str, Any], threads: int = 2) -> Any:
    """Compares compiled results with the interpreter's; returns the executable."""
    executable = compile_graph(graph, threads=threads)
    engine: Any = executable.engine
    assert not list(engine.fallbacks)
    assert any(isinstance(step, ControlStep) for step in engine.schedule.steps)
    for given in feeds:
        found = executable.run(given)
        for name, want in run(graph, given).items():
            assert found[name].shape == want.shape
            np.testing.assert_allclose(found[name], want, rtol=1e-5)
    return executable


@pytest.mark.parametrize("op", ["if", "loop", "scan"])
def test_samples(op: str) -> None:
    for case in get(op).samples():
        b = Builder(op)
        arrays = {f"x{i}": x for i, x in enumerate(case.inputs) if x is not None}
        values = [
            None if x is None else b.input(f"x{i}", TensorType(dtype(x.dtype), x.shape))
            for i, x in enumerate(case.inputs)
        ]
        node = b.node(op, values, case.attrs, [])
        graph = b.build(**{f"y{i}": value for i, value in enumerate(node.outputs)})
        check(graph, arrays)


def layer(name: str, factor: float) -> Graph:
    b = Builder(name)
    x, w = b.input("x", "f32[n, 8]"), b.input("w", "f32[8, 8]")
    return b.build(y=b.relu(b.add(b.matmul(x, w), factor)))


def test_branches_with_symbolic_sizes() -> None:
    b = Builder("m")
    x, w, flag = b.input("x", "f32[n, 8]"), b.input("w", "f32[8, 8]"), b.input("flag", "bool[]")
    bodies: dict[str, Any] = {"then": layer("then", 1.0), "else": layer("else", -1.0)}
    (y,) = b.node("if", [flag, b.mul(x, 2), w], bodies, []).outputs
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((8, 8)).astype(np.float32)
    feeds = [
        {"x": rng.standard_normal((n, 8)).astype(np.float32), "w": weight, "flag": np.array(flag)}
        for n, flag in ((3, True), (3, False), (5, False), (1, True), (3, True))
    ]
    graph = b.build(y=b.add(y, 1))
    for threads in (1, 3):
        check(graph, *feeds, threads=threads)


def test_a_fallback_in_a_body_is_reported() -> None:
    def body(name: str, op: str) -> Graph:
        b = Builder(name)
        return b.build(y=b.op(op, b.input("x", "f32[3, 3]")))

    b = Builder("m")
    bodies: dict[str, Any] = {"then": body("then", "det"), "else": body("else", "det")}
    operands = [b.input("flag", "bool[]"), b.input("x", "f32[3, 3]")]
    (y,) = b.node("if", operands, bodies, []).outputs
    engine: Any = compile_graph(b.build(y=y)).engine
    assert {step.op.op for step in engine.fallbacks} == {"det"}


def test_an_error_in_a_body_is_raised() -> None:
    body = Builder("body")
    step, going = body.input("step", "i64[]"), body.input("going", "bool[]")
    table = body.input("table", "f32[4]")
    graph = body.build(going=going, table=table, row=body.gather(table, step, axis=0))
    b = Builder("m")
    count, table = b.input("count", "i64[]"), b.input("table", "f32[4]")
    _, rows = b.node("loop", [count, None, table], {"body": graph, "carried": 1}, []).outputs
    feeds = {"count": np.array(4), "table": np.arange(4, dtype=np.float32)}
    executable = check(b.build(rows=rows), feeds)
    with pytest.raises(RunError, match="index 4 is outside"):
        executable.run({**feeds, "count": np.array(5)})
