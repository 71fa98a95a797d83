"""Sums of two products that are requantized read them in 16 bits.

    requantize(relu(a s + b t))   ->   requantize(relu(f32(f16(a s)) + f32(f16(b t))))

a and b are integer sums. One kernel computes one product and its sum with the other, which was
stored: 16 bits take half the memory. Where only clips are between the sum and its quantization to
8 bits, its unit is that of the quantized result: f16 holds it, with an error below 2^-11. Else
it has any unit, and is stored in the half of the precision policy; before a quantization to 16 bits
it stays in f32, as it does where a pattern of the policy says so. The product that is not stored
stays in f32 (`backends.gpu.codegen.expression`).
"""

from __future__ import annotations

from bitwright.ir.dtype import DType, f16, f32
from bitwright.ir.edit import prune, rebuild, replace_inputs
from bitwright.ir.graph import Graph, Node, Value
from bitwright.passes.fuse.fuse_regions import is_elementwise
from bitwright.passes.lower_integer.scales import match_scaled_product
from bitwright.passes.precision.half_residuals import stays_wide, through_half
from bitwright.passes.precision.policy import Policy
from bitwright.rewrite.trace import Trace

RULE = "store-summand-in-half"
CLIPS = frozenset({"relu", "clip", "maximum", "minimum"})
"""Ops that keep the unit of their operand."""


def half_summands(graph: Graph, trace: Trace, half: DType, policy: Policy | None = None) -> Graph:
    """The graph with stored summands in f16, or in `half` where their unit may be any."""
    sums = _sums(graph, half, policy)
    if not sums:
        return graph
    names = {name for node in graph.nodes for name in node.names}
    replaced: dict[Value, Value] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        new = replace_inputs(node, replaced)
        if node in sums:
            inputs: list[Value | None] = []
            for value in new.operands:
                made = through_half(value, sums[node], names)
                nodes += made
                inputs += made[-1].outputs
            new = new.with_(inputs=tuple(inputs))
            trace.fired(RULE, node.name, [node.name])
        nodes.append(new)
        if new is not node:
            replaced.update(zip(node.outputs, new.outputs, strict=True))
    return prune(rebuild(graph, nodes, replaced))


def _sums(graph: Graph, half: DType, policy: Policy | None) -> dict[Node, DType]:
    """Sums of two scaled products on the way to a requantization, with the type to store."""
    found: dict[Node, DType] = {}
    for node in graph.nodes:
        is_short = node.op == "requantize" and node.outputs[0].dtype.bits <= 8
        value, is_alone = node.inputs[0] if is_short else None, True
        while value is not None and value.dtype == f32 and is_elementwise(value.node):
            is_alone = is_alone and graph.uses[value] == 1
            if value.node.op == "add" and all(_is_product(graph, v) for v in value.node.operands):
                if not stays_wide(value.node, policy):
                    found[value.node] = f16 if is_alone else half
                break
            is_alone = is_alone and value.node.op in CLIPS
            sources = [v for v in value.node.operands if not v.is_constant]
            value = sources[0] if len(sources) == 1 else None
    return found


def _is_product(graph: Graph, value: Value) -> bool:
    return match_scaled_product(value) is not None and graph.uses[value] == 1
