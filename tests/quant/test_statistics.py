"""Statistics: exact merges, constant memory, dtypes, file format."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from bitwright.errors import ParseError, QuantizationError
from bitwright.quant import Statistics

EXACT = ("count", "zeros", "minimum", "maximum", "exponent", "first", "counts")


def of(*parts, axis=None, **options):
    statistics = Statistics(axis, **options)
    for part in parts:
        statistics.add(part)
    return statistics


def assert_same(one, other):
    for name in EXACT:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    assert (one.nan, one.infinite) == (other.nan, other.infinite)
    size = np.sqrt(one.total_squares * np.maximum(one.count, 1)) + 1e-300
    assert (np.abs(one.total - other.total) <= 1e-12 * size).all()
    np.testing.assert_allclose(one.total_squares, other.total_squares, rtol=1e-12)


floats = st.floats(width=32, allow_nan=True, allow_infinity=True)
pieces = st.lists(arrays(np.float32, st.tuples(st.integers(0, 6), st.just(3)), elements=floats))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(pieces, pieces, pieces, st.sampled_from([None, 1, -1]))
def test_merge_equals_one_pass_in_any_grouping(a, b, c, axis):
    whole = of(*a, *b, *c, axis=axis)
    left = of(*a, axis=axis).merge(of(*b, axis=axis)).merge(of(*c, axis=axis))
    right = of(*a, axis=axis).merge(of(*b, axis=axis).merge(of(*c, axis=axis)))
    other_way = of(*c, axis=axis).merge(of(*a, axis=axis)).merge(of(*b, axis=axis))
    for merged in (left, right, other_way):
        assert_same(whole, merged)


@pytest.mark.parametrize("axis", [None, 0, 1, 2, -1])
def test_counts_match_a_plain_histogram(axis):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(5, 7, 70)) * 10.0 ** rng.integers(-3, 3, (5, 7, 1))).astype(np.float32)
    found = of(x[:2], x[2:], axis=axis) if axis != 0 else of(x[..., :9], x[..., 9:], axis=0)
    rows = x.reshape(1, -1) if axis is None else np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1)
    assert found.counts.shape == (len(rows), found.bins)
    for row, counts, edges in zip(rows, found.counts, found.edges(), strict=True):
        assert edges[0] <= row.min() < edges[1]
        expected = np.bincount(np.searchsorted(edges, row, "right") - 1, minlength=found.bins)
        np.testing.assert_array_equal(counts, expected)
        used = counts.nonzero()[0]
        assert used[-1] - used[0] >= found.bins // 2 - 2  # no width is wasted
    np.testing.assert_array_equal(found.minimum, rows.min(1))
    np.testing.assert_array_equal(found.max_abs, np.abs(rows).max(1))
    np.testing.assert_allclose(found.total, rows.astype(np.float64).sum(1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("number", [32, 320, 3200])
def test_memory_does_not_grow_with_the_data(number):
    rng = np.random.default_rng(1)
    statistics = Statistics()
    for _ in range(number):
        statistics.add(rng.normal(size=64) * 10.0 ** rng.integers(-8, 8))
    assert statistics.nbytes == Statistics().nbytes
    assert statistics.counts.sum() == statistics.count[0] == number * 64


@pytest.mark.parametrize(
    "element", [np.float16, ml_dtypes.bfloat16, np.float64, np.int8, np.uint8, np.int64, np.bool_]
)
def test_every_dtype(element):
    x = np.arange(-100, 100).astype(element)
    found = of(x.reshape(10, 20).T)
    assert found.minimum[0] == float(x.min()) and found.maximum[0] == float(x.max())
    assert found.zeros[0] == (x.astype(np.float64) == 0).sum()


def test_non_finite_values_are_counted_and_skipped():
    x = np.array([[1, np.nan, -2], [np.inf, 3, -np.inf]], np.float32)
    found = of(x)
    assert (found.nan, found.infinite, found.count[0]) == (1, 2, 3)
    assert (found.minimum[0], found.maximum[0]) == (-2, 3)
    per_axis = of(x, axis=1)
    assert per_axis.count.tolist() == [1, 1, 1] and per_axis.minimum.tolist() == [1, 3, -2]


@pytest.mark.parametrize("value", [0.0, 5.0, -1e-40, 3e38])
def test_constants_and_extremes(value):
    found = of(np.full(10, value, np.float32), np.float32([1.0]))
    assert found.counts.sum() == 11 and found.max_abs[0] >= 1


def test_values_that_differ_in_the_last_bit_only():
    found = of(np.array([1.0, np.nextafter(1.0, 2)]), np.array([1e300, -1e300]), np.array([1e-300]))
    assert found.counts.sum() == 5


def test_empty_arrays_clear_and_mismatches():
    found = of(np.zeros((0, 3)), axis=1)
    assert found.is_empty and found.channels == 3
    with pytest.raises(QuantizationError, match="axis 1 changed; expected 3, found 4"):
        found.add(np.zeros((2, 4)))
    found.clear()
    found.add(np.ones((2, 4)))
    assert found.channels == 4
    with pytest.raises(QuantizationError, match="do not merge"):
        found.merge(Statistics())
    with pytest.raises(QuantizationError, match="real numbers"):
        found.add(np.array(["a"]))


def test_the_file_format_is_exact_and_checked():
    found = of(np.random.default_rng(2).normal(size=(4, 50)), axis=0)
    data = found.to_bytes()
    assert Statistics.from_bytes(data) == found
    assert Statistics.from_bytes(Statistics(axis=1).to_bytes()) == Statistics(axis=1)
    for broken in (b"", data[:-1], data[:30], b"x" + data, data[:16] + b"}" + data[17:]):
        with pytest.raises(ParseError):
            Statistics.from_bytes(broken)
