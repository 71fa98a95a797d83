"""The compiled rounding loop equals the numpy loop to the bit."""

import numpy as np
import pytest

from bitwright.quant.model.weights import gptq as rounding
from bitwright.quant.model.weights.fast_rounding import FEWEST_COLUMNS, round_terms
from bitwright.quant.model.weights.gptq import Gptq, IntegerGrid


def plain(rest, steps, upper, qvalues, lowest, highest):
    """The numpy loop, one term at a time."""
    nearest = IntegerGrid(lowest, highest)
    for k in range(rest.shape[1]):
        qvalues[:, k] = rest[:, k] / steps[:, k]
        nearest(qvalues[:, k])
        error = (rest[:, k] - qvalues[:, k] * steps[:, k]) / upper[:, k, k, None]
        rest[:, k] = error
        rest[:, k + 1 :] -= upper[:, k, k + 1 :, None] * error[:, None, :]


@pytest.mark.parametrize(
    "groups, terms, columns", [(1, 1, 8), (1, 33, 17), (3, 9, 16), (2, 64, 127)]
)
@pytest.mark.parametrize("limits", [(-127, 127), (-8, 7), (-2, 1)])
@pytest.mark.parametrize("each", [False, True], ids=["a scale a column", "a scale a weight"])
def test_the_same_bits(groups, terms, columns, limits, each):
    rng = np.random.default_rng(terms)
    rest = rng.normal(size=(groups, terms, columns)).astype(np.float32)
    shape = (groups, terms if each else 1, columns)
    steps = np.broadcast_to(rng.uniform(0.01, 1, shape).astype(np.float32), rest.shape)
    # a part of a larger matrix, as halving leaves it
    upper = rng.normal(size=(groups, terms + 5, terms + 5)).astype(np.float32)[:, 2:-3, 2:-3]
    other, qvalues, want = rest.copy(), np.empty_like(rest), np.empty_like(rest)
    round_terms(rest, steps, upper, qvalues, *limits)
    plain(other, steps, upper, want, *limits)
    np.testing.assert_array_equal(qvalues, want)
    np.testing.assert_array_equal(rest, other)
    assert qvalues.min() >= limits[0] and qvalues.max() <= limits[1]


def test_gptq_uses_the_compiled_loop_with_equal_results(monkeypatch):
    rng = np.random.default_rng(0)
    terms, columns = 48, 2 * FEWEST_COLUMNS
    rows = rng.normal(size=(200, terms)) @ rng.normal(size=(terms, terms))
    spread = Gptq((rows.T @ rows).astype(np.float32)[None] / 200)
    matrix = rng.normal(size=(1, columns, terms)).astype(np.float32)
    scales = np.full((1, columns, 1), 0.05, np.float32)
    calls = []

    def counted(*args):
        calls.append(args)
        plain(*args)

    fast = spread.qvalues(matrix, scales, 127, -127)
    monkeypatch.setattr(rounding, "round_terms", counted)
    np.testing.assert_array_equal(spread.qvalues(matrix, scales, 127, -127), fast)
    assert len(calls) == 1
