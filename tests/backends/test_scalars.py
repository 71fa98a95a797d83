"""Every op with a scalar form, compiled, agrees with its reference; integers never trap."""

import numpy as np
import pytest
from emitted import WIDTHS, lanewise

from bitwright.backends.cpu.codegen.expression import (
    Expression,
    Step,
    ValueRef,
    from_stored,
    to_stored,
)
from bitwright.backends.cpu.codegen.scalars import LlvmScalars
from bitwright.errors import CompileError
from bitwright.ir.dtype import bool_, dtype, f32, i32
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.ops.core.opdef import draw
from bitwright.ops.core.registry import all_ops
from bitwright.ops.core.scalar import Scalars

OPS = [op for op in all_ops().values() if op.scalar]
CASES = [
    pytest.param(op, case, id=f"{op.name}-{number}")
    for op in OPS
    for number, case in enumerate(op.samples())
    if all(x is None or x.dtype.kind not in "OcSU" for x in case.inputs)
]
SPECIAL = np.array(
    [0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 0.5, -3.5, 1e-40, 1e30, -80, 100], "f4"
)


def compiled(op, arrays, attrs, result, target, lanes=4):
    """The op on arrays of one shape, through its scalar form."""
    present = [x for x in arrays if x is not None]
    numbers = iter(range(len(present)))
    operands = tuple(None if x is None else ValueRef(next(numbers)) for x in arrays)
    step = Step(op.name, operands, tuple(attrs.items()), result)
    expression = Expression(tuple(dtype(x.dtype) for x in present), (step,), (len(present),))

    def body(f, *values):
        ready = [from_stored(f, v, d) for v, d in zip(values, expression.inputs, strict=True)]
        return to_stored(f, expression.emit(f, ready, lanes)[0], result)

    return lanewise(target, body, *present, result=result.numpy, lanes=lanes)


def interpreted(op, arrays, attrs):
    b = Builder("one")
    values = [
        None if x is None else b.input(f"in{i}", f"{dtype(x.dtype)}{list(x.shape)}")
        for i, x in enumerate(arrays)
    ]
    node = b.node(op.name, values, attrs, [])
    feeds = {f"in{i}": x for i, x in enumerate(arrays) if x is not None}
    (found,) = run(b.build(*node.outputs), feeds).values()
    return node, found


def compare(found, expected, tolerance):
    if expected.dtype.kind in "iub" or tolerance == 0:
        np.testing.assert_array_equal(found, expected)
        return
    wide = expected.astype(np.float64)
    scale = np.abs(wide[np.isfinite(wide)]).max(initial=1e-30)
    np.testing.assert_allclose(found.astype(np.float64), wide, tolerance, tolerance * scale)


@pytest.mark.parametrize("op, case", CASES)
def test_samples_agree_with_the_reference(op, case):
    node, expected = interpreted(op, case.inputs, case.attrs)
    if not expected.size:
        return
    shape = np.broadcast_shapes(expected.shape, *(x.shape for x in case.inputs if x is not None))
    arrays = [
        None if x is None else np.ascontiguousarray(np.broadcast_to(x, shape)).reshape(-1)
        for x in case.inputs
    ]
    try:
        found = compiled(op, arrays, node.attrs, node.outputs[0].dtype, "host")
    except CompileError as error:
        assert "are not supported on the CPU" in str(error)  # types narrower than a byte, float8
        return
    compare(found.reshape(shape), expected, case.tolerance)


def special_operands(op):
    """Every pair of special numbers, in the types of the op's first sample."""
    x, y = (grid.ravel() for grid in np.meshgrid(SPECIAL, SPECIAL))
    whole = np.nan_to_num(y, nan=0, posinf=3, neginf=-3).clip(-100, 100)
    (first, *_) = op.samples()
    choices = zip(first.inputs, (x, y, x[::-1]), strict=False)
    return first, [
        None if given is None else (c if given.dtype.kind == "f" else whole).astype(given.dtype)
        for given, c in choices
    ]


@pytest.mark.parametrize("target", WIDTHS)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_special_numbers_agree_with_the_reference(target, op):
    first, arrays = special_operands(op)
    with np.errstate(all="ignore"):
        node, expected = interpreted(op, arrays, first.attrs)
        found = compiled(op, arrays, node.attrs, node.outputs[0].dtype, target)
    if expected.dtype.kind == "f":
        np.testing.assert_allclose(found, expected, 3e-6, 1e-7)
    else:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", ["i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64"])
