"""KL divergence of a clipped histogram from its quantized form, for the entropy method.

    P   the density of the values; clipped mass is added to a bin of the outermost filled cells
    Q   the mass inside the range, spread evenly over the filled part of each quantization cell
    KL  integral of P log(P / Q), both normalized to 1

The density d is constant within a bin, so mass, filled length and the integral of d log d are
piecewise linear. They are interpolated at the thresholds between quantization levels, so KL is a
continuous function of the range.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bitwright.ir.arrays import Array
from bitwright.quant.calibration.scoring import Distribution


@dataclass(frozen=True)
class Cumulative:
    """Integrals from the left end, [rows, bins + 1]: mass, filled length, d log d."""

    edges: Array
    mass: Array
    filled: Array
    entropy: Array

    @staticmethod
    def of(data: Distribution) -> Cumulative:
        width = np.diff(data.places)
        density = data.density
        held = data.weights > 0
        log = np.log(np.where(held & (density > 0), density, 1.0))
        return Cumulative(
            data.places,
            _running(data.weights),
            _running(np.where(held, width, 0.0)),
            _running(data.weights * log),
        )

    def at(self, x: Array) -> tuple[Array, Array, Array]:
        """The three integrals from the left end to x[tries, rows, n]."""
        found = [np.empty(x.shape) for _ in range(3)]
        for row, edges in enumerate(self.edges):
            place = x[:, row].reshape(-1)
            right = np.clip(np.searchsorted(edges, place, "right"), 1, len(edges) - 1)
            width = edges[right] - edges[right - 1]
            share = np.clip((place - edges[right - 1]) / np.where(width > 0, width, 1), 0, 1)
            for integral, values in zip(found, (self.mass, self.filled, self.entropy), strict=True):
                left = values[row][right - 1]
                step = share * (values[row][right] - left)
                integral[:, row] = (left + step).reshape(x[:, row].shape)
        return found[0], found[1], found[2]


def _running(values: Array) -> Array:
    return np.concatenate([np.zeros((len(values), 1)), np.cumsum(values, 1)], 1)


def divergence(sums: Cumulative, cells: Array, bin_width: Array) -> Array:
    """KL for cells[tries, rows, levels + 1]: ascending boundaries of the quantization cells."""
    mass, filled, entropy = sums.at(cells)
    total = np.maximum(sums.mass[:, -1], 1)
    held, length = np.diff(mass), np.diff(filled)
    used = (held > 0) & (length > 0)
    log_q = np.log(np.where(used, held, 1.0) / np.where(used, length, 1.0))
    product = entropy[..., -1] - entropy[..., 0]
    cross = (held * log_q).sum(-1)
    first, last = used.argmax(-1), used.shape[-1] - 1 - used[..., ::-1].argmax(-1)
    for cell, outside in ((first, mass[..., 0]), (last, total - mass[..., -1])):
        log_own = np.take_along_axis(log_q, cell[..., None], -1)[..., 0]
        product += _extra(np.exp(log_own) * bin_width, outside, bin_width)
        cross += outside * log_own
    inside = mass[..., -1] - mass[..., 0]
    found = (product - cross) / total + np.log(np.where(inside > 0, inside, 1.0) / total)
    return np.where(inside > 0, found, np.inf)


def _extra(own: Array, outside: Array, width: Array) -> Array:
    """The increase of the integral of d log d when a bin of mass `own` gains mass `outside`."""
    both = own + outside
    return np.asarray(both * np.log(both / width) - own * np.log(own / width))
