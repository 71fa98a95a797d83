"""Elementwise ops at their edges: NaN, infinities, signed zeros, integer extremes, strings."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.nn import functional

from bitwright.errors import InferenceError
from bitwright.ir import dtype, symbol
from bitwright.ir.types import TensorType
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.ops.core.registry import get
from bitwright.ops.core.scalar import NumpyScalars
from bitwright.ops.core.symbolic import SizeEvaluator

INF, NAN = math.inf, math.nan
EDGES = [0.0, -0.0, NAN, INF, -INF, 1e-300, -1e-300, 1e-17, -1e-17, 1e-4, -1e-4]
EDGES += [0.49, 0.5, -0.5, 0.51, 0.999, 1.0, -1.0, 1.5, -1.5, 2.5, -2.5, 3.0, -3.0]
EDGES += [17.3, -17.3, 36.0, -36.0, 50.0, -50.0, 700.0, -700.0, 1e15, -1e15, 1e300, -1e300]
X = np.array(EDGES)

TORCH = {
    "neg": torch.neg,
    "abs": torch.abs,
    "relu": torch.relu,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log": torch.log,
    "log1p": torch.log1p,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "sin": torch.sin,
    "cos": torch.cos,
    "tan": torch.tan,
    "asin": torch.asin,
    "acos": torch.acos,
    "atan": torch.atan,
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "tanh": torch.tanh,
    "asinh": torch.asinh,
    "acosh": torch.acosh,
    "atanh": torch.atanh,
    "erf": torch.erf,
    "sigmoid": torch.sigmoid,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "trunc": torch.trunc,
    "softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
    "softsign": functional.softsign,
    "silu": functional.silu,
    "mish": functional.mish,
    "hard_swish": functional.hardswish,
    "elu": functional.elu,
    "celu": functional.celu,
    "leaky_relu": functional.leaky_relu,
    "gelu": functional.gelu,
    "is_nan": torch.isnan,
    "is_inf": torch.isinf,
    "is_finite": torch.isfinite,
}


def reference(op, *inputs, **attrs):
    """The result by the interpreter."""
    b = Builder()
    values = [
        None if x is None else b.input(f"in{i}", TensorType(dtype(x.dtype), x.shape))
        for i, x in enumerate(inputs)
    ]
    graph = b.build(y=b.op(op, *values, **attrs))
    return run(graph, {f"in{i}": x for i, x in enumerate(inputs) if x is not None})["y"]


def scalar(op, *inputs, **attrs):
    opdef = get(op)
    with np.errstate(all="ignore"):
        return opdef.scalar(NumpyScalars, *inputs, **opdef.call_attrs(opdef.normal_attrs(attrs)))


def same_bits(found, expected):
    """Equal with the signs of zeros, any NaN like any other."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.dtype == expected.dtype and found.shape == expected.shape
    both_nan = np.isnan(found) & np.isnan(expected)
    np.testing.assert_array_equal(found[~both_nan], expected[~both_nan])
    np.testing.assert_array_equal(np.signbit(found[~both_nan]), np.signbit(expected[~both_nan]))


@pytest.mark.parametrize("render", [reference, scalar])
@pytest.mark.parametrize("name", TORCH)
def test_agrees_with_torch_at_the_edges(name, render):
    expected = TORCH[name](torch.tensor(X)).numpy()
    np.testing.assert_allclose(render(name, X), expected, rtol=1e-9, atol=1e-300)


@pytest.mark.parametrize("render", [reference, scalar])
@pytest.mark.parametrize(
    "name", ["trunc", "floor", "ceil", "round", "sqrt", "neg", "expm1", "tanh"]
)
def test_zeros_keep_their_sign(name, render):
    expected = TORCH[name](torch.tensor([0.0, -0.0])).numpy().astype(np.float64)
    same_bits(render(name, np.array([0.0, -0.0])), expected)


@pytest.mark.parametrize("render", [reference, scalar])
def test_sign(render):
    np.testing.assert_array_equal(render("sign", X), np.sign(X))


@pytest.mark.parametrize("render", [reference, scalar])
def test_trunc_keeps_the_sign_of_what_vanishes(render):
    same_bits(render("trunc", np.array([-0.5, 0.5])), np.array([-0.0, 0.0]))


