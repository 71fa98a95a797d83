"""Upcasts half-precision models to f32 before quantization.

    f16 constants -> f32        inputs and outputs keep their types, through casts

Scales are f32, and ops between quantized products run in f32 on most processors anyway. Only the
types of inputs and outputs remain f16.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.ir.dtype import DType, bf16, f16, f32
from bitwright.ir.graph import Graph, Value
from bitwright.ir.types import TensorType, ValueType
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.check import verify

HALVES = (f16, bf16)


def upcast_halves(graph: Graph) -> Graph:
    """The graph in f32; unchanged without half-precision values, or with bodies or states."""
    values = [value for node in graph.nodes for value in node.outputs]
    if not any(map(_is_half, values)):
        return graph
    if any(node.bodies or node.op == "state" for node in graph.nodes):
        return graph
    b = Builder(graph.name)
    for value in values:
        b.fresh_name(value.name)
    new: dict[Value, Value] = {}
    for node in graph.nodes:
        b.loc = node.loc
        inputs = tuple(None if v is None else new[v] for v in node.inputs)
        if node.op == "input":
            kept = b.append(node).outputs[0]
            new[kept] = b.cast(kept, to=f32) if _is_half(kept) else kept
            continue
        attrs = {name: _wide_attr(value) for name, value in node.attrs.items()}
        types = tuple(map(_wide, node.types))
        made = b.append(node.with_(inputs=inputs, attrs=attrs, types=types))
        new.update(zip(node.outputs, made.outputs, strict=True))
    outputs = tuple(
        (name, b.cast(new[v], to=v.dtype) if _is_half(v) else new[v]) for name, v in graph.outputs
    )
    return verify(graph.with_(nodes=tuple(b.nodes), outputs=outputs))


def _is_half(value: Value) -> bool:
    return isinstance(value.type, TensorType) and value.dtype in HALVES


def _wide(type_: ValueType) -> ValueType:
    is_half = isinstance(type_, TensorType) and type_.dtype in HALVES
    return type_.with_dtype(f32) if is_half else type_  # type: ignore[union-attr]


def _wide_attr(value: Any) -> Any:
    """A half-precision dtype or array attribute in f32."""
    if isinstance(value, np.ndarray):
        is_half = any(value.dtype == half.numpy for half in HALVES)
        return value.astype(np.float32) if is_half else value
    return f32 if isinstance(value, DType) and value in HALVES else value
