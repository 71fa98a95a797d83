"""Detects a recurrent state that the caller passes from one run to the next.

    h0 = view of an input    h, c = lstm(x, ..., h0, c0)        output = view of h
    c0 = view of an input    c = sigmoid(...) * c0 + ...        a cell built from elementwise ops

Such a model runs step by step, and the error of one step enters the next. Errors accumulate over
the steps; a calibration batch shows only the error of one step.
"""

from __future__ import annotations

from collections.abc import Collection

from bitwright.ir.graph import Graph, Node, Value
from bitwright.ops.core.opdef import Kind
from bitwright.ops.core.registry import get
from bitwright.ops.sequence.recurrent import GATES

_FIRST_STATE = 5
"""The operand with the initial state; further states follow it."""
_STATES = {"lstm": 2, "gru": 1, "rnn": 1}
_GATES = frozenset({"sigmoid", "hard_sigmoid"})


def carries_state(graph: Graph) -> bool:
    """Whether an output is a recurrent state that was computed from an input state."""
    states = [v for node in graph.nodes if node.op == "state" for v in node.outputs]
    return any(_carried(graph, {*graph.inputs, *states}))


def _carried(graph: Graph, given: Collection[Value]) -> list[bool]:
    """For each result, whether it is a state computed from one in `given`."""
    moved, made, gates = set(given), set[Value](), set[Value]()
    for node in graph.nodes:
        if node.op in GATES:
            if any(value in moved for value in _first_states(node)):
                made.update(node.outputs)
        elif node.op == "if":
            made.update(_out_of_branches(node, moved))
        elif not node.is_boundary:
            operands = set(node.operands)
            kind = get(node.op).kind
            if kind is Kind.MOVEMENT and operands & moved:
                moved.update(node.outputs)
            if kind not in (Kind.MOVEMENT, Kind.ELEMENTWISE):
                continue
            is_gate = bool(operands & gates) and all(v in gates or v.is_constant for v in operands)
            if node.op in _GATES or is_gate:  # also slices of a gate, and 1 - z
                gates.update(node.outputs)
            is_kept = node.op == "mul" and bool(operands & gates) and bool(operands & moved)
            if is_kept or operands & made:
                made.update(node.outputs)
    return [value in made for value in graph.results]


def _first_states(node: Node) -> list[Value]:
    found = node.inputs[_FIRST_STATE : _FIRST_STATE + _STATES[node.op]]
    return [value for value in found if value is not None]


def _out_of_branches(node: Node, moved: Collection[Value]) -> list[Value]:
    """Results of an `if` that are carried states in any branch."""
    captures = [value in moved for value in node.inputs[1:]]
    found = set[Value]()
    for body in node.bodies.values():
        given = [v for v, is_moved in zip(body.inputs, captures, strict=True) if is_moved]
        results = _carried(body, given)
        found.update(v for v, is_one in zip(node.outputs, results, strict=False) if is_one)
    return list(found)
