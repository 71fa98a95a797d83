"""What is known of a size before its symbols are: bounds, exact division, limits."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitwright.errors import RunError
from bitwright.ir import symbol
from bitwright.ir.dim import (
    bounds,
    broadcast_size,
    divide_exactly,
    evaluate,
    max_size,
    min_size,
)
from bitwright.ir.substitute import apply_function

n, m, k = symbol("n"), symbol("m"), symbol("k", 512)
SMALL = st.integers(-3, 3)
SIZES = st.recursive(
    st.sampled_from([n, m, k]) | SMALL,
    lambda inner: st.one_of(
        st.builds(lambda a, b, c: a * b + c, inner, inner, SMALL),
        st.builds(
            apply_function, st.sampled_from(["max", "min", "floordiv", "mod"]), inner, st.just(3)
        ),
        st.builds(apply_function, st.sampled_from(["max", "min"]), inner, inner),
    ),
    max_leaves=5,
)


@pytest.mark.parametrize(
    "size, expected",
    [
        (7, (7, 7)),
        (n, (0, math.inf)),
        (3 - 2 * k, (-1021, 3)),
        (n * k + 1, (1, math.inf)),
        (k // 2, (0, 256)),
        (n // 2, (0, math.inf)),
        (n % 7, (0, 6)),
        (min_size(n, 5), (0, 5)),
        (max_size(n - 2, m - 3), (-2, math.inf)),
    ],
)
def test_bounds(size, expected):
    assert bounds(size) == expected


@given(SIZES, st.tuples(*[st.integers(0, 6)] * 3))
def test_a_size_lies_in_its_bounds(size, values):
    low, high = bounds(size)
    assert low <= evaluate(size, dict(zip("nmk", values, strict=True))) <= high


def test_extremes_are_decided_by_bounds():
    assert min_size(k, 512) == k and max_size(k, 512) == 512
    assert max_size(n, n + m) == n + m
    assert max_size(n // 2, 0) == n // 2
    assert str(min_size(k, 511)) == "min(511, k)"


def test_polynomials_divide():
    assert divide_exactly((n + m) * k * 12, (n + m) * 4) == 3 * k
    assert divide_exactly((n + 1) * (m + 2), m + 2) == n + 1
    assert divide_exactly(n * n - m * m, n - m) == n + m
    assert divide_exactly(0, n) == 0
    assert divide_exactly(n * m + 1, n) is None
    assert divide_exactly(4 * n, 3) is None


@given(SIZES, SIZES)
def test_a_product_divides_by_its_factors(a, b):
    if b != 0:
        assert divide_exactly(a * b, b) == a


def test_a_size_cut_by_a_limit_broadcasts_with_itself():
    assert broadcast_size(min_size(n, 512), n) == n
    assert broadcast_size(n + m, min_size(512, n + m)) == n + m
    assert str(broadcast_size(min_size(n, 1), n)) == "broadcast(min(1, n), n)"


def test_division_by_a_size_that_is_zero():
    with pytest.raises(RunError, match="divided by a size that is zero"):
        evaluate(n // m, {"n": 4, "m": 0})
