"""Random graphs with recurrent layers, bodies and sums of products too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from random_graphs import LARGEST, Array, Generator, _size

from bitwright.ir.dim import Dim
from bitwright.ir.graph import Graph, Value
from bitwright.ops.core.builder import Builder

GATES = {"rnn": 1, "gru": 3, "lstm": 4}


class LayerGenerator(Generator):
    def steps(self) -> list[Callable[[], Value | None]]:
        return [*super().steps(), *[self.recur, self.contract, self.branch, self.scan] * 3]

    def recur(self) -> Value | None:
        x = self.floats(3)
        if x is None or x.rank != 3 or isinstance(x.shape[2], Dim):
            return None
        op, direction = self.pick(*GATES), self.pick("forward", "reverse", "bidirectional")
        hidden, directions = self.pick(1, 3, 16, 17, 33), 1 + (direction == "bidirectional")
        rows, features = GATES[op] * hidden, x.shape[2]
        w = self.array((directions, rows, features), 1 / max(1, features) ** 0.5)
        r = self.array((directions, rows, hidden), 1 / hidden**0.5)
        operands: list[Any] = [x, w, r]
        if self.chance(0.6):
            operands.append(self.array((directions, 2 * rows), 0.5))
        attrs: dict[str, Any] = {"hidden": hidden, "direction": direction}
        if op == "gru":
            attrs["linear_before_reset"] = self.chance(0.5)
        if self.chance(0.3):
            attrs["clip"] = 0.75
        y, last, *_ = self.b.op(op, *operands, **attrs)
        if _size(y.shape) > LARGEST:
            return None
        self.values.append(last)
        return y

    def contract(self) -> Value | None:
        x = self.floats(2)
        if x is None or isinstance(x.shape[-1], Dim) or not x.shape[-1]:
            return None
        labels, size = "abcd"[: x.rank], x.shape[-1]
        last = labels[-1]
        weight = self.array((size, self.pick(1, 5, 16)), 1 / size)
        equation, operands = self.pick(
            (f"{labels},{last}z->{labels[:-1]}z", [weight]),
            (f"{labels},{last}z->z{labels[:-1]}", [weight]),
            (f"{labels},{last}->{labels[:-1]}", [weight[:, 0]]),
            (f"{labels},{labels}->{labels[:-1]}", [self.b.mul(x, 1 / size)]),
            (f"{labels}->{labels[::-1]}", []),
            (f"...{last},{last}z->...z", [weight]),
        )
        made = self.b.einsum(x, *operands, equation=equation)
        return None if _size(made.shape) > LARGEST else made

    def _body(self, name: str, *types: str) -> tuple[Builder, list[Value]]:
        body = Builder(name)
        return body, [body.input(f"v{i}", type_) for i, type_ in enumerate(types)]

    def branch(self) -> Value | None:
        x, chooser = self.floats(), self.floats(exact=True)
        if x is None or chooser is None:
            return None
        largest = self.b.reduce_sum(chooser, axes=list(range(chooser.rank)), keepdims=False)
        bodies: dict[str, Graph] = {}
        for name in ("then", "else"):
            body, (inner,) = self._body(name, str(x.tensor))
            bodies[name] = body.build(y=body.op(self.pick("tanh", "neg", "sigmoid"), inner))
        condition = self.b.gt(largest, 0.3)
        return self.b.node("if", [condition, x], bodies, []).outputs[0]

    def scan(self) -> Value | None:
        """A state that forgets, over the first axis."""
        x = self.floats(2)
        if x is None:
            return None
        element = str(x.tensor.with_shape(x.shape[1:]))
        body, (state, one) = self._body("body", element, element)
        after = body.tanh(body.add(body.mul(state, 0.5), one))
        attrs = {"body": body.build(state=after, row=body.identity(after))}
        start = self.b.mul(self.b.reduce_sum(x, axes=[0], keepdims=False), 0.1)
        operands = [start, x]
        made = self.b.node("scan", operands, {**attrs, "carried": 1, "scanned": 1}, []).outputs
        self.values.append(made[0])
        return made[1]


def layered_graph(seed: int) -> tuple[Graph, list[dict[str, Array]]]:
    """As `random_graph`, with steps of this module."""
    generator = LayerGenerator(seed)
    graph = generator.graph()
    return graph, generator.feeds(graph)
