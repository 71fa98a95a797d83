"""GPTQ: rounds weights to minimize the error of the product's result.

Terms are rounded one after another, largest input first. The error of each term is compensated in
the remaining terms through the inputs' correlations:

    w[k:] -= (w[k] - round(w[k])) * U[k, k:] / U[k, k],      U'U = inverse of E[x x'] + damping

Columns are independent: U is computed once, and columns are rounded a few at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bitwright.ir.arrays import Array
from bitwright.quant.model.weights.fast_rounding import FEWEST_COLUMNS, round_terms

Nearest = Callable[[Array], None]
DAMPING = 0.01
BLOCK = 8
"""Terms whose errors are propagated one by one; larger blocks use one matrix product."""
COMPILED_BLOCK = 64
"""The same for the compiled loop (`quant.model.weights.fast_rounding`)."""
MAX_DIRECT_INVERSE = 64


@dataclass(frozen=True)
class IntegerGrid:
    """Rounds ratios to integers within bounds, in place."""

    lowest: int
    highest: int

    def __call__(self, ratio: Array) -> None:
        np.rint(ratio, out=ratio)
        np.maximum(ratio, self.lowest, out=ratio)  # np.clip is slower on small arrays
        np.minimum(ratio, self.highest, out=ratio)


def damping(gram: Array) -> Array:
    """The term added to the diagonal, [groups, 1]: a fraction of the diagonal's mean."""
    mean = np.einsum("gkk->g", gram)[:, None] / np.float32(max(1, gram.shape[1]))
    return np.asarray(DAMPING * np.where(mean > 0, mean, 1), np.float32)


class Gptq:
    """The rounding order of the terms, and the factors that propagate their errors.

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
        except np.linalg.LinAlgError:  # singular in f32
            root = _inverse_root(last_first.astype(np.float64)).astype(np.float32)
        # with the terms reversed, gram = L L'; U is the inverse of L, reversed again
        self.upper = np.ascontiguousarray(root[:, ::-1, ::-1])

    def qvalues(self, matrix: Array, scales: Array, highest: int, lowest: int) -> Array:
        """Integers (as f32) of [groups, columns, terms] weights.

        Scales have one number per column, or one per weight.
        """
        return self.on_grid(matrix, scales, IntegerGrid(lowest, highest))

    def on_grid(self, matrix: Array, scales: Array, nearest: Nearest) -> Array:
        """The same for any grid; `nearest` rounds weight / scale in place."""
        # terms first: each iteration works on contiguous columns
        rest = self._sorted(matrix)
        if scales.shape[2] == 1:
            scales = np.ascontiguousarray(scales.transpose(0, 2, 1), np.float32)
        else:
            scales = self._sorted(scales)
        qvalues = np.empty_like(rest)
        self._round(rest, np.broadcast_to(scales, rest.shape), qvalues, nearest, 0)
        result = np.empty(matrix.shape, np.float32)
        np.put_along_axis(result.transpose(0, 2, 1), self.order[:, :, None], qvalues, axis=1)
        return result

    def _sorted(self, matrix: Array) -> Array:
        """[groups, columns, terms] as [groups, terms, columns] in rounding order."""
        transposed = matrix.transpose(0, 2, 1)
        found = np.take_along_axis(transposed, self.order[:, :, None], axis=1)
        return np.ascontiguousarray(found, np.float32)

    def _round(
        self, rest: Array, scales: Array, qvalues: Array, nearest: Nearest, start: int
    ) -> None:
        """Round the terms of `rest`, which begin at term `start`; `rest` becomes the errors."""
        number = rest.shape[1]
        is_wide = rest.shape[2] >= FEWEST_COLUMNS
        integers = nearest if isinstance(nearest, IntegerGrid) and is_wide else None
        if number > (BLOCK if integers is None else COMPILED_BLOCK):
            half = number // 2
            middle = start + half
            self._round(rest[:, :half], scales[:, :half], qvalues[:, :half], nearest, start)
            factors = self.upper[:, start:middle, middle : start + number]
            rest[:, half:] -= factors.transpose(0, 2, 1) @ rest[:, :half]
            self._round(rest[:, half:], scales[:, half:], qvalues[:, half:], nearest, middle)
            return
        if integers is not None:
            upper = self.upper[:, start : start + number, start : start + number]
            round_terms(rest, scales, upper, qvalues, integers.lowest, integers.highest)
            return
        for k in range(number):
            q, scale = qvalues[:, k], scales[:, k]
            np.divide(rest[:, k], scale, out=q)
            nearest(q)
            error = rest[:, k]
            error -= q * scale
            error /= self.upper[:, start + k, start + k, None]
            if k + 1 < number:
                factors = self.upper[:, start + k, start + k + 1 : start + number, None]
                rest[:, k + 1 :] -= factors * error[:, None, :]


def _inverse_root(gram: Array) -> Array:
    """The inverse of the Cholesky factor L, L L' = gram; recursive, so that matmuls dominate."""
    size = gram.shape[-1]
    if size <= MAX_DIRECT_INVERSE:
        return np.linalg.inv(np.linalg.cholesky(gram))
    half = size // 2
    inverse = np.zeros_like(gram)
    first = inverse[:, :half, :half] = _inverse_root(gram[:, :half, :half])
    below = gram[:, half:, :half] @ first.transpose(0, 2, 1)
    rest = gram[:, half:, half:] - below @ below.transpose(0, 2, 1)
    last = inverse[:, half:, half:] = _inverse_root(rest)
    inverse[:, half:, :half] = -last @ (below @ first)
    return inverse