@pytest.mark.parametrize("render", [reference, scalar])
@pytest.mark.parametrize(
    "name, attrs, expected",
    [
        ("thresholded_relu", {"alpha": 2.0}, [INF, 0, 0, 0, 3]),
        ("shrink", {"lambd": 1.5, "bias": 0.5}, [INF, -INF, 0, 1.5, 2.5]),
        ("hard_sigmoid", {"alpha": 0.25}, [1, 0, NAN, 1, 1]),
        ("leaky_relu", {"alpha": 0.5}, [INF, -INF, NAN, 2, 3]),
        ("swish", {"alpha": 2.0}, [INF, NAN, NAN, 2 / (1 + math.exp(-4)), 3 / (1 + math.exp(-6))]),
        ("celu", {"alpha": 2.0}, [INF, -2, NAN, 2, 3]),
        ("selu", {"alpha": 2.0, "gamma": 3.0}, [INF, -6, NAN, 6, 9]),
        ("is_inf", {"detect_negative": False}, [True, False, False, False, False]),
        ("is_inf", {"detect_positive": False}, [False, True, False, False, False]),
        (
            "is_inf",
            {"detect_positive": False, "detect_negative": False},
            [False, False, False, False, False],
        ),
    ],
)
def test_attributes_at_the_edges(name, attrs, expected, render):
    found = render(name, np.array([INF, -INF, NAN, 2.0, 3.0]), **attrs)
    np.testing.assert_allclose(np.asarray(found, np.float64), np.array(expected, np.float64))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(approximate):
    x = np.linspace(-9, 9, 101)
    expected = functional.gelu(torch.tensor(x), approximate=approximate).numpy()
    for render in (reference, scalar):
        found = render("gelu", x, approximate=approximate)
        np.testing.assert_allclose(found, expected, atol=1e-14)


def test_small_arguments_lose_no_digits():
    x = np.array([1e-12, -1e-12, 3e-9])
    for render in (reference, scalar):
        np.testing.assert_allclose(render("expm1", x), x + x * x / 2, rtol=1e-14)
        np.testing.assert_allclose(render("log1p", x), x - x * x / 2, rtol=1e-14)
        np.testing.assert_allclose(render("elu", -np.abs(x)), np.expm1(-np.abs(x)), rtol=1e-14)
        np.testing.assert_allclose(render("softplus", np.array([-40.0])), np.exp(-40), rtol=1e-14)


def test_narrow_floats_round_once():
    x = np.array([1.0, 2.0, 3.0], ml_dtypes.bfloat16)
    expected = np.exp(np.array([1.0, 2.0, 3.0])).astype(ml_dtypes.bfloat16)
    assert reference("exp", x).tobytes() == expected.tobytes()


def test_complex_arguments():
    x = np.array([1 + 2j, -0.5j, -3 + 0j])
    for name, function in {
        "exp": np.exp,
        "sqrt": np.sqrt,
        "tanh": np.tanh,
        "neg": np.negative,
    }.items():
        np.testing.assert_allclose(reference(name, x), function(x))
    parts = np.array([1.0, INF, NAN], np.float32)
    joined = reference("complex", parts, np.array([INF, 1.0, 0.0], np.float32))
    assert joined.dtype == np.complex64
    same_bits(reference("real", joined), parts)
    same_bits(reference("imag", reference("conj", joined)), np.array([-INF, -1, -0.0], np.float32))
    np.testing.assert_array_equal(reference("squared_norm", np.array([3 + 4j])), [25.0])


INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]


@pytest.mark.parametrize("name", INTEGERS)
def test_integer_extremes_wrap(name):
    info = np.iinfo(name)
    x = np.array([info.min, info.max, 0], name)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(reference("neg", x), np.negative(x))
        np.testing.assert_array_equal(reference("abs", x), np.abs(x))
    for op, function in {"sign": np.sign, "bitwise_not": np.invert}.items():
        for render in (reference, scalar):
            np.testing.assert_array_equal(render(op, x), function(x))
    np.testing.assert_array_equal(reference("relu", x), np.maximum(x, np.zeros(1, name)))
    np.testing.assert_array_equal(reference("lt", x[:1], x[1:2]), [True])
    np.testing.assert_array_equal(reference("gt", x[1:2], x[:1]), [True])
    np.testing.assert_array_equal(reference("clip", x, x[1], x[0]), np.full(3, info.min, name))


