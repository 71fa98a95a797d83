"""Embedding lookups in large constant tables: i8 rows, one scale per row.

    y = f32(q[i]) * scale[i]

A table may also be the weight of a product (tied embeddings of a language model). It is then
rounded once, and both read the same constant: a row of the table is a column of the product, with
the same scale. Where smoothing multiplied the weight by factors, the lookup divides by them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bitwright.ir.arrays import Array
from bitwright.ir.graph import Graph, Node, Value, constant_value
from bitwright.quant.model.points import QuantizationPoint
from bitwright.quant.model.products import Product, weight_key
from bitwright.quant.model.recipe import Recipe
from bitwright.quant.model.weights.nearest import weight_qvalues, weight_scales
from bitwright.quant.model.weights.weights import QuantizedWeights

MIN_TABLE_SIZE = 4096


@dataclass(frozen=True)
class Lookup:
    """A gather from a constant table."""

    node: Node
    product: Product | None = None
    """The product whose weight is the transposed table."""

    @property
    def constant(self) -> Value:
        value = self.node.inputs[0]
        assert value is not None
        return value

    @property
    def table(self) -> Array:
        array = constant_value(self.constant)
        assert array is not None
        return array

    def error(self, made: QuantizedWeights | None = None, factors: Array | None = None) -> float:
        """Mean squared error of the table, relative to its mean square.

        `made` are the quantized weights of its product, smoothed by `factors`.
        """
        array = self.table
        if made is None:
            scales = weight_scales(array)
            lost = weight_qvalues(array, scales)
        else:
            scales, lost = made.scales[:, None], made.qvalues.T.astype(np.float32)
        lost *= scales
        if factors is not None:
            lost /= factors
        lost -= array
        return float(np.vdot(lost, lost) / max(float(np.vdot(array, array)), 1e-30))


def chosen_lookups(graph: Graph, points: list[QuantizationPoint], recipe: Recipe) -> list[Lookup]:
    """The lookups that the recipe quantizes, each with the product that shares its table."""
    if "embedding" not in recipe.targets:
        return []
    products = {p.key: p for point in points for p in point.distinct if p.node.op == "matmul"}
    found = []
    for node in graph.nodes:
        if node.op != "gather" or node.attrs.get("axis", 0) != 0:
            continue
        table = constant_value(node.inputs[0])
        if table is None or table.ndim != 2 or table.dtype != np.float32:
            continue
        if table.size >= MIN_TABLE_SIZE and recipe.scheme_of(node.name) != "float":
            found.append(Lookup(node, products.get(("", weight_key(table.T)))))
    return found
