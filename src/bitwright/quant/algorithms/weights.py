"""Codes, scales and bias of one product, given how its input is coded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from bitwright.quant.algorithms.choosing import Coding, times
from bitwright.quant.algorithms.codes import decibels, weight_codes, weight_scales
from bitwright.quant.algorithms.rounding import round_weights
from bitwright.quant.collect import Evidence, Sample
from bitwright.quant.products import Product

Array = np.ndarray[Any, Any]
STORAGE = {8: np.int8, 4: ml_dtypes.int4, 2: ml_dtypes.int2}


@dataclass(frozen=True)
class Weights:
    """A product in codes: what takes the place of its weight and bias."""

    codes: Array
    """Signed integers in the weight's own layout."""
    scales: Array
    """f32: one for each output channel, or the weight's shape with blocks along `block_axis`."""
    correction: Array
    """f32, one for each output channel, added to the result: its mean error, taken back."""
    error: float
    """Mean squared error of the result on the rows scored, relative to its mean square."""
    block: int = 0
    block_axis: int | None = None

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

    @property
    def limit(self) -> int:
        return int(2 ** (self.bits - 1) - 1)

    def block_of(self, product: Product) -> int:
        """Blocks run along the terms of a matrix; windows of images keep one scale a channel."""
        terms = int(product.matrix.shape[2])
        return 0 if product.is_conv or self.block >= terms else self.block


def quantize_weights(
    evidence: Evidence, coding: Coding | None, form: WeightFormat
) -> dict[str, Weights]:
    """Codes of a site's products, by name; `coding` None leaves the input as it is (weight-only).

    Products that see the same rows are rounded together.
    """
    together: dict[int, list[Product]] = {}
    for product in evidence.site.products:
        together.setdefault(id(evidence.sample(product)), []).append(product)
    found: dict[str, Weights] = {}
    for products in together.values():
        found.update(_quantize_together(products, evidence, coding, form))
    return found


def _quantize_together(
    products: list[Product], evidence: Evidence, coding: Coding | None, form: WeightFormat
) -> Iterator[tuple[str, Weights]]:
    sample = evidence.sample(products[0])
    factors = None
    if coding is not None and coding.factors is not None:
        factors = products[0].spread(coding.factors)
    matrix = np.concatenate([p.matrix for p in products], axis=1)
    if factors is not None:
        matrix = matrix * factors[:, None, :]
    block = form.block_of(products[0])
    scales = weight_scales(matrix, form.limit, block)
    each = _each(scales, block, matrix.shape[2])
    if form.rounding == "gptq":
        codes = round_weights(matrix, each, _gram(sample, factors), form.limit)
    else:
        codes = weight_codes(matrix, each, form.limit)
    coded = sample.scored if coding is None else coding.round_trip(sample.scored, factors)
    start = 0
    for product in products:
        part = slice(start, start + product.matrix.shape[1])
        start = part.stop
        held = codes[:, part] * each[:, part]
        correction, error = _losses(product, sample, coded, held, factors)
        if not form.bias_correction:
            correction = np.zeros_like(correction)
        stored = product.as_weight(codes[:, part]).astype(STORAGE[form.bits])
        steps = scales[:, part]
        if block:
            blocks = np.ascontiguousarray(steps[0].T)
            yield product.name, Weights(stored, blocks, correction, error, block, 0)
        else:
            yield product.name, Weights(stored, steps.reshape(-1), correction, error)


def _each(scales: Array, block: int, terms: int) -> Array:
    """Scales so that they broadcast over the weights."""
    return np.repeat(scales, block, axis=2)[:, :, :terms] if block else scales


def _gram(sample: Sample, factors: Array | None) -> Array:
    gram = sample.second_moment
    return gram if factors is None else gram / (factors[:, :, None] * factors[:, None, :])


def _losses(
    product: Product, sample: Sample, coded: Array, held: Array, factors: Array | None
) -> tuple[Array, float]:
    """The mean error of each output channel, and the relative error without it."""
    rows = sample.scored
    exact = times(rows, product.matrix)
    error = exact - times(coded, held)
    mean = error.mean(axis=1)
    error -= mean[:, None, :]
    # the weights' part of the mean is known from many more rows than those scored
    lost = product.matrix - (held if factors is None else held / factors[:, None, :])
    unseen = sample.mean - rows.mean(axis=0)
    mean += np.matvec(lost, unseen)
    relative = float((error**2).sum() / max(float((exact**2).sum()), 1e-30))
    return mean.reshape(-1).astype(np.float32), relative
