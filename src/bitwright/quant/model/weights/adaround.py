"""Rounding by descent: codes go up or down as long as the product's result gets nearer.

The error of a column is a quadratic form of what its weights lost, e = w - s c:

    e' G e,     G = E[x x'] + damping;      with all other codes fixed the best code of term k is
    c_k + (G e)_k / (s_k G_kk), rounded

Each sweep visits every term; columns do not know of each other. From the codes that GPTQ gives, or
the nearest ones where those are better, the error only falls, until no single code improves it.
This is what AdaRound learns by gradients, found here by exact steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.quant.model.weights.gptq import ErrorSpread, damping
from bitwright.quant.model.weights.nearest import weight_qvalues

Array = np.ndarray[Any, Any]
SWEEPS = 12
NEARLY_ALL = 4096
"""Sweeps end when fewer than one code in so many still moves."""
TOGETHER = 16
"""Terms between two products that bring G e up to date."""


class Descent:
    """Rounds columns whose inputs have the Gram matrix `gram`, [groups, terms, terms]."""

    def __init__(self, gram: Array) -> None:
        self.spread = ErrorSpread(gram)
        self.gram = gram.copy()
        terms = range(gram.shape[1])
        self.gram[:, terms, terms] += damping(gram)

    def qvalues(self, matrix: Array, scales: Array, highest: int, lowest: int) -> Array:
        """Codes (as f32) of [groups, columns, terms] weights, as `ErrorSpread.codes`."""
        terms_first = (0, 2, 1)
        weights = np.ascontiguousarray(matrix.transpose(terms_first))
        steps = np.broadcast_to(scales.transpose(terms_first), weights.shape)
        qvalues = self._start(matrix, scales, weights, steps, highest, lowest)
        slopes = self.gram @ (weights - steps * qvalues)
        for _ in range(SWEEPS):
            changed = self._sweep(qvalues, steps, slopes, highest, lowest)
            if changed <= qvalues.size // NEARLY_ALL:
                break
        return np.ascontiguousarray(qvalues.transpose(terms_first))

    def _start(
        self, matrix: Array, scales: Array, weights: Array, steps: Array, highest: int, lowest: int
    ) -> Array:
        """Codes [groups, terms, columns] to begin with: the better of two, column by column."""
        spread = self.spread.qvalues(matrix, scales, highest, lowest).transpose(0, 2, 1)
        nearest = weight_qvalues(weights, steps, highest, lowest)
        is_better = self._errors(weights - steps * nearest) < self._errors(weights - steps * spread)
        return np.where(is_better[:, None, :], nearest, spread)

    def _errors(self, lost: Array) -> Array:
        return np.asarray(np.einsum("gkn,gkn->gn", self.gram @ lost, lost))

    def _sweep(self, qvalues: Array, steps: Array, slopes: Array, highest: int, lowest: int) -> int:
        """Visit every term once; `slopes` is G e, kept up to date. Gives how many codes changed."""
        changed = 0
        for start in range(0, qvalues.shape[1], TOGETHER):
            part = slice(start, start + TOGETHER)
            own = self.gram[:, part, part]
            near = slopes[:, part].copy()
            moved = np.empty_like(near)
            for k in range(near.shape[1]):
                code, step = qvalues[:, start + k], steps[:, start + k]
                best = near[:, k] / (step * own[:, k, k, None])
                best += code
                np.clip(np.rint(best, out=best), lowest, highest, out=best)
                moved[:, k] = (best - code) * step
                qvalues[:, start + k] = best
                near[:, k + 1 :] -= own[:, k + 1 :, k, None] * moved[:, k, None, :]
            if count := int(np.count_nonzero(moved)):
                changed += count
                slopes -= self.gram[:, :, part] @ moved
        return changed