def test_integer_division_never_traps(name):
    kind = dtype(name)
    edge = np.array([kind.min, kind.max, 0, 1, -1 if kind.is_signed else 7, 5], kind.numpy)
    x, y = (grid.ravel() for grid in np.meshgrid(edge, edge))
    ops = all_ops()
    for op, attrs in (("div", {}), ("mod", {"fmod": False}), ("mod", {"fmod": True})):
        found = compiled(ops[op], [x, y], attrs, kind, "host")
        wide = x.astype(object), y.astype(object)
        for a, b, result in zip(*wide, found.tolist(), strict=True):
            if b == 0:
                assert result == 0
                continue
            quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
            rest = a - quotient * b
            expected = quotient if op == "div" else rest if attrs["fmod"] else a % b
            assert result == int(np.array(expected).astype(kind.numpy)) or expected == kind.max + 1


def test_integer_powers_and_shifts():
    x = np.array([2, 3, -2, 1, -1, 0, 7, 2], np.int32)
    y = np.array([10, 4, 3, -5, -5, 0, 11, -1], np.int32)
    power = compiled(all_ops()["pow"], [x, y], {}, i32, "host")
    assert power.tolist() == [1024, 81, -8, 1, -1, 1, 7**11 - 2**32 if 7**11 >= 2**31 else 7**11, 0]
    by = np.array([0, 1, 31, 32, 100, 5, 2, 3], np.uint32)
    base = np.array([1, 2, 3, 4, 5, 0xFFFFFFFF, 7, 8], np.uint32)
    wide = [(int(a) << int(b)) & 0xFFFFFFFF for a, b in zip(base, by, strict=True)]
    left = compiled(all_ops()["shift_left"], [base, by], {}, dtype("u32"), "host")
    assert left.tolist() == wide
    right = compiled(all_ops()["shift_right"], [base, by], {}, dtype("u32"), "host")
    assert right.tolist() == [int(a) >> int(b) for a, b in zip(base, by, strict=True)]


@pytest.mark.parametrize(
    "to", ["bool", "i8", "u8", "i16", "i32", "u32", "i64", "u64", "f16", "bf16", "f64"]
)
@pytest.mark.parametrize("source", ["bool", "i8", "u8", "i32", "i64", "f16", "f32", "f64"])
def test_cast_equals_its_reference(source, to):
    values = np.array([0, 1, -1, 2.5, -2.5, 127, 128, 300, -129, 7e4, 3e9, -3e9, 1e19, -1e19])
    if dtype(source).is_float:
        values = np.concatenate([values, [np.nan, np.inf, -np.inf, 2.0**31, -(2.0**31) - 0.5]])
    elif source != "bool":
        values = values.clip(float(dtype(source).min), float(dtype(source).max) / 2)
    with np.errstate(all="ignore"):
        x = values.astype(dtype(source).numpy)
        node, expected = interpreted(all_ops()["cast"], [x], {"to": to})
    found = compiled(all_ops()["cast"], [x], node.attrs, dtype(to), "host")
    if dtype(to).is_float:
        found, expected = found.astype("f8"), expected.astype("f8")
    np.testing.assert_array_equal(found, expected)


def test_llvm_scalars_implement_the_whole_protocol():
    missing = [name for name in vars(Scalars) if name[0] != "_" and not hasattr(LlvmScalars, name)]
    assert missing == []


def test_expressions_come_from_graphs():
    b = Builder("region")
    x, y = b.input("x", "f32[4]"), b.input("y", "f32[4]")
    graph = b.build(b.where(b.gt(x, y), b.mul(x, 2.0), b.constant(np.float32(-1.0))), b.lt(x, 0.5))
    expression = Expression.of(graph)
    assert expression.results == (f32, bool_) and expression.widest_bits == 32
    x, y = draw(64), draw(64, seed=1)

    def body(f, *values):
        first, second = expression.emit(f, values, 4)
        return f.select(second, first, f.neg(first))

    expected = np.where(x > y, x * 2, -1)
    found = lanewise("host", body, x, y)
    np.testing.assert_array_equal(found, np.where(x < 0.5, expected, -expected))


def test_an_expression_holds_only_scalar_constants():
    b = Builder("region")
    x = b.input("x", "f32[2]")
    with pytest.raises(CompileError, match="only constant scalars"):
        Expression.of(b.build(b.add(x, np.ones(2, np.float32))))
