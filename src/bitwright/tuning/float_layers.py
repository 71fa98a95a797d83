"""A quantized graph with chosen layers restored to float.

The float layer reads the quantized model's operands and takes the place of the quantized one. With
switches, each layer becomes `where(switch, float, quantized)`, and one compiled model serves for
every choice of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from bitwright.ir.arrays import Array
from bitwright.ir.edit import prune, replace_inputs
from bitwright.ir.graph import Graph, Value
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.check import verify
from bitwright.tuning.local_errors import LocalErrors, with_sizes
from bitwright.tuning.matching import LayerPair, Matching

SWITCH = "restored."


Change = Callable[[LocalErrors, LayerPair], Value]
"""The value that takes the place of a layer's result in the quantized graph."""


def in_float(errors: LocalErrors, site: LayerPair) -> Value:
    """The float layer on the operands of the quantized model."""
    exact = errors.scaled(site, errors.float_result(site))
    return with_sizes(errors.b, exact, site.partner)


def restore_layers(
    matching: Matching,
    layers: Collection[str],
    shares: Mapping[str, Array],
    *,
    change: Change = in_float,
    switches: bool = False,
) -> Graph:
    """The quantized graph with these layers in float, or changed otherwise; `switches` adds an
    input for each of them, `restored.<layer>`, of type bool."""
    quantized = matching.quantized
    sites: dict[Value, list[LayerPair]] = {}
    for site in matching.sites:
        if site.layer in layers:
            sites.setdefault(site.partner, []).append(site)
    b = Builder.of(quantized)
    b.nodes, b.outputs, b.updates = [], {}, []
    here: dict[Value, Value] = {}
    inputs = [node for node in quantized.nodes if node.op == "input"]
    for node in inputs:
        here.update(zip(node.outputs, b.append(node).outputs, strict=True))
    on = {name: b.input(SWITCH + name, "bool[]") for name in layers} if switches else {}
    errors = LocalErrors(b, matching, here, shares, {})
    for node in quantized.nodes:
        if node.op == "input":
            continue
        kept = b.append(replace_inputs(node, here))
        here.update(zip(node.outputs, kept.outputs, strict=True))
        for value in node.outputs:
            for site in sites.get(value, ()):
                with b.at(node.loc):
                    exact = change(errors, site)
                    if switches:
                        exact = b.where(on[site.layer], exact, here[value])
                here[value] = exact
    outputs = tuple((name, here[value]) for name, value in quantized.outputs)
    updates = tuple((here[s], here[v]) for s, v in quantized.updates)
    made = quantized.with_(nodes=tuple(b.nodes), outputs=outputs, updates=updates)
    return verify(prune(made))
