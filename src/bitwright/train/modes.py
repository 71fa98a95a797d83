"""Training and evaluation forms of a forward graph.

    train_mode   batch_norm(x, ..., mean, var)  ->  batch_norm_train(x, ...); the running mean and
                 variance become states:  r' = (1 - momentum) * r + momentum * statistic
                 dropout(x, key)            ->  its key depends on the seed, the run and the node
    eval_mode    dropout(x, key)            ->  x;  no state is updated

The running variance uses the unbiased variance of the batch, as in PyTorch. A batch norm whose
statistics are constants stays as it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.ir.dim import product
from bitwright.ir.edit import prune, replace_inputs, replace_nodes
from bitwright.ir.graph import Graph, Node, Value
from bitwright.ops.core.builder import Builder
from bitwright.train.optimizers import PREFIX

SEED = f"{PREFIX}seed"
RUN = f"{PREFIX}run"
_MIX = 0x9E3779B97F4A7C15  # 2 ** 64 / golden ratio: spreads consecutive numbers
_NODE = 0xD1B54A32D192ED03


class Rebuild:
    """A graph rebuilt node by node with a builder; `replaced` maps old values to new ones."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.b = Builder.of(graph)
        self.b.nodes, self.b.updates, self.b.outputs = [], [], {}
        self.replaced: dict[Value, Value] = {}

    def value(self, old: Value) -> Value:
        return self.replaced.get(old, old)

    def keep(self, node: Node) -> None:
        """The node with new operands."""
        self.put(node, self.b.append(replace_inputs(node, self.replaced)).outputs)

    def put(self, node: Node, results: tuple[Value, ...]) -> None:
        self.replaced.update(
            {old: new for old, new in zip(node.outputs, results, strict=True) if old is not new}
        )

    def finish(self, updates: dict[Value, Value]) -> Graph:
        """The new graph; `updates` of new states come before those that the graph had."""
        b = self.b
        b.outputs = {name: self.value(value) for name, value in self.graph.outputs}
        b.updates = list(updates.items())
        b.updates += [
            (self.value(state), self.value(value))
            for state, value in self.graph.updates
            if self.value(state) not in updates
        ]
        return b.build()


def train_mode(graph: Graph, momentum: float | None = 0.1, seed: int = 0) -> Graph:
    """The graph as it runs in training; `momentum` None keeps running statistics as they are."""
    edit = Rebuild(graph)
    held = _statistics(graph) if momentum is not None else set()
    updates: dict[Value, Value] = {}
    number = 0
    run: list[Value] = []
    for node in graph.nodes:
        if node.op == "parameter" and node.outputs[0] in held:
            attrs = {"value": node.attrs["value"]}
            edit.put(node, edit.b.append(node.with_(op="state", attrs=attrs)).outputs)
        elif node.op == "batch_norm" and node.inputs[3] in held and momentum is not None:
            edit.put(node, (_batch_norm(edit, node, updates, momentum),))
        elif node.op == "dropout":
            number += 1
            run = run or _run_number(edit.b, seed, updates)
            key = _key(edit.b, run, number, node.inputs[1])
            x = edit.value(_first(node))
            edit.put(node, (edit.b.op("dropout", x, key, name=None, **node.attrs),))
        else:
            edit.keep(node)
    return edit.finish(updates)


def eval_mode(graph: Graph) -> Graph:
    """The graph as it runs in evaluation: no dropout, no updates of states."""

    def change(node: Node) -> Any:
        return (_first(node),) if node.op == "dropout" else node

    return prune(replace_nodes(graph.with_(updates=()), change))


def _first(node: Node) -> Value:
    x = node.inputs[0]
    assert x is not None
    return x


def _statistics(graph: Graph) -> set[Value]:
    """The running means and variances that training updates."""
    found: set[Value] = set()
    for node in graph.nodes:
        if node.op == "batch_norm":
            pair = [v for v in node.inputs[3:5] if v is not None]
            if all(v.node.op in ("parameter", "state") and _has_value(v) for v in pair):
                found.update(pair)
    return found


def _has_value(value: Value) -> bool:
    return value.node.attrs.get("value") is not None


def _batch_norm(edit: Rebuild, node: Node, updates: dict[Value, Value], momentum: float) -> Value:
    b = edit.b
    x, scale, bias, mean, var = (edit.value(v) for v in node.operands)
    with b.at(node.loc):
        y, *found = b.op("batch_norm_train", x, scale, bias, eps=node.attrs["eps"])
        count = product(size for axis, size in enumerate(x.shape) if axis != 1)
        n = b.cast(b.sizes(values=(count,), shape=()), to=var.dtype)
        found[1] = b.mul(b.cast(found[1], to=var.dtype), b.div(n, b.sub(n, 1.0)))
        for running, new in zip((mean, var), found, strict=True):
            before = updates.get(running, running)
            kept = b.mul(before, 1.0 - momentum)
            updates[running] = b.add(kept, b.mul(b.cast(new, to=running.dtype), float(momentum)))
    result: Value = y
    return result


def _run_number(b: Builder, seed: int, updates: dict[Value, Value]) -> list[Value]:
    """The seed, and the number of this run, which is a state that every run increments."""
    given = b.state(SEED, np.asarray(seed % 2**63, np.int64))
    run = b.state(RUN, np.zeros((), np.int64))
    updates[given] = given
    updates[run] = b.add(run, 1)
    return [given, run]


def _key(b: Builder, run: list[Value], number: int, like: Value | None) -> Value:
    """The key of one dropout in one run; the op hashes it together with the element's index."""
    seed, step = run
    mixed = b.add(seed, b.mul(step, _signed(_MIX)))
    key: Value = b.add(mixed, np.asarray(_signed(number * _NODE), np.int64))
    return key if like is None else b.cast(b.bitwise_and(key, 2**31 - 1), to=like.dtype)


def _signed(number: int) -> np.ndarray[Any, Any]:
    """64 bits as a signed integer."""
    return np.asarray(number % 2**64, np.uint64).view(np.int64)