@pytest.mark.parametrize("name", INTEGERS)
def test_shifts_by_any_distance(name):
    bits = np.iinfo(name).bits
    x = np.full(4, np.iinfo(name).max, name)
    distance = np.array([0, 1, bits - 1, bits], name)
    ones = (1 << bits) - 1
    value = int(x[0])
    for op, exact in {
        "shift_left": [(value << d) & ones for d in distance.tolist()],
        "shift_right": [value >> d for d in distance.tolist()],
    }.items():
        found = reference(op, x, distance)
        assert [int(v) & ones for v in found] == exact


def test_right_shift_keeps_the_sign():
    x = np.array([-8, -1, -128], np.int8)
    found = reference("shift_right", x, np.array([1, 7, 100], np.int8))
    np.testing.assert_array_equal(found, [-4, -1, -1])
    found = reference("shift_right", x, np.full(3, -1, np.int8))
    np.testing.assert_array_equal(found, [-1, -1, -1])
    found = reference("shift_left", x, np.full(3, -1, np.int8))
    np.testing.assert_array_equal(found, [0, 0, 0])


def test_types_below_a_byte():
    x = np.array([-8, 7, 3]).astype(ml_dtypes.int4)
    y = np.array([1, -1, 3]).astype(ml_dtypes.int4)
    assert reference("bitwise_and", x, y).astype(int).tolist() == [0, 7, 3]
    assert reference("neg", x).astype(int).tolist() == [-8, -7, -3]
    assert reference("shift_left", x, np.abs(y.astype(int)).astype(ml_dtypes.int4)).astype(
        int
    ).tolist() == [0, -2, -8]
    assert reference("eq", x, y).tolist() == [False, False, True]
    chosen = reference("where", np.array([True, False, True]), x, y)
    assert chosen.astype(int).tolist() == [-8, -1, 3]


def test_comparisons_with_nan():
    x, y = np.array([NAN, NAN, 1.0, -0.0]), np.array([NAN, 1.0, NAN, 0.0])
    expected = {
        "eq": [False, False, False, True],
        "ne": [True, True, True, False],
        "lt": [False, False, False, False],
        "le": [False, False, False, True],
        "gt": [False, False, False, False],
        "ge": [False, False, False, True],
    }
    for name, answers in expected.items():
        for render in (reference, scalar):
            assert render(name, x, y).tolist() == answers


def test_large_integers_compare_exactly():
    x, y = np.array([2**63 - 1], np.int64), np.array([2**63 - 2], np.int64)
    assert reference("gt", x, y).tolist() == [True]
    x, y = np.array([2**64 - 1], np.uint64), np.array([2**64 - 2], np.uint64)
    assert reference("eq", x, y).tolist() == [False]


def test_strings():
    x, y = np.array(["a", "b", ""], object), np.array(["a", "c", ""], object)
    assert reference("eq", x, y).tolist() == [True, False, True]
    assert reference("ne", x, y).tolist() == [False, True, False]
    condition = np.array([True, False, True])
    assert reference("where", condition, x, y).tolist() == ["a", "c", ""]


@pytest.mark.parametrize("render", [reference, scalar])
def test_clip(render):
    x = np.array([NAN, INF, -INF, 0.5])
    low, high = np.array(-1.0), np.array(1.0)
    np.testing.assert_array_equal(render("clip", x, low, high), [NAN, 1, -1, 0.5])
    np.testing.assert_array_equal(render("clip", x, None, high), [NAN, 1, -INF, 0.5])
    np.testing.assert_array_equal(render("clip", x, low, None), [NAN, INF, -1, 0.5])
    np.testing.assert_array_equal(render("clip", x, high, low), [NAN, -1, -1, -1])


@pytest.mark.parametrize("render", [reference, scalar])
def test_prelu(render):
    x, slope = np.array([-2.0, 2.0, NAN, -INF, 0.0]), np.array([0.5])
    np.testing.assert_array_equal(render("prelu", x, slope), [-1, 2, NAN, -INF, 0])
    np.testing.assert_array_equal(render("prelu", np.array([0.0]), np.array([INF])), [0.0])


