"""Training and evaluation forms of a forward graph.

    train_mode   batch_norm(x, ..., mean, var)  ->  batch_norm_train(x, ...); the running mean and
                 variance become states:  r' = (1 - momentum) * r + momentum * statistic
                 dropout(x, key)            ->  its key depends on the seed, the run and the node
    eval_mode    dropout(x, key)            ->  x;  no state is updated
                 batch_norm_train(x, ...)   ->  batch_norm(x, ..., mean, var) with the states that
                 its statistics update (PyTorch modules that were imported in training mode)

The running variance uses the unbiased variance of the batch, as in PyTorch; a batch with one
element per channel has none and leaves it. A batch norm whose statistics are constants stays as it
is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bitwright.ir.dim import product
from bitwright.ir.edit import prune, replace_inputs, replace_nodes
from bitwright.ir.graph import Graph, Node, Value
from bitwright.ops.core.builder import Builder
from bitwright.train.groups import matches
from bitwright.train.optimizers import PREFIX

SEED = f"{PREFIX}seed"
RUN = f"{PREFIX}run"
_MIX = 0x9E3779B97F4A7C15  # 2 ** 64 / golden ratio: spreads consecutive numbers
_NODE = 0xD1B54A32D192ED03
_SEED = 0xBF58476D1CE4E5B9


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


def train_mode(
    graph: Graph, momentum: float | None = 0.1, seed: int = 0, frozen: Sequence[str] = ()
) -> Graph:
    """The graph as it runs in training.

    `momentum` None keeps all running statistics as they are, `frozen` those that match a pattern.
    """
    graph = _with_running_statistics(graph, ("*",) if momentum is None else frozen)
    edit = Rebuild(graph)
    held = _statistics(graph, frozen) if momentum is not None else set()
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
            x, key = edit.value(_first(node)), _key(edit.b, run, number)
            with edit.b.at(node.loc):
                edit.put(node, (edit.b.dropout(x, key, **node.attrs),))
        else:
            edit.keep(node)
    return edit.finish(updates)


def eval_mode(graph: Graph) -> Graph:
    """The graph as it runs in evaluation: no dropout, no updates of states."""

    def change(node: Node) -> Any:
        return (_first(node),) if node.op == "dropout" else node

    fixed = _with_running_statistics(graph, ("*",)).with_(updates=())
    return prune(replace_nodes(fixed, change))


def without_states(graph: Graph) -> Graph:
    """A graph in evaluation form with parameters in place of the states that have values."""

    def change(node: Node) -> Node:
        if node.op != "state" or node.attrs.get("value") is None:
            return node
        return node.with_(op="parameter", attrs={"value": node.attrs["value"], "trainable": False})

    is_read = {value for node in graph.nodes for value in node.operands}
    is_read.update(value for _, value in graph.outputs)
    kept = [n for n in graph.nodes if n.op != "state" or n.outputs[0] in is_read]
    return replace_nodes(graph.with_(nodes=tuple(kept)), change, bodies=False)


def _with_running_statistics(graph: Graph, patterns: Sequence[str]) -> Graph:
    """The graph with batch_norm on running statistics for each batch_norm_train that updates them
    and whose names match.

    The updates of these states are left out.
    """
    found: dict[Node, dict[int, Value]] = {}
    for state, value in graph.updates:
        for node, result in _moments_behind(value):
            found.setdefault(node, {})[result] = state
    pairs = {
        node: (held[1], held[2])
        for node, held in found.items()
        if held.keys() == {1, 2} and all(matches(v.name, patterns) for v in held.values())
    }
    if not pairs:
        return graph
    edit = Rebuild(graph)
    for node in graph.nodes:
        edit.keep(node)
        if node in pairs:
            with edit.b.at(node.loc):
                operands = [edit.value(v) for v in (*node.operands, *pairs[node])]
                edit.replaced[node.outputs[0]] = edit.b.batch_norm(*operands, **node.attrs)
    fixed = {state for pair in pairs.values() for state in pair}
    built = edit.finish({})
    kept = [pair for pair, (state, _) in zip(built.updates, graph.updates, strict=True)
            if state not in fixed]  # fmt: skip
    return prune(built.with_(updates=tuple(kept)))


def _moments_behind(value: Value) -> set[tuple[Node, int]]:
    """The means (result 1) and variances (result 2) of batches that a new running value reads."""
    found: set[tuple[Node, int]] = set()
    seen, waiting = set(), [value]
    while waiting:
        now = waiting.pop()
        if now in seen:
            continue
        seen.add(now)
        if now.node.op != "batch_norm_train":
            waiting += now.node.operands
        elif now is not now.node.outputs[0]:
            found.add((now.node, now.node.outputs.index(now)))
    return found


def _first(node: Node) -> Value:
    x = node.inputs[0]
    assert x is not None
    return x


def _statistics(graph: Graph, frozen: Sequence[str]) -> set[Value]:
    """The running means and variances that training updates."""
    found: set[Value] = set()
    for node in graph.nodes:
        if node.op == "batch_norm":
            pair = [v for v in node.inputs[3:5] if v is not None]
            is_held = all(v.node.op in ("parameter", "state") and _has_value(v) for v in pair)
            if is_held and not any(matches(v.name, frozen) for v in pair):
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
        several = b.gt(n, 1.0)
        found[1] = b.mul(b.cast(found[1], to=var.dtype), b.div(n, b.maximum(b.sub(n, 1.0), 1.0)))
        for running, new in zip((mean, var), found, strict=True):
            before = updates.get(running, running)
            kept = b.mul(before, 1.0 - momentum)
            moved = b.add(kept, b.mul(b.cast(new, to=running.dtype), float(momentum)))
            updates[running] = b.where(several, moved, before)
    result: Value = y
    return result


def _run_number(b: Builder, seed: int, updates: dict[Value, Value]) -> list[Value]:
    """The seed, and the number of this run, which is a state that every run increments."""
    given = b.state(SEED, np.asarray(seed % 2**63, np.int64))
    run = b.state(RUN, np.zeros((), np.int64))
    updates[given] = given
    updates[run] = b.add(run, 1)
    return [given, run]


def _key(b: Builder, run: list[Value], number: int) -> Value:
    """The key of one dropout in one run; the op hashes it together with the element's index."""
    seed, step = run
    mixed = b.add(b.mul(seed, _signed(_SEED)), b.mul(step, _signed(_MIX)))
    return b.add(mixed, _signed(number * _NODE))  # type: ignore[no-any-return]


def _signed(number: int) -> np.ndarray[Any, Any]:
    """64 bits as a signed integer."""
    return np.asarray(number % 2**64, np.uint64).view(np.int64)
