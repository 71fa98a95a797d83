"""Scales of least error, compared with every scale of a fine grid."""

import numpy as np
import pytest

from bitwright.quant.model.weights.nearest import weight_qvalues, weight_scales
from bitwright.quant.model.weights.ranges import least_error_scales

KINDS = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "heavy": lambda rng, shape: rng.standard_t(2, size=shape),
    "uniform": lambda rng, shape: rng.uniform(-1, 1, size=shape),
    "one-sided": lambda rng, shape: -np.abs(rng.normal(size=shape)),
}


def errors(matrix, importance, scales, highest, lowest, block):
    each = np.repeat(scales, block or matrix.shape[2], axis=2)[:, :, : matrix.shape[2]]
    lost = (
        importance[:, None] * (weight_qvalues(matrix, each, highest, lowest) * each - matrix) ** 2
    )
    return np.add.reduceat(lost, range(0, matrix.shape[2], block or matrix.shape[2]), axis=2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("terms, block", [(48, 16), (37, 16), (37, 0), (300, 0), (1, 0)])
def test_no_scale_of_a_fine_grid_is_much_better(kind, bits, terms, block):
    rng = np.random.default_rng(bits)
    matrix = KINDS[kind](rng, (2, 6, terms)).astype(np.float32)
    importance = rng.gamma(0.5, size=(2, terms)).astype(np.float32)
    highest = 2 ** (bits - 1) - 1
    lowest = -highest if bits == 8 else -highest - 1
    limits = highest, lowest, block
    found = least_error_scales(matrix, importance, *limits)
    peaks = weight_scales(matrix, highest, block)
    assert found.shape == peaks.shape and found.dtype == np.float32
    assert (found > 0).all() and (found <= peaks).all()
    least = errors(matrix, importance, found, *limits)
    start = errors(matrix, importance, peaks, *limits)
    assert (least <= start).all()
    best = np.min(
        [errors(matrix, importance, peaks * r, *limits) for r in np.linspace(0.1, 1, 600)], axis=0
    )
    # with many bits, the search only misses scales that suit a few weights by chance
    missed = {8: 0.2, 4: 0.05, 2: 0.02}[bits]
    assert least.sum() <= best.sum() + missed * start.sum()


def test_zero_weights_and_inputs_have_scales():
    matrix = np.zeros((1, 3, 8), np.float32)
    matrix[0, 1] = np.arange(8)
    for importance in (np.zeros((1, 8), np.float32), np.ones((1, 8), np.float32)):
        found = least_error_scales(matrix, importance, 7, -8, 4)
        assert np.isfinite(found).all() and (found > 0).all()
