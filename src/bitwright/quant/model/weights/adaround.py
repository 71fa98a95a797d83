"""Adaptive rounding by coordinate descent on the error of the product's result.

The error of a column is a quadratic form of its weight error, e = w - s q:

    e' G e,     G = E[x x'] + damping;      with all other values fixed, the best value of term k is
    q_k + (G e)_k / (s_k G_kk), rounded

Each sweep visits every term; columns are independent. The start is the result of GPTQ, or of
nearest rounding where that is better. The error never grows. AdaRound minimizes the same objective
by gradients.
"""

from __future__ import annotations

import numpy as np

from bitwright.ir.arrays import Array
from bitwright.quant.model.weights.gptq import Gptq, damping
from bitwright.quant.model.weights.nearest import weight_qvalues

SWEEPS = 12
NEARLY_ALL = 4096
"""Sweeps end when fewer than one value in so many still changes."""
TERMS_PER_UPDATE = 16
"""Terms between two updates of G e."""


class CoordinateDescent:
    """Rounds columns whose inputs have the Gram matrix `gram`, [groups, terms, terms]."""

    def __init__(self, gram: Array) -> None:
        self.gptq = Gptq(gram)
        self.gram = gram.copy()
        terms = range(gram.shape[1])
        self.gram[:, terms, terms] += damping(gram)

    def qvalues(self, matrix: Array, scales: Array, highest: int, lowest: int) -> Array:
        """Quantized values (as f32) of [groups, columns, terms] weights, as `Gptq.qvalues`."""
        terms_first = (0, 2, 1)
        weights = np.ascontiguousarray(matrix.transpose(terms_first))
        wide_scales = np.broadcast_to(scales.transpose(terms_first), weights.shape)
        qvalues = self._start(matrix, scales, weights, wide_scales, highest, lowest)
        slopes = self.gram @ (weights - wide_scales * qvalues)
        for _ in range(SWEEPS):
            changed = self._sweep(qvalues, wide_scales, slopes, highest, lowest)
            if changed <= qvalues.size // NEARLY_ALL:
                break
        return np.ascontiguousarray(qvalues.transpose(terms_first))

    def _start(
        self,
        matrix: Array,
        scales: Array,
        weights: Array,
        wide_scales: Array,
        highest: int,
        lowest: int,
    ) -> Array:
        """Initial values [groups, terms, columns]: GPTQ or nearest, the better for each column."""
        compensated = self.gptq.qvalues(matrix, scales, highest, lowest).transpose(0, 2, 1)
        nearest = weight_qvalues(weights, wide_scales, highest, lowest)
        errors = [self._errors(weights - wide_scales * q) for q in (nearest, compensated)]
        return np.where((errors[0] < errors[1])[:, None, :], nearest, compensated)

    def _errors(self, lost: Array) -> Array:
        return np.asarray(np.einsum("gkn,gkn->gn", self.gram @ lost, lost))

    def _sweep(
        self, qvalues: Array, wide_scales: Array, slopes: Array, highest: int, lowest: int
    ) -> int:
        """Visit every term once and update `slopes` = G e; returns how many values changed."""
        changed = 0
        for start in range(0, qvalues.shape[1], TERMS_PER_UPDATE):
            part = slice(start, start + TERMS_PER_UPDATE)
            own = self.gram[:, part, part]
            near = slopes[:, part].copy()
            moved = np.empty_like(near)
            for k in range(near.shape[1]):
                q, scale = qvalues[:, start + k], wide_scales[:, start + k]
                best = near[:, k] / (scale * own[:, k, k, None])
                best += q
                np.clip(np.rint(best, out=best), lowest, highest, out=best)
                moved[:, k] = (best - q) * scale
                qvalues[:, start + k] = best
                near[:, k + 1 :] -= own[:, k + 1 :, k, None] * moved[:, k, None, :]
            if count := int(np.count_nonzero(moved)):
                changed += count
                slopes -= self.gram[:, :, part] @ moved
        return changed
