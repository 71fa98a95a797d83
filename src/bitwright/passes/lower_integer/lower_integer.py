"""Q/DQ graphs become graphs of integer operators.

    matmul(dequantize(x), dequantize(w))   ->  cast(integer_matmul(x, w)) * (s_x s_w)   (`products`)
    … + bias                               ->  the bias joins the i32 sum               (`bias`)
    quantize(… * m)                        ->  requantize(… * (m / s_y))            (`requantize`)
    transpose(dequantize(x)), …            ->  dequantize(transpose(x)), …            (`movement`)
    quantize(sigmoid(dequantize(x))), …    ->  lookup_table(x, table)            (`lookup_tables`)
    mean(dequantize(x))                    ->  an integer sum, scaled                     (`mean`)

The same for convolutions, recurrent layers and experts, and for i32 products as importers write
them for integer operators of other tools. The trace has the reason for every product that stays in
floating point.

Training runs the same operators: weights, scales and zero points that are states have the rules of
constants. Values that only gradients and state updates read as well count as values without those
readers (`forward_uses`), so that the forward pass computes what the deployed model computes.
"""

from __future__ import annotations

from collections import Counter

from bitwright.ir.graph import Graph, Value, sorted_nodes
from bitwright.passes.lower_integer.bias import bias_rule
from bitwright.passes.lower_integer.grouped_matmul import grouped_rule
from bitwright.passes.lower_integer.lookup_tables import table_rule
from bitwright.passes.lower_integer.mean import mean_rules
from bitwright.passes.lower_integer.movement import movement_rules
from bitwright.passes.lower_integer.operands import quantize_operands
from bitwright.passes.lower_integer.products import product_rules
from bitwright.passes.lower_integer.recurrent import recurrence_rules
from bitwright.passes.lower_integer.requantize import requantize_rule
from bitwright.passes.lower_integer.scales import is_parameter
from bitwright.rewrite import Trace, rewrite

GRADIENT = ("grad.", "grad_")
"""What the names of outputs begin with that are gradients, or their norm."""


def lower_integer(graph: Graph, trace: Trace) -> Graph:
    return rewrite(graph, RULES, trace, forward_uses)


def lower_integer_sharing(graph: Graph, trace: Trace) -> Graph:
    """As `lower_integer`, for kernels that store a sum beside its quantization."""
    return rewrite(graph, SHARING_RULES, trace, forward_uses)


def forward_uses(graph: Graph) -> Counter[Value]:
    """How many times the forward pass reads each value.

    It is what the outputs need that are not named `grad.…` or `grad_…`. All readers count in a
    graph that does not train quantization parameters.
    """
    if not (graph.updates or any(name.startswith(GRADIENT) for name, _ in graph.outputs)):
        return graph.uses
    scales = (quantize_operands(n)[1] for n in graph.nodes if n.op == "quantize")
    if not any(is_parameter(scale) for scale in scales):
        return graph.uses
    results = [value for name, value in graph.outputs if not name.startswith(GRADIENT)]
    counts = Counter([v for node in sorted_nodes(results) for v in node.operands])
    counts.update(results)
    return counts


RULES = [
    *product_rules(),
    bias_rule(),
    *movement_rules(),
    *mean_rules(),
    table_rule(),
    requantize_rule(),
    *recurrence_rules(),
    grouped_rule(),
]
SHARING_RULES = [
    requantize_rule(shares=True) if rule.name == "quantize-to-requantize" else rule
    for rule in RULES
]
