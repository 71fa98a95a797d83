"""Codes, scales and bias of one product, given how its input is coded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from bitwright.quant.calibration.stats import CalibrationStats
from bitwright.quant.core.scales import PLAIN, ScaleFormat
from bitwright.quant.model.points import QuantizationPoint
from bitwright.quant.model.products import Product
from bitwright.quant.model.weights.adaround import Descent
from bitwright.quant.model.weights.choose import ActivationQuant, times
from bitwright.quant.model.weights.gptq import ErrorSpread, damping
from bitwright.quant.model.weights.grids import Grid, spread
from bitwright.quant.model.weights.nearest import decibels, weight_qvalues, weight_scales
from bitwright.quant.model.weights.ranges import least_error_scales
from bitwright.quant.model.weights.round_scales import round_scales_for_sums, rounded_up

Array = np.ndarray[Any, Any]
Rounding = Callable[[Array, Array, int, int], Array]
"""Weights, scales, highest and lowest code to codes."""
STORAGE = {8: np.int8, 4: ml_dtypes.int4, 2: ml_dtypes.int2}
NUMBERS_TOGETHER = 1 << 20
"""Weights that are worked on at a time, so that memory does not grow with a layer's width."""


@dataclass(frozen=True)
class Weights:
    """A product in codes: what takes the place of its weight and bias."""

    qvalues: Array
    """Signed integers, or floats of few bits, in the weight's own layout."""
    scales: Array
    """f32: one for each output channel, or the weight's shape with blocks along `block_axis`."""
    correction: Array
    """f32, one for each output channel, added to the result: its mean error, taken back."""
    error: float
    """Mean squared error of the result on the rows scored, relative to its mean square."""
    block: int = 0
    block_axis: int | None = None
    scale_format: ScaleFormat = PLAIN
    """How the scales are stored, which they are rounded to."""

    @property
    def sqnr(self) -> float:
        return decibels(self.error)


@dataclass(frozen=True)
class WeightFormat:
    """How weights are stored and rounded."""

    bits: int = 8
    block: int = 0
    rounding: str = "gptq"
    bias_correction: bool = True
    ranges: str = "mse"
    format: str = ""
    """A block format of floats, in place of integers."""
    exact_sums: bool = False
    """Scales of convolutions have so few bits that sums of dequantized numbers are exact in f32."""

    @property
    def highest(self) -> int:
        return int(2 ** (self.bits - 1) - 1)

    @property
    def lowest(self) -> int:
        """As far below zero as above for 8 bits, whose products of pairs stay small; of few codes
        none is left out."""
        return -self.highest - (self.bits < 8)

    def block_of(self, product: Product) -> int:
        """Blocks run along the terms of a matrix; windows of images keep one scale a channel."""
        terms = int(product.matrix.shape[2])
        return 0 if product.is_conv or self.block >= terms else self.block


def quantize_weights(
    stats: CalibrationStats,
    activation: ActivationQuant | None,
    form: WeightFormat,
    tables: Collection[str] = (),
) -> dict[str, Weights]:
    """Codes of a site's products, by name; `coding` None leaves the input as it is (weight-only).

    Products that see the same rows are rounded together, and those of one weight share the result.
    The weights of products named in `tables` are read by lookups too, whose rows are of i8.
    """
    together: dict[tuple[int, bool], list[Product]] = {}
    for product in stats.point.distinct:
        key = id(stats.sample(product)), product.name in tables
        together.setdefault(key, []).append(product)
    found: dict[str, Weights] = {}
    for (_, is_table), products in together.items():
        found.update(_Together(products, stats, activation, form, is_table).made())
    made = {product.key: found[product.name] for product in stats.point.distinct}
    return {product.name: made[product.key] for product in stats.point.products}


def round_weights(
    point: QuantizationPoint, form: WeightFormat, tables: Collection[str] = ()
) -> dict[str, Weights]:
    """Products rounded to the nearest values without data: their errors are those of the weights.

    Whatever the inputs are, nothing is known of a mean error, so none is corrected.
    """
    alone = replace(form, rounding="nearest", bias_correction=False)
    table = _table_form(alone)
    made = {
        p.key: _Unseen(p, table if p.name in tables else alone).made()[p.name]
        for p in point.distinct
    }
    return {product.name: made[product.key] for product in point.products}


def _table_form(form: WeightFormat) -> WeightFormat:
    """The form of a weight that lookups read too, whose rows are of i8."""
    return replace(form, bits=8, block=0, format="")


