"""Constants that only one branch reads move into it.

    if(flag, x, w) {then: matmul(x, w), else: neg(x)}
        ->  if(flag, x) {then: const w; matmul(x, w), else: neg(x)}

Files keep the weights of branches outside, as captured operands. Inside a branch they are constants
that can be folded, packed and quantized.
"""

from __future__ import annotations

from bitwright.ir.edit import replace_nodes
from bitwright.ir.graph import Graph, Node, Value
from bitwright.ir.naming import take_name
from bitwright.rewrite.trace import Trace


def sink_constants(graph: Graph, trace: Trace) -> Graph:
    def change(node: Node) -> Node:
        return _sunk(graph, node, trace) if node.op == "if" else node

    return replace_nodes(graph, change)


def _sunk(graph: Graph, node: Node, trace: Trace) -> Node:
    condition, *captures = node.inputs
    bodies = dict(node.bodies)
    kept: list[int] = []
    moved: dict[str, list[int]] = {name: [] for name in bodies}
    for place, value in enumerate(captures):
        readers = [name for name, body in bodies.items() if body.uses[body.inputs[place]]]
        is_own = value is not None and value.is_constant and len(readers) == 1
        if is_own and captures.count(value) == 1:
            moved[readers[0]].append(place)
        elif readers:
            kept.append(place)
    if len(kept) == len(captures):
        return node
    trace.fired("sink-constants", node.name, [])
    made = {
        name: _with_constants(body, captures, kept, moved[name]) for name, body in bodies.items()
    }
    inputs = (condition, *(captures[place] for place in kept))
    return node.with_(inputs=inputs, attrs={**node.attrs, **made})


def _with_constants(
    body: Graph, captures: list[Value | None], kept: list[int], moved: list[int]
) -> Graph:
    """The body with the `kept` inputs, and constants instead of the `moved` ones."""
    inputs = body.inputs
    left = {inputs[place].node for place in kept}
    constants: dict[Node, Node] = {}
    taken = {name for node in body.nodes for name in node.names}
    for place in moved:
        value, inner = captures[place], inputs[place].node
        assert value is not None
        taken.discard(inner.name)
        name = take_name(value.name, taken)
        constants[inner] = value.node.with_(names=(name,))

    replaced: dict[Value, Value] = {
        inner.outputs[0]: constant.outputs[0] for inner, constant in constants.items()
    }
    nodes: list[Node] = list(constants.values())
    for node in body.nodes:
        if node.op == "input":
            if node in left:
                nodes.append(node)
            continue
        operands = tuple(None if v is None else replaced.get(v, v) for v in node.inputs)
        new = node if operands == node.inputs else node.with_(inputs=operands)
        replaced.update(zip(node.outputs, new.outputs, strict=True))
        nodes.append(new)
    return body.with_(
        nodes=tuple(nodes), outputs=tuple((name, replaced.get(v, v)) for name, v in body.outputs)
    )
