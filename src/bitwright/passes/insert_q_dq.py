"""Insert quantize -> dequantize behind every value that a calibration record names.

    x -> relu -> r -> add              x -> relu -> r -> quantize -> dequantize -> add

Every user of such a value (node, graph output or state update) reads the dequantized value instead.
Names and source locations are preserved; the new nodes are named after the value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bitwright.errors import CalibrationError
from bitwright.ir.calibration import RECORD_HINT, CalibrationEntry, as_entry
from bitwright.ir.dtype import DType, dtype
from bitwright.ir.graph import Graph, Node, Value, constant_value
from bitwright.ir.naming import take_name
from bitwright.ir.paths import find_values
from bitwright.ir.quant_params import QuantParams
from bitwright.ir.types import TensorType, normalize_axis
from bitwright.ops.core.check import verify

Array = np.ndarray[Any, Any]


def insert_q_dq(graph: Graph, record: Mapping[str, CalibrationEntry | QuantParams]) -> Graph:
    """The graph with a pair behind each value of the record, including bodies of if / loop / scan.

    Names are those of `bitwright.ir.paths`. A value that already has its pair is unchanged, so the
    pass is idempotent.
    """
    _require_types(graph, record)
    entries = {name: as_entry(name, found) for name, found in record.items()}
    found = find_values(graph, entries)
    for name, value in found.items():
        entries[name].validate(value.type, where=f"the entry of {name!r}")
    changed = _insert(graph, {value: entries[name].params for name, value in found.items()})
    return graph if changed is graph else verify(changed)


def _require_types(graph: Any, record: Any) -> None:
    """Raise unless the arguments are a graph and a mapping."""
    if not isinstance(graph, Graph):
        raise CalibrationError(
            "pairs are inserted into a graph",
            expected="a Graph",
            found=type(graph).__name__,
            hint="bw.load returns the graph of a file.",
        )
    if not isinstance(record, Mapping):
        raise CalibrationError(
            "this is not a calibration record",
            expected="entries by name",
            found=type(record).__name__,
            hint=RECORD_HINT,
        )


class _Insertion:
    """Insertion of pairs into one graph (the model or a body)."""

    def __init__(self, graph: Graph, tags: Mapping[Value, QuantParams]) -> None:
        self.graph, self.tags = graph, tags
        self.names = {name for node in graph.nodes for name in node.names}
        self.nodes: list[Node] = []
        self.same: dict[Value, Value] = {}  # new value of each old one
        self.read: dict[Value, Value] = {}  # what its users read
        self.open = {v for v in graph.values.values() if v in tags} - self._done()

    def _done(self) -> set[Value]:
        """Tagged values whose only users are their quantize nodes."""
        done = set(self.tags)
        done.difference_update(self.graph.results)
        for node in self.graph.nodes:
            for value in node.operands:
                if value in done and not _quantizes(node, value, self.tags[value]):
                    done.discard(value)
        return done

    def run(self) -> Graph:
        for node in self.graph.nodes:
            new = self._rebuilt(node)
            self.nodes.append(new)
            for old, value in zip(node.outputs, new.outputs, strict=True):
                self.same[old] = value
                self.read[old] = self._pair(value, self.tags[old]) if old in self.open else value
        if tuple(self.nodes) == self.graph.nodes:
            return self.graph
        return self.graph.with_(
            nodes=tuple(self.nodes),
            outputs=tuple((name, self.read[v]) for name, v in self.graph.outputs),
            updates=tuple((self.same[s], self.read[v]) for s, v in self.graph.updates),
        )

    def _rebuilt(self, node: Node) -> Node:
        inputs = tuple(None if v is None else self._operand(node, v) for v in node.inputs)
        bodies = {key: _insert(body, self.tags) for key, body in node.bodies.items()}
        if inputs == node.inputs and all(bodies[k] is node.bodies[k] for k in bodies):
            return node
        return node.with_(inputs=inputs, attrs={**node.attrs, **bodies})

    def _operand(self, node: Node, value: Value) -> Value:
        if value in self.open and _quantizes(node, value, self.tags[value]):
            return self.same[value]  # an existing pair needs no second one
        return self.read[value]

    def _pair(self, value: Value, params: QuantParams) -> Value:
        element = params.dtype.element
        operands = [self._constant(value, "scale", params.scale)]
        if params.zero_point.any():
            zeros = params.zero_point.astype(element.numpy)
            operands.append(self._constant(value, "zero_point", zeros))
        granularity: dict[str, Any] = {"axis": _axis(params, value), "block": 0}
        to = {**granularity, "to": element, "saturate": True, "precision": None}
        quantized = self._node(value, "quantize", [value, *operands], to, element)
        back = {**granularity, "to": value.dtype}
        return self._node(value, "dequantize", [quantized, *operands], back, value.dtype)

    def _node(
        self, value: Value, op: str, inputs: list[Value], attrs: dict[str, Any], element: DType
    ) -> Value:
        name = take_name(f"{value.name}.{op}d", self.names)
        types = (value.tensor.with_dtype(element),)
        self.nodes.append(Node(op, tuple(inputs), attrs, types, (name,), value.node.loc))
        return self.nodes[-1].outputs[0]

    def _constant(self, value: Value, hint: str, array: Array) -> Value:
        type_ = TensorType(dtype(array.dtype), array.shape)
        name = take_name(f"{value.name}.{hint}", self.names)
        node = Node("constant", (), {"value": array}, (type_,), (name,), value.node.loc)
        self.nodes.append(node)
        return node.outputs[0]


def _insert(graph: Graph, tags: Mapping[Value, QuantParams]) -> Graph:
    return _Insertion(graph, tags).run()


def _quantizes(node: Node, value: Value, params: QuantParams) -> bool:
    """Whether a node quantizes the value with these parameters."""
    if node.op != "quantize" or node.inputs[0] is not value or value in node.inputs[1:]:
        return False
    _, scale, zero_point = (*node.inputs, None)[:3]
    zeros = np.zeros(1) if zero_point is None else constant_value(zero_point)
    scales = constant_value(scale)
    attrs = _axis(params, value), 0, params.dtype.element
    return (
        (node.attrs["axis"], node.attrs["block"], node.attrs["to"]) == attrs
        and node.attrs["precision"] is None
        and scales is not None
        and zeros is not None
        and np.array_equal(scales.reshape(-1), params.scale.reshape(-1))
        and bool((zeros.reshape(-1).astype(np.float64) == params.zero_point.reshape(-1)).all())
    )


def _axis(params: QuantParams, value: Value) -> int | None:
    return None if params.axis is None else normalize_axis(params.axis, value.rank)
