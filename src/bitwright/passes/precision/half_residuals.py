"""Values that are requantized keep f32 on the way there; other readers get them in 16 bits.

    v = relu(a s + r)              v = relu(a s + r)
    q = requantize(v / t)    ->    q = requantize(v / t)
    y = b u + v                    y = b u + f32(f16(v))

The kernel of a product stores the 8 bits and the 16 bits of a residual. Without this pass the
precision policy leaves v in f32 for all readers, because one of them rounds it to integers.
"""

from __future__ import annotations

from collections.abc import Iterator

from bitwright.ir.dtype import DType, f32
from bitwright.ir.edit import prune, rebuild, replace_inputs
from bitwright.ir.graph import Graph, Node, Value
from bitwright.ir.naming import take_name
from bitwright.passes.fuse.fuse_regions import is_elementwise
from bitwright.passes.lower_integer.operands import comes_from_product
from bitwright.passes.precision.plan import HALVES
from bitwright.passes.precision.policy import Policy
from bitwright.rewrite.trace import Trace

RULE = "store-residual-in-half"


def half_residuals(graph: Graph, trace: Trace, half: DType, policy: Policy | None = None) -> Graph:
    """The graph with residuals in `half`, but for those that a pattern of the policy keeps."""
    keeps = {v: kept for v, kept in _residuals(graph) if not stays_wide(v.node, policy)}
    if not keeps:
        return graph
    names = {name for node in graph.nodes for name in node.names}
    replaced: dict[Value, Value] = {}
    narrow: dict[Value, Value] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        own = {v: narrow[v] for v in node.operands if v in narrow and node not in keeps[v]}
        new = replace_inputs(node, {**replaced, **own})
        nodes.append(new)
        if new is not node:
            replaced.update(zip(node.outputs, new.outputs, strict=True))
        for value in node.outputs:
            if value in keeps:
                made = through_half(replaced.get(value, value), half, names)
                nodes += made
                (narrow[value],) = made[-1].outputs
                trace.fired(RULE, node.name, [made[0].name])
    return prune(rebuild(graph, nodes, replaced))


def stays_wide(node: Node, policy: Policy | None) -> bool:
    """Whether a pattern of the policy asks for a result of full precision."""
    given = None if policy is None else policy.of_pattern(node)
    return given is not None and given not in HALVES


def _residuals(graph: Graph) -> Iterator[tuple[Value, set[Node]]]:
    """Values of products that are requantized and read otherwise, with the readers that stay."""
    results = set(graph.results)
    readers: dict[Value, set[Node]] = {}
    for node in graph.nodes:
        for operand in node.operands:
            readers.setdefault(operand, set()).add(node)
    found: dict[Value, set[Node]] = {}
    for node in graph.nodes:
        value: Value | None = node.inputs[0] if node.op == "requantize" else None
        last = node
        while value is not None and graph.uses[value] == 1 and is_elementwise(value.node):
            sources = [v for v in value.node.operands if not v.is_constant]
            last, value = value.node, sources[0] if len(sources) == 1 else None
        if value is None or value.dtype != f32 or value in results or graph.uses[value] < 2:
            continue
        if value.node.op != "cast" and is_elementwise(value.node) and comes_from_product(value):
            found.setdefault(value, set()).add(last)
    return ((v, kept) for v, kept in found.items() if kept != readers[v])


def through_half(value: Value, half: DType, names: set[str]) -> list[Node]:
    """Casts to a half and back."""
    nodes: list[Node] = []
    for element in (half, f32):
        attrs = {"to": element, "saturate": True, "round_mode": "up"}
        name = take_name(f"{value.name}.{element}", names)
        types = (value.tensor.with_dtype(element),)
        nodes.append(Node("cast", (value,), attrs, types, (name,), value.node.loc))
        (value,) = nodes[-1].outputs
    return nodes