@pytest.mark.parametrize("render", [reference, scalar])
def test_atan2_in_every_direction(render):
    directions = np.array([0.0, -0.0, 1.0, -1.0, 1e-300, -1e-300, 1e300, INF, -INF, NAN, 0.3])
    y, x = (a.reshape(-1) for a in np.meshgrid(directions, directions))
    found, expected = np.asarray(render("atan2", y, x)), np.arctan2(y, x)
    np.testing.assert_allclose(found, expected, rtol=1e-15)
    known = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(found[known]), np.signbit(expected[known]))


def test_where_keeps_bits():
    payload = np.array([0x7FC00123, 0xFFC00456], np.uint32).view(np.float32)
    chosen = reference("where", np.array(True), payload, np.zeros(2, np.float32))
    assert chosen.tobytes() == payload.tobytes()


@pytest.mark.parametrize(
    "op, types, words",
    [
        ("exp", ["i32[2]"], ["a floating type", "i32[2]"]),
        ("erf", ["c64[2]"], ["a real floating type", "c64[2]"]),
        ("abs", ["bool[2]"], ["a real number type", "bool[2]"]),
        ("lt", ["c64[2]", "c64[2]"], ["a real number type"]),
        ("lt", ["string[2]", "string[2]"], ["a real number type"]),
        ("eq", ["f32[2]", "f64[2]"], ["different element types"]),
        ("and", ["i8[2]", "i8[2]"], ["bool"]),
        ("bitwise_and", ["f32[2]", "f32[2]"], ["an integer type"]),
        ("where", ["i8[2]", "f32[2]", "f32[2]"], ["the condition", "bool"]),
        ("where", ["bool[2]", "f32[3]", "f32[3]"], ["do not broadcast"]),
        ("prelu", ["f32[2, 3]", "f32[4, 2, 3]"], ["slope", "f32[2, 3]"]),
        ("prelu", ["f32[2, 1]", "f32[2, 3]"], ["slope", "f32[2, 3]"]),
        ("complex", ["f16[2]", "f16[2]"], ["f32 or f64", "f16[2]"]),
        ("real", ["f32[2]"], ["a complex type"]),
        ("clip", ["f32[2]", "i32[]"], ["different element types"]),
    ],
)
def test_refusals_name_what_is_wrong(op, types, words):
    b = Builder()
    values = [b.input(f"in{i}", type_) for i, type_ in enumerate(types)]
    with pytest.raises(InferenceError) as error:
        b.op(op, *values)
    for word in [op, *words]:
        assert word in str(error.value)


def sizes(build):
    """The sizes that shape arithmetic on [batch, seq] gives."""
    b = Builder()
    x = b.input("x", "f32[batch, seq]")
    value = build(b, b.shape_of(x))
    return SizeEvaluator().sizes(value)


def test_shape_arithmetic():
    batch, seq = symbol("batch"), symbol("seq")
    minus, four = np.array([-1, -1]), np.array(4)
    assert sizes(lambda b, s: b.neg(b.neg(s))) == (batch, seq)
    assert sizes(lambda b, s: b.abs(b.neg(s))) == (batch, seq)
    assert sizes(lambda b, s: b.cast(b.cast(s, to="i32"), to="i64")) == (batch, seq)
    assert sizes(lambda b, s: b.identity(s)) == (batch, seq)
    assert sizes(lambda b, s: b.clip(s, 0)) == (batch, seq)
    assert sizes(lambda b, s: b.where(b.eq(s, minus), np.array([7, 7]), s)) == (batch, seq)
    assert sizes(lambda b, s: b.where(b.and_(b.ge(s, 0), b.lt(s, minus)), s, four)) == (4, 4)
    assert sizes(lambda b, s: b.where(b.eq(s, s), s, four)) == (batch, seq)
    assert sizes(lambda b, s: b.where(b.not_(b.ne(s, minus)), s, four)) == (4, 4)
    assert sizes(lambda b, s: b.cast(b.gt(b.add(s, 1), 0), to="i64")) == (1, 1)


def test_shape_arithmetic_leaves_the_undecidable():
    assert sizes(lambda b, s: b.where(b.eq(s, 4), s, np.array(1))) is None
    assert sizes(lambda b, s: b.where(b.lt(s, 4), s, np.array(1))) is None
    assert sizes(lambda b, s: b.abs(b.sub(s, 1))) is None
    assert sizes(lambda b, s: b.cast(b.cast(s, to="i8"), to="i64")) is None
    assert sizes(lambda b, s: b.cast(b.cast(s, to="bool"), to="i64")) is None
