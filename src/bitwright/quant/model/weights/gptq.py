"""Rounding weights so that the product's result, not the weight, changes least.

Terms are rounded one after another, those with the largest input first, and the error that each
makes is spread over the terms still to come, along the inputs' correlations (GPTQ):

    w[k:] -= (w[k] - round(w[k])) * U[k, k:] / U[k, k],      U'U = inverse of E[x x'] + damping

Columns do not know of each other: U is found once, and columns are rounded a few at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.quant.model.weights.fast_rounding import FEWEST_COLUMNS, round_terms

Array = np.ndarray[Any, Any]
Nearest = Callable[[Array], None]
DAMPING = 0.01
FEW = 8
"""Terms whose errors are spread one by one; those of more terms are spread by one product."""
FEW_IN_MACHINE_CODE = 64
"""The same where machine code goes through them (`quant.model.weights.fast_rounding`)."""
SMALL = 64


@dataclass(frozen=True)
class WholeNumbers:
    """Rounds ratios to codes, in place."""

    lowest: int
    highest: int

    def __call__(self, ratio: Array) -> None:
        np.rint(ratio, out=ratio)
        np.maximum(ratio, self.lowest, out=ratio)  # np.clip takes longer for so few numbers
        np.minimum(ratio, self.highest, out=ratio)


def damping(gram: Array) -> Array:
    """What is added to the diagonal, [groups, 1]: part of its mean, so that no input is free."""
    mean = np.einsum("gkk->g", gram)[:, None] / np.float32(max(1, gram.shape[1]))
    return np.asarray(DAMPING * np.where(mean > 0, mean, 1), np.float32)


class ErrorSpread:
    """The order in which terms are rounded, and how the error of each is spread.

    `gram` is E[x x'] of each group's terms, [groups, terms, terms].
    """

    def __init__(self, gram: Array) -> None:
        diagonal = np.einsum("gkk->gk", gram)
        self.order = np.argsort(-diagonal, axis=1, kind="stable")
        each, transposed = np.arange(gram.shape[0])[:, None, None], self.order[:, ::-1]
        last_first = gram[each, transposed[:, :, None], transposed[:, None, :]]
        terms = range(gram.shape[1])
        last_first[:, terms, terms] += damping(gram)
        try:
            root = _inverse_root(last_first)
        except np.linalg.LinAlgError:  # so near to singular that 24 bits cannot tell
            root = _inverse_root(last_first.astype(np.float64)).astype(np.float32)
        # gram = L L' with the order turned around gives U as the inverse of L, turned again
        self.upper = np.ascontiguousarray(root[:, ::-1, ::-1])

    def qvalues(self, matrix: Array, scales: Array, highest: int, lowest: int) -> Array:
        """Whole codes (as f32) of [groups, columns, terms] weights.

        Scales have one number for each column, or one for each weight.
        """
        return self.on_grid(matrix, scales, WholeNumbers(lowest, highest))

    def on_grid(self, matrix: Array, scales: Array, nearest: Nearest) -> Array:
        """The same for any numbers that `nearest` rounds to, in place, in steps of their scale."""
        # terms first, so that a step works on contiguous columns
        rest = self._sorted(matrix)
        # one scale for all terms of a column stays one
        if scales.shape[2] == 1:
            steps = np.ascontiguousarray(scales.transpose(0, 2, 1), np.float32)
        else:
            steps = self._sorted(scales)
        qvalues = np.empty_like(rest)
        self._round(rest, np.broadcast_to(steps, rest.shape), qvalues, nearest, 0)
        result = np.empty(matrix.shape, np.float32)
        np.put_along_axis(result.transpose(0, 2, 1), self.order[:, :, None], qvalues, axis=1)
        return result

    def _sorted(self, matrix: Array) -> Array:
        """[groups, columns, terms] as [groups, terms, columns], the terms in their order."""
        transposed = matrix.transpose(0, 2, 1)
        found = np.take_along_axis(transposed, self.order[:, :, None], axis=1)
        return np.ascontiguousarray(found, np.float32)

    def _round(
        self, rest: Array, steps: Array, qvalues: Array, nearest: Nearest, start: int
    ) -> None:
        """Round all terms of `rest`, the first of them the one `start`; it holds errors then."""
        number = rest.shape[1]
        is_wide = rest.shape[2] >= FEWEST_COLUMNS
        whole = nearest if isinstance(nearest, WholeNumbers) and is_wide else None
        if number > (FEW if whole is None else FEW_IN_MACHINE_CODE):
            half = number // 2
            middle = start + half
            self._round(rest[:, :half], steps[:, :half], qvalues[:, :half], nearest, start)
            spread = self.upper[:, start:middle, middle : start + number]
            rest[:, half:] -= spread.transpose(0, 2, 1) @ rest[:, :half]
            self._round(rest[:, half:], steps[:, half:], qvalues[:, half:], nearest, middle)
            return
        if whole is not None:
            upper = self.upper[:, start : start + number, start : start + number]
            round_terms(rest, steps, upper, qvalues, whole.lowest, whole.highest)
            return
        for k in range(number):
            code, step = qvalues[:, k], steps[:, k]
            np.divide(rest[:, k], step, out=code)
            nearest(code)
            error = rest[:, k]
            error -= code * step
            error /= self.upper[:, start + k, start + k, None]
            if k + 1 < number:
                spread = self.upper[:, start + k, start + k + 1 : start + number, None]
                rest[:, k + 1 :] -= spread * error[:, None, :]


def _inverse_root(gram: Array) -> Array:
    """The inverse of the lower triangular L with L L' = gram, by halves: nearly all is products."""
    size = gram.shape[-1]
    if size <= SMALL:
        return np.linalg.inv(np.linalg.cholesky(gram))
    half = size // 2
    inverse = np.zeros_like(gram)
    first = inverse[:, :half, :half] = _inverse_root(gram[:, :half, :half])
    below = gram[:, half:, :half] @ first.transpose(0, 2, 1)
    rest = gram[:, half:, half:] - below @ below.transpose(0, 2, 1)
    last = inverse[:, half:, half:] = _inverse_root(rest)
    inverse[:, half:, :half] = -last @ (below @ first)
    return inverse
