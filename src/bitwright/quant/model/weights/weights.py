"""Quantized weights, scales and bias correction of products, given their input quantization."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import ml_dtypes
import numpy as np

from bitwright.ir.arrays import Array
from bitwright.quant.calibration.stats import CalibrationStats
from bitwright.quant.core.scales import PLAIN, ScaleFormat
from bitwright.quant.model.points import QuantizationPoint
from bitwright.quant.model.products import Product
from bitwright.quant.model.weights.adaround import CoordinateDescent
from bitwright.quant.model.weights.choose import ActivationQuant, times
from bitwright.quant.model.weights.gptq import Gptq, damping
from bitwright.quant.model.weights.grids import Grid, spread
from bitwright.quant.model.weights.nearest import decibels, weight_qvalues, weight_scales
from bitwright.quant.model.weights.ranges import least_error_scales
from bitwright.quant.model.weights.round_scales import round_scales_for_sums, rounded_up

Rounding = Callable[[Array, Array, int, int], Array]
"""Weights, scales, largest and smallest integer -> quantized values."""
STORAGE = {8: np.int8, 4: ml_dtypes.int4, 2: ml_dtypes.int2}
WEIGHTS_AT_ONCE = 1 << 20
"""Weights processed at a time, which bounds the memory for wide layers."""


@dataclass(frozen=True)
class QuantizedWeights:
    """The quantized weight and the bias correction of one product."""

    qvalues: Array
    """Signed integers or narrow floats in the layout of the weight."""
    scales: Array
    """f32: one per output channel, or the weight's shape with blocks along `block_axis`."""
    correction: Array
    """f32, one per output channel: bias correction, added to the result."""
    error: float
    """Mean squared error of the result on the scored rows, relative to its mean square."""
    block: int = 0
    block_axis: int | None = None
    scale_format: ScaleFormat = PLAIN
    """The storage format of the scales; they are rounded to it."""

    @property
    def sqnr(self) -> float:
        return decibels(self.error)


@dataclass(frozen=True)
class WeightFormat:
    """Storage type and rounding method of weights."""

    bits: int = 8
    block: int = 0
    rounding: str = "gptq"
    bias_correction: bool = True
    ranges: str = "mse"
    format: str = ""
    """A float block format, in place of integers."""
    round_scales: bool = False
    """Round scales of convolutions so that f32 sums of dequantized values are exact."""

    @property
    def highest(self) -> int:
        return int(2 ** (self.bits - 1) - 1)

    @property
    def lowest(self) -> int:
        """Symmetric for 8 bits, so that pairs of products fit i16; the full range below 8 bits."""
        return -self.highest - (self.bits < 8)

    def block_of(self, product: Product) -> int:
        """Terms per scale of a matmul; 0 for convolutions, which have one scale per channel."""
        terms = int(product.matrix.shape[2])
        return 0 if product.is_conv or self.block >= terms else self.block


Form = WeightFormat | Callable[[Product], WeightFormat]
"""The format of all products, or of each."""


def _form_of(form: Form, product: Product) -> WeightFormat:
    return form if isinstance(form, WeightFormat) else form(product)


def quantize_weights(
    stats: CalibrationStats,
    activation: ActivationQuant | None,
    form: Form,
    tables: Collection[str] = (),
) -> dict[str, QuantizedWeights]:
    """Quantized weights of a point's products, by name; `activation` None means weight-only.

    Products that read the same rows are rounded together. Products of one weight share the result.
    Lookups also read the weights of products named in `tables`; those are i8 with one scale a row.
    """
    together: dict[tuple[int, bool, WeightFormat], list[Product]] = {}
    for product in stats.point.distinct:
        key = id(stats.sample(product)), product.name in tables, _form_of(form, product)
        together.setdefault(key, []).append(product)
    found: dict[str, QuantizedWeights] = {}
    for (_, is_table, own), products in together.items():
        found.update(_WeightRounder(products, stats, activation, own, is_table).made())
    made = {product.key: found[product.name] for product in stats.point.distinct}
    return {product.name: made[product.key] for product in stats.point.products}


