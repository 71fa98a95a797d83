"""Runs a graph in f64, as the reference for f32 results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bitwright.ir import DType, Graph, TensorType, Value, dtype
from bitwright.ops.core.check import verify
from bitwright.ops.core.interpret import run

Array = np.ndarray


def run_in_f64(graph: Graph, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """The results of the graph in f64 from the same weights and inputs."""
    return run(verify(widened(graph)), {name: _array(array) for name, array in feeds.items()})


def widened(graph: Graph) -> Graph:
    moved: dict[Value, Value] = {}
    nodes = []
    for node in graph.nodes:
        again = node.with_(
            inputs=tuple(None if v is None else moved[v] for v in node.inputs),
            attrs={name: _attr(value) for name, value in node.attrs.items()},
            types=tuple(_type(type_) for type_ in node.types),
        )
        moved.update(zip(node.outputs, again.outputs, strict=True))
        nodes.append(again)
    outputs = tuple((name, moved[value]) for name, value in graph.outputs)
    updates = tuple((moved[state], moved[value]) for state, value in graph.updates)
    return graph.with_(nodes=tuple(nodes), outputs=outputs, updates=updates)


def _attr(value: Any) -> Any:
    if isinstance(value, Graph):
        return widened(value)
    if isinstance(value, DType):
        return dtype("f64") if value == dtype("f32") else value
    return _array(value) if isinstance(value, np.ndarray) else value


def _array(array: Array) -> Array:
    return array.astype(np.float64) if array.dtype == np.float32 else array


def _type(type_: Any) -> Any:
    if isinstance(type_, TensorType) and type_.dtype == dtype("f32"):
        return type_.with_dtype(dtype("f64"))
    return type_
