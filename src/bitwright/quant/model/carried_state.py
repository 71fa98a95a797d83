"""Whether a model hands a recurrent state from one run to the next, as an input and an output.

    h0 = input, moved        h, c = lstm(x, ..., h0, c0)        output = h, moved or shifted
    c0 = input, moved        c = sigmoid(...) * c0 + ...        a cell that is written out

A caller runs such a model step by step. What one step gets wrong is the next step's input, so that
errors add up over the steps, where a batch of steps in one run shows the error of each alone.
"""

from __future__ import annotations

from collections.abc import Collection

from bitwright.ir.graph import Graph, Node, Value
from bitwright.ops.core.opdef import Kind
from bitwright.ops.core.registry import get
from bitwright.ops.nn.recurrent import GATES

_FIRST_STATE = 5
"""The operand that holds the first state, behind the lengths; those behind it hold others."""
_STATES = {"lstm": 2, "gru": 1, "rnn": 1}
_GATES = frozenset({"sigmoid", "hard_sigmoid"})


def carries_state(graph: Graph) -> bool:
    """Whether an output holds what a recurrent layer leaves of a state that an input brought."""
    states = [v for node in graph.nodes if node.op == "state" for v in node.outputs]
    return any(_carried(graph, {*graph.inputs, *states}))


def _carried(graph: Graph, given: Collection[Value]) -> list[bool]:
    """For each result whether it is a state that a layer made of one in `given`."""
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
            if node.op in _GATES or is_gate:  # also parts of one, and 1 - z
                gates.update(node.outputs)
            is_kept = node.op == "mul" and bool(operands & gates) and bool(operands & moved)
            if is_kept or operands & made:
                made.update(node.outputs)
    return [value in made for value in graph.results]


def _first_states(node: Node) -> list[Value]:
    found = node.inputs[_FIRST_STATE : _FIRST_STATE + _STATES[node.op]]
    return [value for value in found if value is not None]


def _out_of_branches(node: Node, moved: Collection[Value]) -> list[Value]:
    """Results of an `if` that are carried states in one of its branches."""
    captures = [value in moved for value in node.inputs[1:]]
    found = set[Value]()
    for body in node.bodies.values():
        given = [v for v, is_moved in zip(body.inputs, captures, strict=True) if is_moved]
        results = _carried(body, given)
        found.update(v for v, is_one in zip(node.outputs, results, strict=False) if is_one)
    return list(found)
