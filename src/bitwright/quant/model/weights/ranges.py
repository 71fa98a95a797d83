"""Weight scales of least squared error, weighted by the mean square of the inputs.

    error(s) = Σ h_k (w_k - s clip(round(w_k / s)))²,      h_k = E[x_k²]

The search reduces the scale s = |p| / L of the largest weight p (L the largest integer) by a
fraction d. That saves at most 2d of the rounding error (at most s² Σh / 12) and costs h_p (d p)²
for clipping p, so no d above Σh / (6 L² h_p) helps. Blocks whose bound is small are not searched:
nearly all blocks of 8 bits, none of 2 bits.
"""

from __future__ import annotations

import numpy as np

from bitwright.ir.arrays import Array
from bitwright.quant.model.weights.nearest import weight_qvalues, weight_scales

MIN_CUT = 0.02
"""Scales with a lower bound on d are not searched."""
MAX_CUT = 0.85
COARSE = 16
FINE = (0.5, 0.25, 0.125)


def least_error_scales(
    matrix: Array, importance: Array, highest: int, lowest: int, block: int = 0
) -> Array:
    """Scales [groups, columns, blocks] of weights [groups, columns, terms].

    `importance` is h, [groups, terms]; block 0 means all terms of a column.
    """
    scales = weight_scales(matrix, highest, block)
    blocks, counts = _in_blocks(matrix, importance, block)
    flat = scales.reshape(-1)
    cuts = _largest_cuts(blocks, counts, highest, lowest)
    chosen = np.flatnonzero(cuts >= MIN_CUT)
    if chosen.size:
        searched = _search(
            blocks[chosen], counts[chosen], flat[chosen], cuts[chosen], highest, lowest
        )
        flat[chosen] = searched
    return flat.reshape(scales.shape)


def _in_blocks(matrix: Array, importance: Array, block: int) -> tuple[Array, Array]:
    """Weights and their importance as [blocks, terms]; a short last block is zero-padded."""
    terms = matrix.shape[2]
    size = block or terms
    counts = np.broadcast_to(importance[:, None, :], matrix.shape)
    if short := -terms % size:
        fill = ((0, 0), (0, 0), (0, short))
        matrix, counts = np.pad(matrix, fill), np.pad(counts, fill)
    return matrix.reshape(-1, size), counts.reshape(-1, size)


def _largest_cuts(blocks: Array, counts: Array, highest: int, lowest: int) -> Array:
    """The largest useful d of each block."""
    at = np.abs(blocks).argmax(axis=1)[:, None]
    own = np.take_along_axis(counts, at, 1)[:, 0]
    total = counts.sum(axis=1)
    bound = 6.0 * highest**2 * own
    cuts = np.divide(total, bound, out=np.full(total.shape, np.inf, np.float32), where=bound > 0)
    free = 1 - highest / -lowest  # a negative weight clips later where -lowest > highest
    cuts = np.minimum(cuts, MAX_CUT)
    is_negative = np.take_along_axis(blocks, at, 1)[:, 0] < 0
    return np.asarray(np.where(is_negative, free + (1 - free) * cuts, cuts))


def _search(
    blocks: Array, counts: Array, peaks: Array, cuts: Array, highest: int, lowest: int
) -> Array:
    """The best scale of each block: a coarse grid over d, then refinement."""
    step = (cuts / COARSE).astype(np.float32)
    best = np.zeros_like(peaks)
    least = _errors(blocks, counts, peaks, highest, lowest)

    def attempt(cut: Array) -> None:
        nonlocal best, least
        errors = _errors(blocks, counts, peaks * (1 - cut), highest, lowest)
        better = errors < least
        best, least = np.where(better, cut, best), np.where(better, errors, least)

    for number in range(1, COARSE + 1):
        attempt(number * step)
    for part in FINE:
        centre = best
        for sign in (part, -part):
            attempt(np.maximum(centre + sign * step, 0))
    return np.asarray(peaks * (1 - best))


def _errors(blocks: Array, counts: Array, scales: Array, highest: int, lowest: int) -> Array:
    error = weight_qvalues(blocks, scales[:, None], highest, lowest)
    error *= scales[:, None]
    error -= blocks
    return np.asarray(np.einsum("bk,bk,bk->b", error, error, counts))