ROUNDINGS: dict[str, Callable[[Array], Rounding]] = {
    "gptq": lambda gram: ErrorSpread(gram).qvalues,
    "adaround": lambda gram: Descent(gram).qvalues,
    "nearest": lambda gram: weight_qvalues,
}
"""How codes of [groups, columns, terms] weights are found, given their inputs' Gram matrix."""


class _Together:
    """Products that see the same rows, worked on a few columns at a time."""

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
        self.factors = None
        self.is_static = activation is not None and activation.scheme == "static"
        if activation is not None and activation.factors is not None:
            self.factors = products[0].spread(activation.factors)
        rows = self.sample.scored
        self.inputs = rows if self.factors is None else rows / self.factors
        self.match_dequantize = (
            rows if activation is None else activation.round_trip(rows, self.factors)
        )
        # the weights' part of a mean error is known from many more rows than those scored
        self.unseen = self.sample.mean - rows.mean(axis=0)
        self.block = form.block_of(products[0])
        self.corrects = form.bias_correction and products[0].takes_bias
        gram = self._gram(is_table)
        self.importance = np.einsum("gkk->gk", gram) + damping(gram)
        self.floats = _Floats(form, gram, self._largest()) if form.format else None
        if self.floats is None:
            self.rounded = ROUNDINGS[form.rounding](gram)

    def _gram(self, is_table: bool) -> Array:
        """Second moments of the inputs as the weights meet them, divided by the factors."""
        gram, factors = self.sample.second_moment, self.factors
        if is_table:
            gram = self._with_lookups(gram)
        if factors is not None:
            gram /= factors[:, :, None] * factors[:, None, :]
        return gram

    def _with_lookups(self, gram: Array) -> Array:
        """Second moments G for weights W that lookups read too.

        A lookup gives a row of the table as it is: each of its terms counts the same. Relative
        errors of the product and of lookups count the same too: G / tr(W G W') + 1 / tr(W W').
        """
        power = lookups = 0.0
        for product in self.products:
            matrix = product.matrix
            power += float(np.einsum("gnk,gnk->", matrix @ gram, matrix))
            lookups += _square(matrix)
        share = power / max(lookups, 1e-30)
        return np.asarray(gram + np.float32(share) * np.eye(gram.shape[-1], dtype=np.float32))

    def _largest(self) -> float:
        """The size of the largest weight."""
        factors = 1 if self.factors is None else self.factors[:, None, :]
        return max(float(np.abs(p.matrix * factors).max(initial=0)) for p in self.products)

    def made(self) -> dict[str, Weights]:
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
        """Columns of the products, at most `NUMBERS_TOGETHER` weights at a time."""
        groups, _, terms = self.products[0].matrix.shape
        room = most = max(1, NUMBERS_TOGETHER // (groups * terms))
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
        """Codes as f32, and scales [groups, columns, blocks].

        A scale is that of the largest weight, or a lower one where that measures better.
        """
        if self.floats is not None:
            return self.floats.qvalues(matrix, self.block, self.importance)
        form = self.form
        limits = form.highest, form.lowest
        scales = weight_scales(matrix, form.highest, self.block)
        peak_scales, scales = scales, self._held(scales)
        qvalues = self.rounded(matrix, self._each(scales), *limits)
        if form.ranges == "peak":
            return qvalues, scales
        lower = least_error_scales(matrix, self.importance, *limits, self.block)
        columns = np.flatnonzero((lower < peak_scales).any(axis=(0, 2)))
        if columns.size:
            matrix, lower = matrix[:, columns], self._held(lower[:, columns])
            tried = self.rounded(matrix, self._each(lower), *limits)
            before = self._lost(matrix, qvalues[:, columns], scales[:, columns])
            better = (self._lost(matrix, tried, lower) < before)[:, :, None]
            qvalues[:, columns] = np.where(better, tried, qvalues[:, columns])
            scales[:, columns] = np.where(better, lower, scales[:, columns])
        return qvalues, scales

    def _held(self, scales: Array) -> Array:
        """Scales as they are kept: of few bits where static codes meet them, so that the product
        of two scales is exact."""
        if not self.is_static or self.block:
            return scales
        if self.form.exact_sums and self.products[0].is_conv:
            terms = self.products[0].matrix.shape[2]
            return round_scales_for_sums(scales, terms, self.form.highest).astype(np.float32)
        return rounded_up(scales).astype(np.float32)

    def _lost(self, matrix: Array, qvalues: Array, scales: Array) -> Array:
        """The squared error [groups, columns] that codes make on the rows scored, less its mean."""
        lost = qvalues * self._each(scales)
        lost -= matrix
        return np.asarray(times(self.inputs, lost).var(axis=1))

    def _each(self, scales: Array) -> Array:
        """Scales so that they broadcast over the weights."""
        return spread(scales, self.block, self.products[0].matrix.shape[2])

    def _part(self, exact_matrix: Array, qvalues: Array, scales: Array) -> _Part:
        """The codes as they are stored, the mean error of each column, the error without it."""
        held = qvalues * self._each(scales)
        exact = times(self.sample.scored, exact_matrix)
        error = times(self.match_dequantize, held)
        np.subtract(exact, error, out=error)
        mean = error.mean(axis=1) if self.corrects else np.zeros_like(error[:, 0])
        if self.corrects:
            error -= mean[:, None, :]
            lost = held
            if self.factors is not None:
                np.divide(held, self.factors[:, None, :], out=held)
            np.subtract(exact_matrix, lost, out=lost)
            mean += np.matvec(lost, self.unseen)
        return _Part(self._stored(qvalues), scales, mean, _square(error), _square(exact))

    def _stored(self, qvalues: Array) -> Array:
        element = STORAGE[self.form.bits] if self.floats is None else self.floats.grid.storage
        return np.asarray(qvalues.astype(element))

    def _whole(self, product: Product, parts: list[_Part]) -> Weights:
        qvalues = product.as_weight(_joined([part.qvalues for part in parts]))
        scales = _joined([part.scales for part in parts])
        correction = _joined([part.mean for part in parts]).reshape(-1).astype(np.float32)
        error = sum(part.noise for part in parts) / max(sum(part.power for part in parts), 1e-30)
        block = self.block
        if not block and not product.is_plain:  # each column of each matrix has one scale
            block = int(product.matrix.shape[2])
        if block:
            blocks, axis = product.as_weight(scales), product.term_axis
            return Weights(qvalues, blocks, correction, error, block, axis, self._scale_format)
        flat = scales.reshape(-1)
        return Weights(qvalues, flat, correction, error, scale_format=self._scale_format)

    @property
    def _scale_format(self) -> ScaleFormat:
        return PLAIN if self.floats is None else self.floats.scale_format


class _Unseen(_Together):
    """A product whose inputs are unknown: every term counts the same."""

    def __init__(self, product: Product, form: WeightFormat) -> None:
        self.products, self.form, self.factors, self.is_static = [product], form, None, False
        self.block = form.block_of(product)
        groups, _, terms = product.matrix.shape
        self.importance = np.ones((groups, terms), np.float32)
        self.floats = _Floats(form, None, self._largest()) if form.format else None
        self.rounded = weight_qvalues

    def _lost(self, matrix: Array, qvalues: Array, scales: Array) -> Array:
        lost = qvalues * self._each(scales)
        lost -= matrix
        return np.asarray(np.square(lost).sum(axis=2))

    def _part(self, exact_matrix: Array, qvalues: Array, scales: Array) -> _Part:
        lost = qvalues * self._each(scales)
        np.subtract(exact_matrix, lost, out=lost)
        mean = np.zeros(exact_matrix.shape[:2], np.float32)
        return _Part(self._stored(qvalues), scales, mean, _square(lost), _square(exact_matrix))


class _Floats:
    """Rounding to a block format of floats."""

    def __init__(self, form: WeightFormat, gram: Array | None, largest: float) -> None:
        self.grid = Grid.named(form.format)
        self.scale_format = self.grid.format(largest)
        self.spread = None
        if form.rounding == "gptq":
            assert gram is not None
            self.spread = ErrorSpread(gram)

    def qvalues(self, matrix: Array, block: int, importance: Array) -> tuple[Array, Array]:
        """Codes as f32, and scales [groups, columns, blocks]."""
        scales = self.grid.scales(matrix, block, self.scale_format, importance)
        each = spread(scales, block, matrix.shape[2])
        if self.spread is not None:
            return self.spread.on_grid(matrix, each, self.grid.nearest), scales
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
    """Parts side by side along the columns."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def _square(x: Array) -> float:
    return float(np.vdot(x, x))
