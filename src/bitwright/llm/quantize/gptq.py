"""Rounds the weights of a matrix one column after another; later columns correct the error.

    H = X' X        U'U = inverse of H, U upper triangular
    e = (w_j - q_j) / U_jj          w_k -= e U_jk   for k > j

(Frantar et al., GPTQ). The grid of a block is fitted when its first column is reached, to the
weights that the columns before have corrected.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.llm.quantize.encoders import BLOCK, BlockEncoder, Grid

Array = np.ndarray[Any, Any]
DAMPING = 0.01
SPAN = 4 * BLOCK
"""Columns whose corrections are applied to the rest of the matrix together."""


def inverse_factor(hessian: Array, damping: float = DAMPING) -> Array | None:
    """U of the inverse of the damped matrix; None if it is not positive definite."""
    h = hessian.astype(np.float64)
    diagonal = np.diagonal(h).copy()
    mean = float(diagonal.mean())
    if not np.isfinite(mean) or mean <= 0:
        return None
    h[np.diag_indices_from(h)] += damping * mean
    try:
        inverse = np.linalg.inv(h)
        return np.asarray(np.linalg.cholesky((inverse + inverse.T) / 2).T, np.float32)
    except np.linalg.LinAlgError:
        return None


def gptq_blocks(w: Array, hessian: Array, encoder: BlockEncoder) -> Array:
    """u8[rows, bytes] of w[rows, columns]; the nearest values where the rounding cannot help."""
    importance = np.asarray(np.diagonal(hessian), np.float32)
    importance = importance / max(float(importance.mean()), 1e-30) + np.float32(1e-4)
    factor = inverse_factor(hessian)
    plain = encoder.encode(w, importance)
    if factor is None:
        return plain
    rest = np.array(w, np.float32)
    rows, columns = rest.shape
    size = encoder.size(columns)
    blocks = columns // size
    q = np.empty((rows, blocks, size), np.float32)
    scale, offset = np.empty((rows, blocks), np.float32), np.empty((rows, blocks), np.float32)
    for begin in range(0, columns, SPAN):
        end = min(begin + SPAN, columns)
        errors = np.empty((rows, end - begin), np.float32)
        for column in range(begin, end):
            block, place = divmod(column, size)
            if place == 0:
                part = slice(column, column + size)
                grid = encoder.fit(rest[:, part], importance[part])
                scale[:, block], offset[:, block] = grid.scale, grid.offset
                inverse = np.where(grid.scale == 0, 0, 1 / np.where(grid.scale == 0, 1, grid.scale))
            values = np.rint((rest[:, column] - grid.offset) * inverse)
            values = np.clip(values, *encoder.range)
            q[:, block, place] = values
            error = (rest[:, column] - (values * grid.scale + grid.offset)) / factor[column, column]
            rest[:, column:end] -= error[:, None] * factor[column, column:end]
            errors[:, column - begin] = error
        rest[:, end:] -= errors @ factor[begin:end, end:]
    blocks_of_gptq = encoder.packed(q, Grid(scale, offset))
    errors_of = [
        output_error(w - encoder.dequantize(found), hessian) for found in (blocks_of_gptq, plain)
    ]
    return blocks_of_gptq if errors_of[0] <= errors_of[1] else plain


def output_error(difference: Array, hessian: Array) -> float:
    """The sum of squares of X @ difference.T."""
    return float(np.einsum("nk,nk->", difference @ hessian.astype(np.float32), difference))
