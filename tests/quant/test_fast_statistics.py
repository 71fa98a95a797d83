"""The native code of `Statistics` matches numpy."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from bitwright.quant import Statistics

SIZES = [1, 7, 16, 17, 33, 127, 1000, (1 << 17) + 5]
KINDS = {
    "normal": lambda rng, n: rng.normal(size=n),
    "relu": lambda rng, n: np.maximum(rng.normal(size=n), 0),
    "tails": lambda rng, n: rng.normal(size=n) ** 9,
    "far": lambda rng, n: 1e6 + rng.normal(size=n),
    "tiny": lambda rng, n: rng.normal(size=n) * 1e-42,
    "huge": lambda rng, n: np.clip(rng.normal(size=n), -1, 1) * 3e38,
    "constant": lambda rng, n: np.full(n, -2.5),
    "zero": lambda rng, n: np.zeros(n),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_results_match_numpy(kind, size):
    rng = np.random.default_rng(size)
    fast, plain = Statistics(), Statistics()
    for scale in (0.5, 1):
        x = (KINDS[kind](rng, size) * scale).astype(np.float32)
        fast.add(x)
        plain.add(x.astype(np.float64))
    for field in ("count", "zeros", "minimum", "maximum", "exponent", "first", "counts"):
        np.testing.assert_array_equal(getattr(fast, field), getattr(plain, field))
    np.testing.assert_allclose(fast.total_squares, plain.total_squares, rtol=1e-12)
    bound = 1e-12 * np.sqrt(plain.total_squares * plain.count)
    assert abs(fast.total - plain.total) <= bound


def test_non_finite_values_are_skipped():
    x = np.arange(1 << 18, dtype=np.float32)
    x[5], x[(1 << 17) + 3], x[-1] = np.nan, np.inf, -np.inf
    found = Statistics()
    found.add(x)
    assert (found.nan, found.infinite, found.count) == (1, 2, x.size - 3)
    assert found.maximum == x[-2] and found.counts.sum() == x.size - 3


def test_other_orders_and_narrow_types():
    x = np.random.default_rng(0).normal(size=(6, 5, 4)).astype(np.float32)
    found = [Statistics() for _ in range(3)]
    for statistics, array in zip(found, (x, x.transpose(2, 0, 1), x[::-1]), strict=True):
        statistics.add(array)
        np.testing.assert_array_equal(statistics.counts, found[0].counts)
    qvalues, halves = Statistics(), Statistics()
    qvalues.add(np.array([-128, 0, 127], np.int8))
    halves.add(np.array([-65504, 6e-8, 1], np.float16))
    assert (qvalues.minimum, qvalues.maximum, qvalues.zeros) == (-128, 127, 1)
    assert halves.minimum == -65504


def test_concurrent_first_calls():
    arrays = [np.random.default_rng(i).normal(size=5000).astype(np.float32) for i in range(16)]
    found = [Statistics() for _ in arrays]
    with ThreadPoolExecutor(8) as workers:
        list(workers.map(lambda statistics, x: statistics.add(x), found, arrays))
    assert [int(one.counts.sum()) for one in found] == [5000] * 16
