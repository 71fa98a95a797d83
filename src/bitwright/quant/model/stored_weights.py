"""Quantized weights, biases and tables as constants of a graph.

A weight with several readers (products or lookups) becomes one constant.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from typing import Any

import numpy as np

from bitwright.ir.arrays import Array
from bitwright.ir.dtype import f8e8m0, f32
from bitwright.ir.graph import Node, Value, constant_value
from bitwright.ops.core.builder import Builder
from bitwright.quant.core.scales import ScaleFormat
from bitwright.quant.model.products import Product, weight_key
from bitwright.quant.model.weights.choose import ActivationQuant
from bitwright.quant.model.weights.nearest import Range, weight_qvalues, weight_scales
from bitwright.quant.model.weights.weights import QuantizedWeights

MAX_BIAS = 2**30


class StoredWeights:
    """Makes weight constants in a builder, each once; `tables` names products whose transposed
    weight is also the table of a lookup."""

    def __init__(self, b: Builder, tables: Collection[str] = ()) -> None:
        self.b, self.tables = b, frozenset(tables)
        self._made: dict[Hashable, tuple[Value, Any]] = {}

    def _once(self, key: Hashable, owner: Any, make: Callable[[], Value]) -> Value:
        """The value for this key, made once; `owner` keeps the object of an `id` in the key."""
        if key not in self._made:
            self._made[key] = make(), owner
        return self._made[key][0]

    def weight(self, product: Product, made: QuantizedWeights, as_rows: bool) -> Value:
        """The dequantized weight of a product; `as_rows` gives a conv's weight as a matrix."""
        return self._once(
            ("weight", id(made), as_rows), made, lambda: self._weight(product, made, as_rows)
        )

    def _weight(self, product: Product, made: QuantizedWeights, as_rows: bool) -> Value:
        b, qvalues = self.b, made.qvalues
        if product.name in self.tables:
            transposed = b.transpose(self.table(product, made), perm=(1, 0))
            return b.dequantize(transposed, self._table_scales(made), axis=1)  # type: ignore[no-any-return]
        scales = self._scales(made.scales, made.scale_format)
        axis = product.output_axis
        if as_rows:
            qvalues, axis = np.ascontiguousarray(qvalues.reshape(qvalues.shape[0], -1).T), 1
        stored = b.constant(qvalues, name=f"{product.name}.weight")
        if not made.block:
            return b.dequantize(stored, scales, axis=axis)  # type: ignore[no-any-return]
        return b.dequantize(stored, scales, axis=made.block_axis, block=made.block)  # type: ignore[no-any-return]

    def table(self, product: Product, made: QuantizedWeights) -> Value:
        """The quantized weight of a product as the table of a lookup."""
        qvalues = np.ascontiguousarray(made.qvalues.T)
        name = f"{product.name}.weight"
        return self._once(("table", id(made)), made, lambda: self.b.constant(qvalues, name=name))

    def _table_scales(self, made: QuantizedWeights) -> Value:
        return self._once(("table scales", id(made)), made, lambda: self.b.constant(made.scales))

    def _scales(self, scales: Array, form: ScaleFormat) -> Array | Value:
        """Scales in their storage format, with its tensor scale if it has one."""
        if form.element == f32:
            return scales
        qvalues = self.b.constant(form.qvalues(scales))
        if form.element == f8e8m0:
            return qvalues
        return self.b.dequantize(qvalues, np.float32(form.tensor_scale))  # type: ignore[no-any-return]

    def bias(
        self, product: Product, activation: ActivationQuant | None, made: QuantizedWeights
    ) -> Value:
        """The bias with its correction, in i32 for static inputs."""
        known = None if product.bias is None else weight_key(product.bias)
        key = "bias", id(made), id(activation), known
        return self._once(key, (made, activation), lambda: self._bias(product, activation, made))

    def _bias(
        self, product: Product, activation: ActivationQuant | None, made: QuantizedWeights
    ) -> Value:
        if not product.is_plain:
            groups, columns, _ = product.matrix.shape
            spread = product.as_weight(made.correction.reshape(groups, columns, 1))
            return self.b.constant(spread, name=f"{product.name}.bias")
        total = made.correction.astype(np.float64)
        if product.bias is not None:
            total = total + product.bias.reshape(-1)
        is_static = activation is not None and activation.scheme == "static"
        if activation is not None and is_static and isinstance(activation.range, Range):
            scale = (np.float64(activation.range.scale) * made.scales).astype(np.float32)
            qvalues = np.rint(total / scale)
            if np.abs(qvalues).max(initial=0) < MAX_BIAS and (scale > 0).all():
                stored = self.b.constant(qvalues.astype(np.int32), name=f"{product.name}.bias")
                return self.b.dequantize(stored, scale, axis=0)  # type: ignore[no-any-return]
        return self.b.constant(total.astype(np.float32), name=f"{product.name}.bias")

    # recurrent layers

    def input_weight(self, product: Product, made: QuantizedWeights) -> Value:
        """W of a recurrent layer as [directions · gates · H, terms]."""
        if made.scales.ndim > 1:
            return self.b.transpose(self.weight(product, made, False), perm=(1, 0))  # type: ignore[no-any-return]

        def make() -> Value:
            rows = np.ascontiguousarray(made.qvalues.T)
            stored = self.b.constant(rows, name=f"{product.name}.weight")
            return self.b.dequantize(stored, made.scales, axis=0)  # type: ignore[no-any-return]

        return self._once(("input weight", id(made)), made, make)

    def state_weight(self, product: Product, array: Array) -> Value:
        """R of a recurrent layer [directions, gates · H, H], with one scale per row."""

        def make() -> Value:
            rows = array.reshape(-1, array.shape[-1])
            scales = weight_scales(rows)
            qvalues = weight_qvalues(rows, scales).astype(np.int8)
            stored = self.b.constant(qvalues, name=f"{product.node.name}.recurrent")
            real = self.b.dequantize(stored, scales.reshape(-1), axis=0)
            return self.b.reshape(real, shape=array.shape)  # type: ignore[no-any-return]

        return self._once(("state weight", weight_key(array)), array, make)

    # lookups

    def lookup(self, node: Node, at: Value) -> Value:
        """Rows of a table that no product reads: i8 values and one scale per row."""
        array = constant_value(node.inputs[0])
        assert array is not None
        key = weight_key(array)
        scales = weight_scales(array)
        b = self.b

        def qvalues() -> Value:
            found = weight_qvalues(array, scales).astype(np.int8)
            return b.constant(found, name=f"{node.name}.table")

        table = self._once(("lookup", key), array, qvalues)
        row_scales = self._once(
            ("row scales", key), array, lambda: b.constant(scales, name=f"{node.name}.scales")
        )
        found, scale = b.gather(table, at, axis=0), b.gather(row_scales, at, axis=0)
        return b.mul(b.cast(found, to="f32"), scale)  # type: ignore[no-any-return]

    def tied_lookup(
        self,
        product: Product,
        activation: ActivationQuant | None,
        made: QuantizedWeights,
        at: Value,
    ) -> Value:
        """Rows of a table that is also the weight of a product."""
        b = self.b
        found = b.gather(self.table(product, made), at, axis=0)
        scale = b.gather(self._table_scales(made), at, axis=0)
        y: Value = b.mul(b.cast(found, to="f32"), b.reshape(scale, shape=(*at.shape, 1)))
        if activation is not None and activation.factors is not None:
            y = b.mul(y, (1 / activation.factors.astype(np.float64)).astype(np.float32))
        return y
