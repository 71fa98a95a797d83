"""Rounding weights so that the product's result, not the weight, changes least.

Columns of terms are rounded one after another, those with the largest input first, and the error
that each makes is spread over the terms still to come, along the inputs' correlations (GPTQ):

    w[k:] -= (w[k] - round(w[k])) * U[k, k:] / U[k, k],      U'U = inverse of E[x x'] + damping
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.quant.algorithms.codes import WEIGHT_LIMIT

Array = np.ndarray[Any, Any]
DAMPING = 0.01
BLOCK = 32
SMALL = 64


def round_weights(matrix: Array, scales: Array, gram: Array, limit: int = WEIGHT_LIMIT) -> Array:
    """Codes (as f32) of [groups, columns, terms] weights whose rows have the Gram matrix `gram`.

    `gram` is E[x x'] for each group, [groups, terms, terms]. Scales have one number for each
    column, or one for each weight; codes reach from -limit to limit.
    """
    groups, columns, terms = matrix.shape
    diagonal = np.einsum("gkk->gk", gram)
    mean = diagonal.mean(axis=1)
    damping = DAMPING * np.where(mean > 0, mean, 1)
    order = np.argsort(-diagonal, axis=1, kind="stable")
    each = np.arange(groups)[:, None]
    sorted_gram = gram[each[:, :, None], order[:, :, None], order[:, None, :]].astype(np.float64)
    sorted_gram[:, range(terms), range(terms)] += damping[:, None]
    upper = _inverse_root(sorted_gram).astype(np.float32)
    # terms first, so that a step works on contiguous columns
    rest = _terms_first(matrix, order)
    # one scale for all terms of a column stays one
    steps = scales.transpose(0, 2, 1) if scales.shape[2] == 1 else _terms_first(scales, order)
    codes = np.empty_like(rest)
    for start in range(0, terms, BLOCK):
        stop = min(start + BLOCK, terms)
        errors = np.empty((groups, stop - start, columns), np.float32)
        for k in range(start, stop):
            step = steps[:, k % steps.shape[1]]
            code = np.clip(np.rint(rest[:, k] / step), -limit, limit)
            codes[:, k] = code
            error = (rest[:, k] - code * step) / upper[:, k, k, None]
            errors[:, k - start] = error
            if k + 1 < stop:
                rest[:, k + 1 : stop] -= upper[:, k, k + 1 : stop, None] * error[:, None, :]
        if stop < terms:
            rest[:, stop:] -= upper[:, start:stop, stop:].transpose(0, 2, 1) @ errors
    result = np.empty_like(codes)
    np.put_along_axis(result, order[:, :, None], codes, axis=1)
    return np.ascontiguousarray(result.transpose(0, 2, 1))


def _terms_first(matrix: Array, order: Array) -> Array:
    """[groups, columns, terms] as [groups, terms, columns], the terms in this order."""
    chosen = np.take_along_axis(matrix, order[:, None, :], axis=2)
    return np.ascontiguousarray(chosen.transpose(0, 2, 1), np.float32)


def _inverse_root(gram: Array) -> Array:
    """Upper triangular U with U'U = inverse of the Gram matrix.

    With the order of rows and columns turned around, gram = L L' gives U as the inverse of L,
    turned around again.
    """
    return _inverse(np.linalg.cholesky(gram[:, ::-1, ::-1]))[:, ::-1, ::-1]


def _inverse(lower: Array) -> Array:
    """The inverse of lower triangular matrices, by halves: nearly all of it is products."""
    size = lower.shape[-1]
    if size <= SMALL:
        return np.linalg.inv(lower)
    half = size // 2
    inverse = np.zeros_like(lower)
    first = inverse[:, :half, :half] = _inverse(lower[:, :half, :half])
    last = inverse[:, half:, half:] = _inverse(lower[:, half:, half:])
    inverse[:, half:, :half] = -last @ (lower[:, half:, :half] @ first)
    return inverse
