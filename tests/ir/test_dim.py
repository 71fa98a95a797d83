"""Symbolic sizes: normal form, simplification, evaluation, text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitwright.errors import BitwrightError, GraphError
from bitwright.ir import parse_size, symbol
from bitwright.ir.dim import (
    UNKNOWN,
    broadcast_size,
    evaluate,
    max_size,
    min_size,
)
from bitwright.ir.feeds import solve
from bitwright.ir.substitute import substitute

n, m = symbol("n"), symbol("m")


def test_equal_sizes_are_equal_objects_of_thought():
    assert 2 * n + m * 3 == m + n + n + 2 * m
    assert (n + 1) * (n - 1) == n * n - 1
    assert n - n == 0
    assert hash(n + m) == hash(m + n)


def test_division_simplifies_where_it_is_exact():
    assert (6 * n * m) // (2 * n) == 3 * m
    assert (4 * n + 2) // 2 == 2 * n + 1
    assert (4 * n + 3) // 2 == 2 * n + 1
    assert (4 * n + 3) % 2 == 1
    assert str((n + 1) // 2) == "(n+1)//2"


def test_extremes_simplify_where_one_side_wins():
    assert max_size(n + 1, n) == n + 1
    assert min_size(n + 1, n) == n
    assert max_size(n, 0) == n
    assert str(max_size(n, m)) == "max(m, n)"


def test_broadcasting():
    assert broadcast_size(n, 1) == n
    assert broadcast_size(n, n) == n
    assert broadcast_size(n, 7) == 7
    assert evaluate(broadcast_size(n, m), {"n": 1, "m": 5}) == 5
    with pytest.raises(GraphError, match="2 and 3 do not broadcast"):
        broadcast_size(2, 3)
    with pytest.raises(BitwrightError):
        evaluate(broadcast_size(n, m), {"n": 2, "m": 5})


def test_solving_binds_the_free_symbol():
    bindings = {}
    assert solve(2 * n + 1, 7, bindings) and bindings == {"n": 3}
    assert not solve(2 * n + 1, 9, bindings)
    assert not solve(2 * m + 1, 4, {})


def test_substitution():
    assert substitute((n + 1) // 2 * m, {"n": 3}) == 2 * m
    assert substitute(n * m, {"n": m}) == m * m


@pytest.mark.parametrize("name", ["f32", "true", "graph", "max", "1n", "a b", ""])
def test_names_that_cannot_be_sizes(name):
    with pytest.raises(GraphError, match="cannot name a size"):
        symbol(name)


def test_bound_must_not_be_negative():
    with pytest.raises(GraphError, match="negative bound"):
        symbol("n", -1)


def test_deep_functions_become_unknown_instead_of_recursing():
    size = n
    for _ in range(500):
        size = (size + 1) // 2
    assert size is UNKNOWN


leaves = st.one_of(st.integers(0, 9), st.sampled_from([n, m, symbol("k")]))
sizes = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda t: t[0] + t[1]),
        st.tuples(inner, inner).map(lambda t: t[0] * t[1]),
        st.tuples(inner, st.integers(1, 5)).map(lambda t: t[0] // t[1]),
        st.tuples(inner, st.integers(1, 5)).map(lambda t: t[0] % t[1]),
        st.tuples(inner, inner).map(lambda t: max_size(*t)),
        st.tuples(inner, inner).map(lambda t: min_size(*t)),
    ),
    max_leaves=8,
)
values = st.fixed_dictionaries({name: st.integers(0, 20) for name in ("n", "m", "k")})


@given(sizes)
def test_text_round_trip(size):
    assert parse_size(str(size)) == size


@given(sizes, sizes, values)
def test_arithmetic_commutes_with_evaluation(a, b, at):
    x, y = evaluate(a, at), evaluate(b, at)
    assert evaluate(a + b, at) == x + y
    assert evaluate(a - b, at) == x - y
    assert evaluate(a * b, at) == x * y
    assert evaluate(max_size(a, b), at) == max(x, y)
    assert evaluate(min_size(a, b), at) == min(x, y)
    for divisor in (1, 2, 3, 7):
        assert evaluate(a // divisor, at) == x // divisor
        assert evaluate(a % divisor, at) == x % divisor


@given(sizes, values)
def test_substituting_everything_evaluates(size, at):
    assert substitute(size, at) == evaluate(size, at)
