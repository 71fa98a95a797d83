"""Sizes by number: equal sizes share one, and values are those of `evaluate`."""

import pytest

from bitwright.errors import RunError
from bitwright.ir.dim import Sizes, evaluate, max_size, symbol
from bitwright.ir.size_list import SizeList


def test_equal_sizes_have_one_number_and_the_value_of_evaluate():
    n, m = symbol("n"), symbol("m")
    given = [3, n, 2 * n + m, m + n + n, (n + 3) // 4, max_size(n, m) % 5, 3, n * m // 7, 0]
    sizes = SizeList()
    numbers = [sizes.add(size) for size in given]
    assert numbers[2] == numbers[3] and numbers[0] == numbers[6] and max(numbers) == 6
    for bindings in ({"n": 0, "m": 1}, {"n": 17, "m": 33}, Sizes({"n": 127, "m": 7})):
        values = sizes.values(bindings)
        assert [values[number] for number in numbers] == [evaluate(s, bindings) for s in given]


def test_a_size_without_a_value_is_named():
    sizes = SizeList()
    sizes.add(symbol("n"))
    with pytest.raises(RunError, match="'n' has no value yet"):
        sizes.values({"m": 1})
