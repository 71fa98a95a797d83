"""Quantize and dequantize behind every value that a calibration record names.

    x -> relu -> r -> add              x -> relu -> r -> quantize -> dequantize -> add

Every reader of a tagged value, be it a node, a graph output or a state's update, reads the
dequantized value instead. Names and source locations stay; the new nodes are named after the value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bitwright.errors import CalibrationError
from bitwright.ir.calibration import CalibrationEntry
from bitwright.ir.dtype import DType, dtype
from bitwright.ir.graph import Graph, Node, Value, constant_value
from bitwright.ir.naming import take_name
from bitwright.ir.paths import find_values
from bitwright.ir.types import TensorType, normalize_axis
from bitwright.ops.core.check import verify

Array = np.ndarray[Any, Any]


def insert_q_dq(graph: Graph, record: Mapping[str, CalibrationEntry]) -> Graph:
    """The graph with a pair behind each value of the record, bodies of if / loop / scan included.

    Names are those of `bitwright.ir.paths`. What has its pair already stays as it is, so doing it
    twice changes nothing more.
    """
    _require_record(graph, record)
    found = find_values(graph, record)
    for name, value in found.items():
        record[name].validate(value.type, where=f"the entry of {name!r}")
    changed = _insert(graph, {value: record[name] for name, value in found.items()})
    return graph if changed is graph else verify(changed)


def _require_record(graph: Any, record: Any) -> None:
    """Raise where an argument is something else than a graph and entries by name."""
    if not isinstance(graph, Graph):
        raise CalibrationError(
            "pairs are inserted into a graph",
            expected="a Graph",
            found=type(graph).__name__,
            hint="bw.load gives the graph of a file.",
        )
    hint = "Ranges of bw.calibrate give one: ranges.record('int8', 'minmax')."
    if not isinstance(record, Mapping):
        found = type(record).__name__
        raise CalibrationError(
            "this is no calibration record", expected="entries by name", found=found, hint=hint
        )
    for name, entry in record.items():
        if not isinstance(entry, CalibrationEntry):
            raise CalibrationError(
                f"the entry of {name!r} is none",
                expected="a CalibrationEntry",
                found=type(entry).__name__,
                hint=hint,
            )


class _Insertion:
    """One graph (the model or a body) while its pairs are inserted."""

    def __init__(self, graph: Graph, tags: Mapping[Value, CalibrationEntry]) -> None:
        self.graph, self.tags = graph, tags
        self.names = {name for node in graph.nodes for name in node.names}
        self.nodes: list[Node] = []
        self.same: dict[Value, Value] = {}  # what a value has become
        self.read: dict[Value, Value] = {}  # what its readers read
        self.open = {v for v in graph.values.values() if v in tags} - self._done()

    def _done(self) -> set[Value]:
        """Tagged values that only their own quantize nodes read."""
        done = set(self.tags)
        done.difference_update(self.graph.results)
        for node in self.graph.nodes:
            for value in node.operands:
                if value in done and not _quantizes(node, value, self.tags[value]):
                    done.discard(value)
        return done

    def run(self) -> Graph:
        for node in self.graph.nodes:
            new = self._renewed(node)
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

    def _renewed(self, node: Node) -> Node:
        inputs = tuple(None if v is None else self._operand(node, v) for v in node.inputs)
        bodies = {key: _insert(body, self.tags) for key, body in node.bodies.items()}
        if inputs == node.inputs and all(bodies[k] is node.bodies[k] for k in bodies):
            return node
        return node.with_(inputs=inputs, attrs={**node.attrs, **bodies})

    def _operand(self, node: Node, value: Value) -> Value:
        if value in self.open and _quantizes(node, value, self.tags[value]):
            return self.same[value]  # a pair that is there already needs no second one in front
        return self.read[value]

    def _pair(self, value: Value, entry: CalibrationEntry) -> Value:
        axis = None if entry.axis is None else normalize_axis(entry.axis, value.rank)
        shape = () if axis is None else entry.scales.shape
        parameters = [self._constant(value, "scale", entry.scales.reshape(shape))]
        if entry.zero_points.any():
            zeros = entry.zero_points.astype(np.int64).astype(entry.dtype.numpy)
            parameters.append(self._constant(value, "zero_point", zeros.reshape(shape)))
        granularity: dict[str, Any] = {"axis": axis, "block": 0}
        to = {**granularity, "to": entry.dtype, "saturate": True, "precision": None}
        qvalues = self._node(value, "quantize", [value, *parameters], to, entry.dtype)
        back = {**granularity, "to": value.dtype}
        return self._node(value, "dequantize", [qvalues, *parameters], back, value.dtype)

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


def _insert(graph: Graph, tags: Mapping[Value, CalibrationEntry]) -> Graph:
    return _Insertion(graph, tags).run()


def _quantizes(node: Node, value: Value, entry: CalibrationEntry) -> bool:
    """Whether a node quantizes the value just as the entry says."""
    if node.op != "quantize" or node.inputs[0] is not value or value in node.inputs[1:]:
        return False
    _, scale, zero_point = (*node.inputs, None)[:3]
    axis = None if entry.axis is None else normalize_axis(entry.axis, value.rank)
    zeros = np.zeros(1) if zero_point is None else constant_value(zero_point)
    scales = constant_value(scale)
    return (
        (node.attrs["axis"], node.attrs["block"], node.attrs["to"]) == (axis, 0, entry.dtype)
        and node.attrs["precision"] is None
        and scales is not None
        and zeros is not None
        and np.array_equal(scales.reshape(-1), entry.scales)
        and bool((zeros.reshape(-1).astype(np.float64) == entry.zero_points).all())
    )