def round_to_nearest(
    point: QuantizationPoint,
    form: Form,
    tables: Collection[str] = (),
    activation: ActivationQuant | None = None,
) -> dict[str, QuantizedWeights]:
    """Weights rounded to nearest without data; their error is that of the weights.

    Bias correction needs data and is off.
    """
    made = {}
    for product in point.distinct:
        own = replace(_form_of(form, product), rounding="nearest", bias_correction=False)
        own = _table_form(own) if product.name in tables else own
        made[product.key] = _DataFreeRounder(product, own, activation).made()[product.name]
    return {product.name: made[product.key] for product in point.products}


def _table_form(form: WeightFormat) -> WeightFormat:
    """The format of a weight that lookups also read: i8, one scale per row."""
    return replace(form, bits=8, block=0, format="")


ROUNDINGS: dict[str, Callable[[Array], Rounding]] = {
    "gptq": lambda gram: Gptq(gram).qvalues,
    "adaround": lambda gram: CoordinateDescent(gram).qvalues,
    "nearest": lambda gram: weight_qvalues,
}
"""Rounding of [groups, columns, terms] weights by name, given the inputs' Gram matrix."""


class _WeightRounder:
    """Rounds products that read the same rows, a few columns at a time."""

    def __init__(
        self,
        products: list[Product],
        stats: CalibrationStats,
        activation: ActivationQuant | None,
        form: WeightFormat,
        is_table: bool = False,
    ) -> None:
        form = _table_form(form) if is_table else form
        self.products, self.form = products, form
        self.sample = stats.sample(products[0])
        self._set_activation(activation)
        rows = self.sample.scored
        self.inputs = rows if self.factors is None else rows / self.factors
        self.quantized_inputs = (
            rows if activation is None else activation.round_trip(rows, self.factors)
        )
        # bias correction uses the mean over all rows, not only over the scored ones
        self.mean_offset = self.sample.mean - rows.mean(axis=0)
        self.block = form.block_of(products[0])
        self.corrects = form.bias_correction and products[0].takes_bias
        gram = self._gram(is_table)
        self.importance = np.einsum("gkk->gk", gram) + damping(gram)
        self.floats = _FloatRounder(form, gram, self._largest()) if form.format else None
        if self.floats is None:
            self.rounded = ROUNDINGS[form.rounding](gram)

    def _set_activation(self, activation: ActivationQuant | None) -> None:
        self.factors: Array | None = None
        self.is_static = activation is not None and activation.scheme == "static"
        if activation is not None and activation.factors is not None:
            self.factors = self.products[0].spread(activation.factors)

    def _gram(self, is_table: bool) -> Array:
        """Second moments of the smoothed inputs."""
        gram, factors = self.sample.second_moment, self.factors
        if is_table:
            gram = self._with_lookups(gram)
        if factors is not None:
            gram /= factors[:, :, None] * factors[:, None, :]
        return gram

    def _with_lookups(self, gram: Array) -> Array:
        """Second moments G for weights W that lookups also read.

        A lookup returns a row of the table: its terms have equal weight. The relative errors of
        product and lookups have equal weight too: G / tr(W G W') + 1 / tr(W W').
        """
        power = lookups = 0.0
        for product in self.products:
            matrix = product.matrix
            power += float(np.einsum("gnk,gnk->", matrix @ gram, matrix))
            lookups += _square(matrix)
        share = power / max(lookups, 1e-30)
        return np.asarray(gram + np.float32(share) * np.eye(gram.shape[-1], dtype=np.float32))

    def _largest(self) -> float:
        """The largest magnitude of the smoothed weights."""
        factors = 1 if self.factors is None else self.factors[:, None, :]
        return max(float(np.abs(p.matrix * factors).max(initial=0)) for p in self.products)

    def made(self) -> dict[str, QuantizedWeights]:
        parts: dict[str, list[_Part]] = {product.name: [] for product in self.products}
        for columns in self._pieces():
            matrix = np.concatenate([p.matrix[:, part] for p, part in columns], axis=1)
            if self.factors is not None:
                matrix *= self.factors[:, None, :]
            qvalues, scales = self._qvalues(matrix)
            start = 0
            for product, part in columns:
                own = slice(start, start + part.stop - part.start)
                start = own.stop
                exact = product.matrix[:, part]
                parts[product.name].append(self._part(exact, qvalues[:, own], scales[:, own]))
        return {p.name: self._whole(p, parts[p.name]) for p in self.products}

    def _pieces(self) -> Iterator[list[tuple[Product, slice]]]:
        """Columns of the products, at most `WEIGHTS_AT_ONCE` weights at a time."""
        groups, _, terms = self.products[0].matrix.shape
        room = most = max(1, WEIGHTS_AT_ONCE // (groups * terms))
        piece: list[tuple[Product, slice]] = []
        for product in self.products:
            start, columns = 0, product.matrix.shape[1]
            while start < columns:
                stop = min(columns, start + room)
                piece.append((product, slice(start, stop)))
                room -= stop - start
                start = stop
                if not room:
                    yield piece
                    piece, room = [], most
        if piece:
            yield piece

    def _qvalues(self, matrix: Array) -> tuple[Array, Array]:
        """Quantized values as f32, and scales [groups, columns, blocks].

        The scale maps the largest weight to `highest`, or is lower where that has less error.
        """
        if self.floats is not None:
            return self.floats.qvalues(matrix, self.block, self.importance)
        form = self.form
        limits = form.highest, form.lowest
        scales = weight_scales(matrix, form.highest, self.block)
        peak_scales, scales = scales, self._rounded_scales(scales)
        qvalues = self.rounded(matrix, self._each(scales), *limits)
        if form.ranges == "peak":
            return qvalues, scales
        lower = least_error_scales(matrix, self.importance, *limits, self.block)
        columns = np.flatnonzero((lower < peak_scales).any(axis=(0, 2)))
        if columns.size:
            matrix, lower = matrix[:, columns], self._rounded_scales(lower[:, columns])
            tried = self.rounded(matrix, self._each(lower), *limits)
            before = self._lost(matrix, qvalues[:, columns], scales[:, columns])
            better = (self._lost(matrix, tried, lower) < before)[:, :, None]
            qvalues[:, columns] = np.where(better, tried, qvalues[:, columns])
            scales[:, columns] = np.where(better, lower, scales[:, columns])
        return qvalues, scales

    def _rounded_scales(self, scales: Array) -> Array:
        """The scales, rounded to few bits for static inputs: the product of two scales is exact."""
        if not self.is_static or self.block:
            return scales
        if self.form.round_scales and self.products[0].is_conv:
            terms = self.products[0].matrix.shape[2]
            return round_scales_for_sums(scales, terms, self.form.highest).astype(np.float32)
        return rounded_up(scales).astype(np.float32)

    def _lost(self, matrix: Array, qvalues: Array, scales: Array) -> Array:
        """The variance [groups, columns] of the result's error on the scored rows."""
        lost = qvalues * self._each(scales)
        lost -= matrix
        return np.asarray(times(self.inputs, lost).var(axis=1))

    def _each(self, scales: Array) -> Array:
        return spread(scales, self.block, self.products[0].matrix.shape[2])

    def _part(self, exact_matrix: Array, qvalues: Array, scales: Array) -> _Part:
        """Stored values, mean error per column, and the error that remains after correction."""
        dequantized = qvalues * self._each(scales)
        exact = times(self.sample.scored, exact_matrix)
        error = times(self.quantized_inputs, dequantized)
        np.subtract(exact, error, out=error)
        mean = error.mean(axis=1) if self.corrects else np.zeros_like(error[:, 0])
        if self.corrects:
            error -= mean[:, None, :]
            lost = dequantized
            if self.factors is not None:
                np.divide(lost, self.factors[:, None, :], out=lost)
            np.subtract(exact_matrix, lost, out=lost)
            mean += np.matvec(lost, self.mean_offset)
        return _Part(self._stored(qvalues), scales, mean, _square(error), _square(exact))

    def _stored(self, qvalues: Array) -> Array:
        element = STORAGE[self.form.bits] if self.floats is None else self.floats.grid.storage
        return np.asarray(qvalues.astype(element))

    def _whole(self, product: Product, parts: list[_Part]) -> QuantizedWeights:
        qvalues = product.as_weight(_joined([part.qvalues for part in parts]))
        scales = _joined([part.scales for part in parts])
        correction = _joined([part.mean for part in parts]).reshape(-1).astype(np.float32)
        error = sum(part.noise for part in parts) / max(sum(part.power for part in parts), 1e-30)
        block = self.block
        if not block and not product.is_plain:  # one scale per column of each matrix
            block = int(product.matrix.shape[2])
        scales = product.as_weight(scales) if block else scales.reshape(-1)
        axis = product.term_axis if block else None
        form = PLAIN if self.floats is None else self.floats.scale_format
        return QuantizedWeights(qvalues, scales, correction, error, block, axis, form)


class _DataFreeRounder(_WeightRounder):
    """Rounds one product without data: all terms have equal weight."""

    def __init__(
        self, product: Product, form: WeightFormat, activation: ActivationQuant | None = None
    ) -> None:
        self.products, self.form = [product], form
        self._set_activation(activation)
        self.block = form.block_of(product)
        groups, _, terms = product.matrix.shape
        self.importance = np.ones((groups, terms), np.float32)
        self.floats = _FloatRounder(form, None, self._largest()) if form.format else None
        self.rounded = weight_qvalues

    def _lost(self, matrix: Array, qvalues: Array, scales: Array) -> Array:
        lost = qvalues * self._each(scales)
        lost -= matrix
        return np.asarray(np.square(lost).sum(axis=2))

    def _part(self, exact_matrix: Array, qvalues: Array, scales: Array) -> _Part:
        lost = qvalues * self._each(scales)
        if self.factors is not None:
            lost /= self.factors[:, None, :]
        np.subtract(exact_matrix, lost, out=lost)
        mean = np.zeros(exact_matrix.shape[:2], np.float32)
        return _Part(self._stored(qvalues), scales, mean, _square(lost), _square(exact_matrix))


class _FloatRounder:
    """Rounds to a float block format."""

    def __init__(self, form: WeightFormat, gram: Array | None, largest: float) -> None:
        self.grid = Grid.named(form.format)
        self.scale_format = self.grid.format(largest)
        self.gptq = None
        if form.rounding == "gptq":
            assert gram is not None
            self.gptq = Gptq(gram)

    def qvalues(self, matrix: Array, block: int, importance: Array) -> tuple[Array, Array]:
        """Quantized values as f32, and scales [groups, columns, blocks]."""
        scales = self.grid.scales(matrix, block, self.scale_format, importance)
        each = spread(scales, block, matrix.shape[2])
        if self.gptq is not None:
            return self.gptq.on_grid(matrix, each, self.grid.nearest), scales
        qvalues = matrix / each
        self.grid.nearest(qvalues)
        return qvalues, scales


class _Part(NamedTuple):
    """Some columns of a product."""

    qvalues: Array
    scales: Array
    mean: Array
    noise: float
    power: float


def _joined(parts: list[Array]) -> Array:
    """Parts concatenated along the columns."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def _square(x: Array) -> float:
    return float(np.vdot(x, x))
