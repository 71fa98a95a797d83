"""Size checks: which nodes are checked, and their errors."""

import numpy as np
import pytest

from bitwright.backends.cpu.runtime.sizes import (
    _UNCHECKED,
    SizeChecks,
    checks_from_text,
    checks_text,
)
from bitwright.errors import RunError
from bitwright.ir.parser import parse_type
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.registry import get

ATTRS = {
    "transpose": {"perm": (2, 0, 1)},
    "cast": {"to": "i32"},
    "softmax": {"axis": 1},
    "log_softmax": {"axis": 1},
}


@pytest.mark.parametrize("op", sorted(_UNCHECKED - {"sizes"}))
def test_unchecked_ops_infer_the_same_at_any_sizes(op):
    given = ATTRS.get(op, {"axes": (0, 2)} if op.startswith("reduce") else {})
    opdef = get(op)
    attrs = opdef.call_attrs(opdef.normal_attrs(given))
    shape = parse_type("f32[n, 3, m]")
    symbolic = opdef.infer(shape, **attrs)
    for sizes in ({"n": 0, "m": 0}, {"n": 1, "m": 1}, {"n": 7, "m": 1}, {"n": 33, "m": 0}):
        assert opdef.infer(shape.substitute(sizes), **attrs) == symbolic.substitute(sizes)


def two_products() -> SizeChecks:
    """x[n, m] times a constant of 7 rows: m must be 7; and a reshape to n // 2 rows."""
    b = Builder("sizes")
    x = b.input("x", "f32[n, m]")
    y = b.matmul(x, b.constant(np.ones((7, 5), np.float32)), name="y")
    z = b.reshape(x, shape=(2, x.shape[0] // 2, x.shape[1]), name="z")
    top = b.reduce_max(y, axes=(0,), name="top")
    return SizeChecks.of(b.build(y=y, z=z, top=top))


def test_inconsistent_sizes_are_an_error_with_location():
    checks = two_products()
    assert [check.node.op for check in checks.checks] == ["matmul", "reshape"]
    for made in (checks, checks_from_text(*checks_text(checks))):
        for n, m in ((0, 7), (2, 7), (128, 7)):
            made.verify({"n": n, "m": m})
        with pytest.raises(RunError, match="%y"):
            made.verify({"n": 2, "m": 6})
        with pytest.raises(RunError, match="%z"):
            made.verify({"n": 3, "m": 7})


def test_nodes_are_checked_when_their_sizes_are_bound():
    checks, seen = two_products(), set()
    checks.ready({"n": 3}, seen)
    assert not seen
    with pytest.raises(RunError, match="%z"):
        checks.ready({"n": 3, "m": 7}, seen)


def past_the_limit(start: int) -> SizeChecks:
    """A slice of a constant of 131072 elements: of n elements, or of 4 behind n."""
    b = Builder("limit")
    n = b.input("x", "f32[n]").shape[0]
    table = b.constant(np.zeros(131072, np.float32))
    begin, end = (0, n) if not start else (n, n + 4)
    y = b.slice(table, starts=(begin,), stops=(end,), steps=(1,), axes=(0,), name="y")
    return SizeChecks.of(b.build(y=y))


@pytest.mark.parametrize("start", [0, 1])
def test_every_size_is_checked_whatever_sizes_were_right_before(start):
    checks = past_the_limit(start)
    for made in (checks, checks_from_text(*checks_text(checks))):
        for n in (1, 2, 100003, 131000):
            made.verify({"n": n})
        with pytest.raises(RunError, match="does not fit"):
            made.verify({"n": 131073})
