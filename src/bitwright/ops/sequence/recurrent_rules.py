"""Gradient rules of recurrent layers, and their training ops, which keep what the rules read.

    lstm_train   y, h, c; the activated gates[S, B, directions, 4H]; the cell state of each step
    gru_train    y, h; the activated gates[S, B, directions, 3H]; the term that the reset gate
                 multiplies, or r*h where it multiplies h

Steps past the end of a sequence have zeros there. The steps run backwards in one op
(`ops.sequence.recurrent_backward`); gradients of x, w and r are then products over all steps.
Layers with other activations, clip, peepholes or coupled gates are differentiated as scans
(`ops.sequence.recurrent_form`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bitwright.ir.edit import Replacement, replace_nodes
from bitwright.ir.graph import Graph, Node, Value
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.gradients import number
from bitwright.ops.core.reverse import Gradients, composed, dependent, takes_wanted
from bitwright.ops.sequence.recurrence import DIRECTIONS, Activation
from bitwright.ops.sequence.recurrent_form import active_steps, compose_layer, part, pick

_NAMES = ("x", "w", "r", "bias", "lengths", "h0", "c0", "peephole")
Choose = Callable[..., list[list[Activation]]]
_ACTIVATION_ATTRS = ("direction", "activations", "alpha", "beta", "clip")
_USUAL = {
    "rnn": (("tanh",), ("relu",)),
    "gru": (("sigmoid", "tanh"),),
    "lstm": (("sigmoid", "tanh", "tanh"),),
}


def _given(node: Node) -> dict[str, Value | None]:
    found: dict[str, Value | None] = dict.fromkeys(_NAMES)
    return found | dict(zip(_NAMES, node.inputs, strict=False))


def is_usual(node: Node) -> bool:
    """Whether the backward op covers a layer: usual activations, no clip, peepholes, coupling."""
    attrs, usual = node.attrs, _USUAL[node.op]
    if attrs.get("clip") is not None or attrs.get("input_forget") or len(node.inputs) > 7:
        return False
    names = attrs.get("activations")
    if names is None:
        return True
    lower = tuple(name.lower() for name in names)
    return any(lower == form * len(DIRECTIONS[attrs["direction"]]) for form in usual)


def layer_gradient(op: str, choose: Choose) -> Callable[..., Gradients]:
    """The rule of a layer; `choose` gives the activations of each direction."""

    @takes_wanted
    def rule(b: Builder, node: Node, dys: list[Value | None], wanted: list[bool]) -> Gradients:
        assert node.inputs[0] is not None
        if node.inputs[0].shape[0] == 0:
            return ()  # no steps: every result is empty or zero
        if not is_usual(node):
            return composed(_layer_form(op, choose))(b, node, dys)
        if op == "rnn":
            return _gradients(b, node, node, dys, wanted)
        made = b.append(_training_node(b, node))
        return _gradients(b, node, made, dys, wanted)

    return rule


@takes_wanted
def train_gradient(
    b: Builder, node: Node, dys: list[Value | None], wanted: list[bool]
) -> Gradients:
    """The rule of a training op: by its backward op, unless what it keeps has a gradient."""
    assert node.inputs[0] is not None
    if node.inputs[0].shape[0] == 0:
        return ()
    if any(dy is not None for dy in dys[len(dys) - 2 :]):
        return composed(_train_form(node.op.removesuffix("_train")))(b, node, dys)
    return _gradients(b, node, node, dys, wanted)


def _layer_form(op: str, choose: Choose) -> Callable[..., Any]:
    def compose(b: Builder, *operands: Any, **attrs: Any) -> Any:
        chosen = choose(op, **{name: attrs[name] for name in _ACTIVATION_ATTRS})
        names = ("direction", "linear_before_reset", "input_forget")
        rest = {name: attrs[name] for name in names if name in attrs}
        return compose_layer(op, b, *operands, activations=chosen, **rest)

    return compose


def _train_form(op: str) -> Callable[..., Any]:
    forms = [Activation(name) for name in _USUAL[op][0]]

    def compose(b: Builder, *operands: Any, hidden: Any, **attrs: Any) -> Any:
        return compose_layer(op, b, *operands, activations=[forms, forms], keep=True, **attrs)

    return compose


def _training_node(b: Builder, node: Node) -> Node:
    """A node of the training op with the operands of a layer."""
    names = ("hidden", "direction", "linear_before_reset")
    attrs = {name: node.attrs[name] for name in names if name in node.attrs}
    op = f"{node.op}_train"
    made = b.node(op, node.inputs, attrs, [])
    b.nodes.pop()
    return made


def _gradients(
    b: Builder, node: Node, kept: Node, dys: list[Value | None], wanted: Sequence[bool]
) -> Gradients:
    """Gradients of the operands of a layer; `kept` is the node that holds what the steps read."""
    given, direction = _given(node), node.attrs["direction"]
    x, w, r = (given[name] for name in ("x", "w", "r"))
    assert x is not None and w is not None and r is not None
    need = dict(zip(_NAMES, wanted, strict=False))
    lengths, y = given["lengths"], kept.outputs[0]
    op, layer = node.op.removesuffix("_train"), _Layer(b, y, given, direction)
    term: Value | None = None
    dc0 = None
    if op == "lstm":
        more = (lengths, given["c0"])
        dgates, dh0, dc0 = b.lstm_backward(
            r, *kept.outputs[3:], *dys[:3], *more, direction=direction
        )
    elif op == "gru":
        linear = node.attrs["linear_before_reset"]
        dgates, term, dh0 = b.gru_backward(
            r,
            kept.outputs[2],
            y,
            kept.outputs[3],
            *dys[:2],
            lengths,
            given["h0"],
            direction=direction,
            linear_before_reset=linear,
        )
    else:
        names = node.attrs.get("activations") or ("tanh",)
        dgates, dh0 = b.rnn_backward(
            r, y, *dys[:2], lengths, direction=direction, activation=names[0].lower()
        )
    found: dict[str, Value | None] = {"h0": dh0, "c0": dc0}
    if need["x"]:
        found["x"] = layer.input_gradient(dgates, x, w)
    if need["w"]:
        found["w"] = layer.weight_gradient(dgates, x, w)
    if need["r"] and term is None:
        found["r"] = layer.recurrent_gradient(dgates)
    elif need["r"] and term is not None:
        linear = node.attrs["linear_before_reset"]
        size = r.shape[2]
        source = None if linear else kept.outputs[3]
        parts = (
            layer.recurrent_gradient(part(b, dgates, 0, 2 * size, 3)),
            layer.recurrent_gradient(term, source),
        )
        found["r"] = b.concat(*parts, axis=1)
    if need.get("bias"):
        sums = b.reduce_sum(dgates, axes=(0, 1), keepdims=False)
        recurrent = sums
        if term is not None:
            first = part(b, sums, 0, 2 * r.shape[2], 1)
            recurrent = b.concat(first, b.reduce_sum(term, axes=(0, 1), keepdims=False), axis=1)
        found["bias"] = b.concat(sums, recurrent, axis=1)
    return [found.get(name) for name in _NAMES[: len(node.inputs)]]


class _Layer:
    """The products of gradients over all steps of a layer."""

    def __init__(
        self, b: Builder, y: Value, given: dict[str, Value | None], direction: str
    ) -> None:
        self.b, self.y, self.given, self.reverses = b, y, given, DIRECTIONS[direction]
        self.steps, self.directions, self.batch, self.hidden = y.shape

    def _value(self, value: Any) -> Value:
        assert isinstance(value, Value)
        return value

    def _rows(self, x: Value) -> Value:
        """[S, B, …] as a matrix."""
        columns = x.shape[2] if x.rank == 3 else x.shape[2] * x.shape[3]
        return self._value(self.b.reshape(x, shape=(x.shape[0] * x.shape[1], columns)))

    def input_gradient(self, dgates: Value, x: Value, w: Value) -> Value:
        b = self.b
        whole = b.reshape(w, shape=(w.shape[0] * w.shape[1], w.shape[2]))
        return self._value(b.reshape(b.matmul(self._rows(dgates), whole), shape=x.shape))

    def weight_gradient(self, dgates: Value, x: Value, w: Value) -> Value:
        b = self.b
        columns = b.transpose(self._rows(dgates), perm=(1, 0))
        return self._value(b.reshape(b.matmul(columns, self._rows(x)), shape=w.shape))

    def recurrent_gradient(self, dgates: Value, source: Value | None = None) -> Value:
        """The sum over steps of dgates' h, with h the state before the step, or `source`."""
        b = self.b
        found = []
        for i, reverse in enumerate(self.reverses):
            rows = pick(b, dgates, i, 2)
            if source is not None:
                total = self._product(rows, pick(b, source, i, 1))
            else:
                total = self._with_states(rows, i, reverse)
            found.append(b.reshape(total, shape=(1, *total.shape)))
        return self._value(found[0] if len(found) == 1 else b.concat(*found, axis=0))

    def _product(self, rows: Value, h: Value) -> Value:
        b = self.b
        columns = b.transpose(self._rows(rows), perm=(1, 0))
        return self._value(b.matmul(columns, self._rows(h)))

    def _with_states(self, rows: Value, at: int, reverse: bool) -> Value:
        """Rows times the hidden states before their steps; the first step reads h0."""
        b, steps = self.b, self.steps
        h0, lengths = self.given["h0"], self.given["lengths"]
        h = pick(b, self.y, at, 1)
        later, earlier = (0, 1) if reverse else (1, 0)
        total = self._product(
            part(b, rows, later, steps - earlier, 0), part(b, h, earlier, steps - later, 0)
        )
        if h0 is None:
            return total
        if reverse and lengths is not None:
            first = self._last_active(rows, lengths)
        else:
            first = pick(b, rows, 0) if not reverse else pick_last(b, rows)
        start = b.matmul(b.transpose(first, perm=(1, 0)), pick(b, h0, at))
        return self._value(b.add(total, start))

    def _last_active(self, rows: Value, lengths: Value) -> Value:
        """The row of the last step of each sequence, which the reverse direction starts with."""
        b = self.b
        going = active_steps(b, lengths, self.steps)
        at = b.reshape(b.iota(length=self.steps, dtype=lengths.dtype), shape=(self.steps, 1, 1))
        after = b.lt(b.add(at, 1), b.reshape(lengths, shape=(1, self.batch, 1)))
        only = b.and_(going, b.not_(after))
        return self._value(
            b.reduce_sum(b.where(only, rows, number(b, 0.0, rows)), axes=(0,), keepdims=False)
        )


def pick_last(b: Builder, x: Value) -> Value:
    """The last slice of axis 0."""
    steps = x.shape[0]
    found = b.reshape(part(b, x, steps - 1, steps, 0), shape=x.shape[1:])
    assert isinstance(found, Value)
    return found


def keep_gates(graph: Graph, wrt: Iterable[Value] | None = None) -> Graph:
    """The graph in which lstm and gru nodes also keep what their gradients read.

    With `wrt`, only nodes that depend on one of these values change. Without this, the rule of a
    layer computes the layer once more.
    """
    if not any(node.op in ("lstm", "gru") for node in graph.nodes):
        return graph
    chosen = None if wrt is None else {n.names for n in dependent(graph.nodes, set(wrt))[0]}
    b = Builder.of(graph)

    def change(node: Node) -> Node | Replacement:
        if node.op not in ("lstm", "gru") or (chosen is not None and node.names not in chosen):
            return node
        if not is_usual(node):
            return node
        made = _training_node(b, node)
        results = len(node.outputs)
        made = made.with_(names=(*node.names, *made.names[results:]), loc=node.loc)
        return Replacement([made], made.outputs[:results])

    return replace_nodes(graph, change, bodies=False)
