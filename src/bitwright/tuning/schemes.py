"""The quantization scheme of a layer, from its nodes in the quantized graph."""

from __future__ import annotations

from bitwright.ir.graph import Node, Value
from bitwright.tuning.local_errors import activation_pair
from bitwright.tuning.matching import LayerPair, Matching


def scheme_of(matching: Matching, site: LayerPair) -> str:
    """static, dynamic_per_token, dynamic_per_tensor or weight_only."""
    nodes = layer_nodes(matching, site)
    for node in nodes:
        if node.op == "attention" and node.attrs.get("int8"):
            return "dynamic_per_token"
        pair = activation_pair(node)
        if pair is not None:
            source = node.inputs[0]
            assert source is not None
            owner = source.node if node.op == "dequantize" else node
            if "dynamic" not in owner.op:
                return "static"
            per_token = owner.attrs.get("per_token", True)
            return "dynamic_per_token" if per_token else "dynamic_per_tensor"
    return "weight_only"


def layer_nodes(matching: Matching, site: LayerPair) -> list[Node]:
    """The nodes of a layer in the quantized graph, its result first."""
    ends = set(matching.partners.values())
    inside: set[Value] = {matching.partners[v] for v in site.absorbed}
    waiting, found = [site.partner.node], dict[Node, None]()
    while waiting:
        node = waiting.pop()
        if node not in found:
            found[node] = None
            waiting += [v.node for v in node.operands if v not in ends or v in inside]
    return list(found)
