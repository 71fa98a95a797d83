"""Rewrites a graph so that its nodes compute in the precision of a policy.

    x: f32 ─ matmul ─ y: f32          x: f32 ─ cast bf16 ─ matmul ─ y: bf16 ─ cast f32 ─ (output)

Only floating-point tensors change; integers, booleans, quantized values and their scales never do.
A value is cast once per precision. Casts between floating-point types in the model count as such
casts, so pairs of them cancel. Inputs, parameters, states, outputs, and the inputs and outputs of
bodies keep their declared types; casts of parameters fold at compile time. The pass is idempotent.
"""

from __future__ import annotations

from bitwright.errors import BitwrightError
from bitwright.ir.dtype import DType, f32, f64
from bitwright.ir.edit import prune
from bitwright.ir.graph import Graph, Node, Value
from bitwright.ir.naming import take_name
from bitwright.ir.types import OpaqueType
from bitwright.ops.core.builder import infer_types
from bitwright.ops.core.check import verify
from bitwright.ops.core.registry import get
from bitwright.passes.precision.plan import (
    CHANGEABLE,
    HALVES,
    Extents,
    Plan,
    changeable_operands,
    is_changeable,
)
from bitwright.passes.precision.policy import Policy, custom, policy
from bitwright.rewrite.trace import Trace

RULE = "apply-precision"


def apply_precision(
    graph: Graph, given: str | Policy, extents: Extents | None = None, trace: Trace | None = None
) -> Graph:
    """The graph in the precision of a policy (see `precision_policy`).

    `extents` are observed magnitudes by value path. Ops whose values do not fit a half type stay in
    full precision; the trace has the reasons.
    """
    chosen = policy(given)
    if chosen.is_plain:
        return graph
    trace = Trace() if trace is None else trace
    return verify(_Conversion(graph, chosen, extents, trace).run())


def in_full_precision(graph: Graph) -> Graph:
    """The graph with every f16 or bf16 op computed in f32; inputs keep their types."""
    return _Conversion(graph, custom(), None, Trace()).run()


class _Conversion:
    """The conversion of one graph (the model or a body)."""

    def __init__(self, graph: Graph, chosen: Policy, extents: Extents | None, trace: Trace) -> None:
        self.graph, self.policy, self.extents, self.trace = graph, chosen, extents, trace
        self.plan = Plan(graph, chosen, extents)
        self.names = {n for node in graph.nodes if not _is_float_cast(node) for n in node.names}
        self.nodes: list[Node] = []
        self.made: dict[Value, Value] = {}  # old value -> new value of any type
        self.casts: dict[tuple[Value, DType], Value] = {}

    def run(self) -> Graph:
        for node in self.graph.nodes:
            self.made.update(zip(node.outputs, self._converted(node), strict=True))
        graph = self.graph
        return prune(
            graph.with_(
                outputs=tuple((name, self._own(v)) for name, v in graph.outputs),
                updates=tuple((self.made[s], self._own(v)) for s, v in graph.updates),
                nodes=tuple(self.nodes),
            )
        )

    def _converted(self, node: Node) -> tuple[Value, ...]:
        if node.is_boundary:
            return self._append(node)
        decision = self.plan.decisions[node]
        precision = decision.precision
        if decision.reason and precision is not None:
            self.trace.refused(RULE, node.name, decision.reason)
        if precision is not None and _is_float_cast(node) and node.attrs["to"] in CHANGEABLE:
            (x,) = node.operands
            if precision in HALVES:
                return (self._as(x, precision),)
            return (self.made[x],)  # readers cast it
        if precision is None:
            return self._append(self._unchanged(node))
        return self._append(self._at(node, precision))

    def _append(self, node: Node) -> tuple[Value, ...]:
        self.nodes.append(node)
        return node.outputs

    def _unchanged(self, node: Node) -> Node:
        """The node with operands of their declared types, and converted bodies."""
        inputs = tuple(None if v is None else self._own(v) for v in node.inputs)
        bodies = {
            key: _Conversion(body, self.policy, self._inside(node, key), self.trace).run()
            for key, body in node.bodies.items()
            if node.op != "fused"
        }
        return node.with_(inputs=inputs, attrs={**node.attrs, **bodies})

    def _inside(self, node: Node, key: str) -> Extents:
        """The extents of the values in a body."""
        start = f"{node.name}/{key}/"
        known = self.extents or {}
        return {n.removeprefix(start): e for n, e in known.items() if n.startswith(start)}

    def _at(self, node: Node, precision: DType) -> Node:
        """The node in a precision, or unchanged if its op does not support it."""
        inputs = [None if v is None else self._own(v) for v in node.inputs]
        for position, value in changeable_operands(node):
            inputs[position] = self._as(value, precision)
        attrs = dict(node.attrs)
        to = attrs.get("to")
        if node.op in ("cast", "dequantize") and (to is None or to in CHANGEABLE):
            attrs["to"] = _at_least(node.outputs[0].dtype, precision)
        try:
            _, types = infer_types(get(node.op), tuple(inputs), attrs)
        except BitwrightError as error:
            self.trace.refused(RULE, node.name, f"{node.op} is not defined in {precision}: {error}")
            return self._unchanged(node)
        if any(isinstance(type_, OpaqueType) for type_ in (*types, *node.types)):
            return self._unchanged(node)
        pairs = zip(node.outputs, types, strict=True)
        kept = tuple(v.tensor.with_dtype(t.dtype) for v, t in pairs)  # type: ignore[union-attr]
        if kept == node.types and tuple(inputs) == node.inputs and attrs == dict(node.attrs):
            return node
        self.trace.fired(RULE, node.name, node.names, str(precision))
        return node.with_(inputs=tuple(inputs), attrs=attrs, types=kept)

    def _own(self, value: Value) -> Value:
        """A value in its declared type."""
        made = self.made[value]
        return self._cast(made, value.dtype) if is_changeable(value) else made

    def _as(self, value: Value, precision: DType) -> Value:
        return self._cast(self.made[value], _at_least(value.dtype, precision))

    def _cast(self, value: Value, element: DType) -> Value:
        if value.dtype == element:
            return value
        key = value, element
        if key not in self.casts:
            attrs = {"to": element, "saturate": True, "round_mode": "up"}
            types = (value.tensor.with_dtype(element),)
            name = take_name(f"{value.name}.{element}", self.names)
            node = Node("cast", (value,), attrs, types, (name,), value.node.loc)
            self.casts[key] = self._append(node)[0]
        return self.casts[key]


def _is_float_cast(node: Node) -> bool:
    """Whether a node is a cast between types that a policy may change."""
    return node.op == "cast" and is_changeable(node.inputs[0]) and is_changeable(node.outputs[0])


def _at_least(own: DType, precision: DType) -> DType:
    """f32 stands for full precision: f64 stays f64."""
    return own if precision == f32 and own == f64 else precision
