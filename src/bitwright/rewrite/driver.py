"""Applies rules until none fires.

The driver sweeps the graph in topological order. Operands are rewritten before the nodes that read
them, so most chains collapse in one sweep and no recursion is needed. A replacement must have the
type of the value it replaces, and takes its name and source location. Bodies are rewritten first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

from bitwright.errors import GraphError, RewriteError
from bitwright.ir.edit import map_bodies, prune, rebuild, replace_inputs
from bitwright.ir.graph import Graph, Node, Value
from bitwright.ir.naming import take_name
from bitwright.ir.types import TensorType, compatible
from bitwright.ops.core.builder import Builder
from bitwright.rewrite.match import Match, match_node
from bitwright.rewrite.rule import Rule
from bitwright.rewrite.trace import Trace

FIRINGS_PER_NODE = 20
CountUses = Callable[[Graph], Counter[Value]]


def _count_all(graph: Graph) -> Counter[Value]:
    return graph.uses


class RuleBuilder(Builder):
    """The `op` of a `replace` lambda: a builder whose nodes go into the graph being rewritten."""

    def __init__(self, sweep: Sweep, root: Node) -> None:
        super().__init__(root.name)
        self.loc, self._root, self._sweep = root.loc, root, sweep
        self._symbols = sweep.symbols

    def fresh_name(self, hint: str) -> str:
        return self._sweep.unique(f"{self._root.name}.{hint}")

    def like(self, node: Node, *operands: Any, **attrs: Any) -> Any:
        """The same op on other operands, with `attrs` in place of the node's."""
        return self.op(node.op, *operands, **{**node.attrs, **attrs})


class Sweep:
    """One pass over the nodes of one graph."""

    def __init__(
        self, graph: Graph, rules: Mapping[str, list[Rule]], trace: Trace, count_uses: CountUses
    ) -> None:
        self.graph, self.rules, self.trace, self._counts = graph, rules, trace, count_uses(graph)
        self.replaced: dict[Value, Value] = {}
        self.nodes: list[Node] = []
        self.origin: dict[Value, Value] = {}
        self.fired: Counter[str] = Counter()

    @cached_property
    def names(self) -> set[str]:
        """Names that are taken."""
        return {name for node in self.graph.nodes for name in node.names}

    @cached_property
    def symbols(self) -> dict[str, int]:
        """Counters of the symbols that builders named."""
        taken = Builder()
        taken.reserve_symbols(s.name for n in self.graph.nodes for t in n.types for s in t.symbols)
        return taken._symbols

    def unique(self, hint: str) -> str:
        return take_name(hint, self.names)

    def uses(self, value: Value) -> int:
        """How many times a value was read when the sweep began (a new value: once)."""
        return self._counts[self.origin.get(value, value)] or 1

    def run(self, budget: int) -> Graph:
        for node in self.graph.nodes:
            current = replace_inputs(node, self.replaced)
            results, made = self._settle(current, budget)
            self.nodes.append(current)
            self.nodes += made
            if results is not node.outputs:
                for old, new in zip(node.outputs, results, strict=True):
                    self.replaced[old] = new
                    self.origin.setdefault(new, old)
        return prune(rebuild(self.graph, self.nodes, self.replaced))

    def _settle(self, node: Node, budget: int) -> tuple[tuple[Value, ...], list[Node]]:
        """The values that replace the node's results once no rule fires, and their new nodes."""
        results, pending = node.outputs, list[Node]()
        while applied := self._fire(results):
            results, made = applied
            pending += made
            if sum(self.fired.values()) > budget:
                common = ", ".join(f"{r} ({n} times)" for r, n in self.fired.most_common(3))
                raise RewriteError(
                    "rules keep undoing each other",
                    where=f"graph {self.graph.name!r}, {node}",
                    found=common,
                )
        return results, pending

    def _fire(self, results: tuple[Value, ...]) -> tuple[tuple[Value, ...], list[Node]] | None:
        if not results or not (rules := self.rules.get(results[0].node.op)):
            return None
        root = results[0].node
        if root.outputs != results:
            return None  # the last rule returned existing values
        for rule in rules:
            for bindings in match_node(rule.pattern, root):
                found = self._apply(rule, Match(root, bindings, self.uses))
                if found is not None:
                    self.fired[rule.name] += 1
                    return found
        return None

    def _apply(self, rule: Rule, m: Match) -> tuple[tuple[Value, ...], list[Node]] | None:
        root = m.root
        if reason := rule.refusal(m):
            self.trace.refused(rule.name, root.name, reason)
            return None
        op = RuleBuilder(self, root)
        try:
            answer = rule.apply(op, m)
        except GraphError as error:
            self.trace.refused(rule.name, root.name, f"the replacement does not type: {error}")
            return None
        if answer is None:
            return None
        results = tuple(answer) if isinstance(answer, (tuple, list)) else (answer,)
        if len(results) != len(root.outputs):
            raise RewriteError(
                f"rule {rule.name!r} gives {len(results)} values for {len(root.outputs)}"
            )
        for old, new in zip(root.outputs, results, strict=True):
            if not _has_type_of(new, old, op.nodes):
                self.trace.refused(
                    rule.name, root.name, f"types differ: {old.type} would become {new.type}"
                )
                return None
        results, made = _take_names(root, results, op.nodes)
        self.trace.fired(rule.name, root.name, [v.name for v in results])
        return results, made


