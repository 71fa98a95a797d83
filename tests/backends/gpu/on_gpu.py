"""Runs nodes and graphs on the GPU backend: in Triton's interpreter here, natively where there is
a GPU.

check_node("add", x, y)                              # against the reference; float tolerance as
given
got = run_node_on_gpu("softmax", x, axis=-1)
exe = compiled(graph)                                # bw.compile(graph, target="cuda"), no
fallback allowed
"""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import bitwright as bw
from bitwright.ir.dtype import dtype

pytest.importorskip("torch")
pytest.importorskip("triton")

os.environ.setdefault("BITWRIGHT_GPU_TUNE", "0")  # native tests take the static choice
RTOL = {"f64": 1e-12, "f32": 2e-6, "f16": 2e-3, "bf16": 1.6e-2}


def compiled(graph: Any, fallbacks: bool = False, **options: Any) -> Any:
    """An executable for target "cuda"; fails if a node has no kernel, unless `fallbacks`."""
    exe = bw.compile(graph, target="cuda", **options)
    if not fallbacks:
        refuse_fallbacks(exe)
    return exe


def refuse_fallbacks(exe: Any) -> None:
    """Fail if a node has no kernel, or one that did not compile in a run."""
    missing = [f"{step.op.op}: {step.why}" for step in exe.engine.fallbacks]
    assert not missing, missing


def node_graph(op: str, *arrays: Any, **attrs: Any) -> Any:
    """A graph of one node on inputs (None is an absent operand), with static shapes."""
    b = bw.Builder("one_node")
    values = []
    for number, array in enumerate(arrays):
        if array is None:
            values.append(None)
            continue
        element = dtype(array.dtype)
        values.append(b.input(f"x{number}", f"{element}[{', '.join(map(str, array.shape))}]"))
    found = getattr(b, op)(*values, **attrs)
    results = found if isinstance(found, tuple) else (found,)
    return b.build(**{f"y{n}": value for n, value in enumerate(results)})


def feeds_of(*arrays: Any) -> dict[str, Any]:
    return {f"x{n}": array for n, array in enumerate(arrays) if array is not None}


def run_node_on_gpu(op: str, *arrays: Any, **attrs: Any) -> list[Any]:
    """The results of one node, run by a kernel."""
    graph = node_graph(op, *arrays, **attrs)
    return list(compiled(graph).run(feeds_of(*arrays)).values())


def check_node(
    op: str, *arrays: Any, rtol: float | None = None, atol: float = 1e-6, **attrs: Any
) -> None:
    """Compare one node with the reference interpreter."""
    graph = node_graph(op, *arrays, **attrs)
    check_graph(graph, feeds_of(*arrays), rtol, atol)


def check_graph(
    graph: Any,
    feeds: Mapping[str, Any],
    rtol: float | None = None,
    atol: float = 1e-6,
    fallbacks: bool = False,
    **options: Any,
) -> Any:
    """Compare a graph with the reference interpreter; integers must be equal. Returns the
    executable."""
    exe = compiled(graph, fallbacks, **options)
    got = exe.run(dict(feeds))
    if not fallbacks:
        refuse_fallbacks(exe)
    wanted = bw.compile(graph, target="reference").run(dict(feeds))
    for name, want in wanted.items():
        close(got[name], want, rtol, atol)
    return exe


def close(got: Any, want: Any, rtol: float | None = None, atol: float = 1e-6) -> None:
    """Integers are equal; floats are close, relative to their type's precision."""
    assert got.dtype == want.dtype and got.shape == want.shape
    if want.dtype.kind in "iub":
        np.testing.assert_array_equal(got, want)
        return
    element = str(dtype(want.dtype))
    rtol = RTOL.get(element, 0.07) if rtol is None else rtol
    np.testing.assert_allclose(
        got.astype(np.float64), want.astype(np.float64), rtol=rtol, atol=atol, equal_nan=True
    )
