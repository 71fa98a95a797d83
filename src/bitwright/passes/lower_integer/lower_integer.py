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
"""

from __future__ import annotations

from bitwright.ir.graph import Graph
from bitwright.passes.lower_integer.bias import bias_rule
from bitwright.passes.lower_integer.grouped_matmul import grouped_rule
from bitwright.passes.lower_integer.lookup_tables import table_rule
from bitwright.passes.lower_integer.mean import mean_rules
from bitwright.passes.lower_integer.movement import movement_rules
from bitwright.passes.lower_integer.products import product_rules
from bitwright.passes.lower_integer.recurrent import recurrence_rules
from bitwright.passes.lower_integer.requantize import requantize_rule
from bitwright.rewrite import Trace, rewrite


def lower_integer(graph: Graph, trace: Trace) -> Graph:
    return rewrite(graph, RULES, trace)


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