def _has_type_of(new: Value, old: Value, made: list[Node]) -> bool:
    if new.type == old.type:
        return True
    fresh = new.node in made
    return fresh and isinstance(new.type, TensorType) and compatible(_unnamed(new, old), old.type)


def _unnamed(new: Value, old: Value) -> TensorType:
    """The new type, with the old sizes in place of newly named ones."""
    known = {s.name for v in new.node.operands for s in v.type.symbols}
    old_shape = old.tensor.shape
    if len(old_shape) != new.rank:
        return new.tensor
    return new.tensor.with_shape(
        before if any(s.name not in known for s in getattr(size, "symbols", ())) else size
        for size, before in zip(new.shape, old_shape, strict=True)
    )


def _take_names(
    root: Node, results: tuple[Value, ...], made: list[Node]
) -> tuple[tuple[Value, ...], list[Node]]:
    """The results and new nodes, with the root's names and types for its replacements."""
    renamed: dict[Node, Node] = {}
    nodes: list[Node] = []
    names = dict(zip(results, root.outputs, strict=True))
    for node in made:
        inputs = tuple(
            renamed[v.node].outputs[v.index] if v is not None and v.node in renamed else v
            for v in node.inputs
        )
        olds = [names.get(v) for v in node.outputs]
        new = node.with_(
            inputs=inputs,
            names=tuple(o.name if o else n for o, n in zip(olds, node.names, strict=True)),
            types=tuple(o.type if o else t for o, t in zip(olds, node.types, strict=True)),
        )
        renamed[node] = new
        nodes.append(new)
    return (
        tuple(renamed[v.node].outputs[v.index] if v.node in renamed else v for v in results),
        nodes,
    )


def rewrite(
    graph: Graph,
    rules: Iterable[Rule],
    trace: Trace | None = None,
    count_uses: CountUses = _count_all,
) -> Graph:
    """The graph with every rule applied, bodies included, until none fires.

    `count_uses` counts the readers of values that rules ask for.
    """
    trace = Trace() if trace is None else trace
    by_op: dict[str, list[Rule]] = {}
    for rule in rules:
        by_op.setdefault(rule.pattern.op, []).append(rule)
    return _rewrite(graph, by_op, trace, count_uses)


def _rewrite(
    graph: Graph, by_op: Mapping[str, list[Rule]], trace: Trace, count_uses: CountUses
) -> Graph:
    graph = map_bodies(graph, lambda body: _rewrite(body, by_op, trace, count_uses))
    budget = FIRINGS_PER_NODE * (len(graph.nodes) + 50)
    while True:
        sweep = Sweep(graph, by_op, trace, count_uses)
        graph = sweep.run(budget)
        budget -= sum(sweep.fired.values())
        if not sweep.fired:
            return graph
