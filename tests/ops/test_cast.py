"""Casts between every two element types, against ONNX's evaluator and ONNX's tables."""

import warnings

import numpy as np
import pytest
from onnx import TensorProto, defs, helper
from onnx.reference import ReferenceEvaluator

from bitwright.errors import GraphError, RunError
from bitwright.ir.dtype import DTYPES, FLOATS, dtype
from bitwright.ir.types import TensorType
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.ops.math.cast import cast as reference

INF, NAN = np.inf, np.nan
NUMBERS = [t for t in DTYPES.values() if t.name != "string"]
FLOAT8 = ["f8e4m3fn", "f8e4m3fnuz", "f8e5m2", "f8e5m2fnuz"]


def cast(x, to, **attrs):
    """The result by the interpreter."""
    x = np.asarray(x)
    b = Builder()
    y = b.cast(b.input("x", TensorType(dtype(x.dtype), x.shape)), to=to, **attrs)
    found = run(b.build(y=y), {"x": x})["y"]
    assert dtype(found.dtype) == dtype(to) and found.shape == x.shape
    return found


def evaluate(x, to, saturate=True, round_mode="up"):
    """The result by ONNX's evaluator."""
    source, target = _proto_type(dtype(x.dtype)), _proto_type(dtype(to))
    node = helper.make_node(
        "Cast", ["x"], ["y"], to=target, saturate=int(saturate), round_mode=round_mode
    )
    graph = helper.make_graph(
        [node],
        "cast",
        [helper.make_tensor_value_info("x", source, None)],
        [helper.make_tensor_value_info("y", target, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ReferenceEvaluator(model).run(None, {"x": x})[0]


def _proto_type(element):
    return (
        TensorProto.STRING
        if element.name == "string"
        else helper.np_dtype_to_tensor_dtype(element.numpy)
    )


def values_of(element):
    """Many values of a type: all of a small float type, extreme and other ones of wide types."""
    if element.name == "bool":
        return np.array([True, False])
    if element.is_integer:
        small = [0, 1, 2, 3, 7, 8, 15, 100, 127, 128, 200, 255, 300, 2**15, 2**31, 2**40 + 5]
        kept = {n for v in small for n in (v, -v - 1) if element.min <= n <= element.max}
        kept |= {int(element.min), int(element.max)}
        return np.array(sorted(kept), object).astype(_carrier(element)).astype(element.numpy)
    if element.bits <= 8:
        return np.arange(2**element.bits).astype(np.uint8).view(element.numpy)
    spread = np.random.default_rng(0).normal(0, 1, 60) * np.geomspace(1e-6, 1e6, 60)
    edges = [
        0.0,
        -0.0,
        0.5,
        1.5,
        2.5,
        447,
        449,
        464,
        480,
        57344,
        61440,
        65520,
        1e20,
        INF,
        -INF,
        NAN,
    ]
    with np.errstate(over="ignore"):
        return np.concatenate([spread, edges]).astype(element.numpy)


def _carrier(element):
    return np.uint64 if element.name == "u64" else np.int8 if element.bits < 8 else np.int64


def defined(x, to):
    """Where ONNX says what a cast gives: floats that the integer type holds, and more for e8m0."""
    number = x.real if dtype(x.dtype).is_complex else x
    if to.name == "f8e8m0":
        number = number.astype(np.float64)
        return (number >= 2.0**-126) & (number < 2.0**127)
    if not to.is_integer or not (dtype(x.dtype).is_float or dtype(x.dtype).is_complex):
        return np.ones(x.shape, bool)
    whole = np.trunc(number.astype(np.float64))
    return (whole >= float(to.min)) & (whole <= np.nextafter(float(to.max), 0) + (to.bits < 54))


@pytest.mark.parametrize("to", NUMBERS, ids=str)
@pytest.mark.parametrize("source", NUMBERS, ids=str)
def test_agrees_with_onnx(source, to):
    if to.name == "f8e8m0" and defs.onnx_opset_version() < 27:
        pytest.skip("onnx rounded to scales in another way before 1.22")
    x = values_of(source)
    x = x[defined(x, to)]
    for saturate in (True, False) if to.name in FLOAT8 else (True,):
        with np.errstate(over="ignore"):
            found = reference(x, to, saturate)
        try:
            expected = evaluate(x, to, saturate)
        except TypeError:
            # numpy lacks a direct conversion between these two; both fit f32
            expected = evaluate(x.astype(np.float32), to, saturate)
        assert found.dtype == expected.dtype
        if to.is_float or to.is_complex:
            nan = np.isnan(found) & np.isnan(expected)
            found, expected = found[~nan], expected[~nan]
        assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("source", ["f32", "f16", "i32", "u8", "bool", "f64"])
def test_text_agrees_with_onnx(source):
    x = values_of(dtype(source))
    assert cast(x, "string").tolist() == evaluate(x, "string").astype(object).tolist()


@pytest.mark.parametrize(
    "to, largest, saturated, plain",
    [
        ("f8e4m3fn", 448.0, [448, -448], [NAN, NAN]),
        ("f8e4m3fnuz", 240.0, [240, -240], [NAN, NAN]),
        ("f8e5m2", 57344.0, [57344, -57344], [INF, -INF]),
        ("f8e5m2fnuz", 57344.0, [57344, -57344], [NAN, NAN]),
    ],
)
@pytest.mark.parametrize("source", ["f32", "f16", "bf16", "f64"])
def test_float8_out_of_range(source, to, largest, saturated, plain):
    x = np.array([INF, -INF]).astype(dtype(source).numpy)
    np.testing.assert_array_equal(cast(x, to).astype(float), saturated)
    np.testing.assert_array_equal(cast(x, to, saturate=False).astype(float), plain)
    huge = np.array([65000.0, -65000.0]).astype(dtype(source).numpy)
    np.testing.assert_array_equal(cast(huge, to).astype(float), saturated)
    np.testing.assert_array_equal(cast(huge, to, saturate=False).astype(float), plain)
    edge = np.array([largest, NAN, 0.0, -0.0]).astype(dtype(source).numpy)
    found = cast(edge, to).astype(float)
    np.testing.assert_array_equal(found, [largest, NAN, 0, 0])
    assert np.signbit(found[3]) == (not to.endswith("uz"))


MIN, MAX = 2.0**-127, 2.0**127


@pytest.mark.parametrize("source", ["f32", "f64", "bf16"])
@pytest.mark.parametrize(
    "saturate, round_mode, expected",
    [
        (True, "up", [MIN, NAN, MAX, MAX, 1, 2, 2, 2, 4, 0.125]),
        (True, "down", [MIN, NAN, MAX, MAX, 1, 1, 1, 1, 4, 0.125]),
        (True, "nearest", [MIN, NAN, MAX, MAX, 1, 1, 2, 2, 4, 0.125]),
        (False, "up", [NAN, NAN, NAN, NAN, 1, 2, 2, 2, 4, 0.125]),
        (False, "nearest", [NAN, NAN, NAN, NAN, 1, 1, 2, 2, 4, 0.125]),
    ],
)
def test_e8m0(source, saturate, round_mode, expected):
    x = np.array([0, NAN, INF, 3e38, 1, 1.25, 1.5, 1.75, 4, 0.125]).astype(dtype(source).numpy)
    found = cast(x, "f8e8m0", saturate=saturate, round_mode=round_mode)
    np.testing.assert_array_equal(found.astype(np.float64), expected)


def test_e8m0_below_the_normal_numbers():
    x = np.array([2.0**-127, 2.0**-128, 1.5 * 2.0**-127], np.float32)
    found = cast(x, "f8e8m0").astype(np.float64)
    np.testing.assert_array_equal(found, [MIN, MIN, 2 * MIN])
    found = cast(x, "f8e8m0", saturate=False).astype(np.float64)
    np.testing.assert_array_equal(found, [MIN, NAN, 2 * MIN])


def test_float4_saturates_and_rounds_to_even():
    x = np.array([0.25, 0.75, 2.5, 3.5, 5, 9, -9, INF, -INF], np.float32)
    expected = [0, 1, 2, 4, 4, 6, -6, 6, -6]
    np.testing.assert_array_equal(cast(x, "f4e2m1").astype(float), expected)


def test_integers_keep_their_low_bits():
    assert cast(np.array([200], np.int16), "i8").tolist() == [-56]
    assert cast(np.array([-1, 2**40 + 7]), "u32").tolist() == [2**32 - 1, 7]
    x = np.array([-9, 9, 17, 300])
    assert cast(x, "i4").astype(int).tolist() == [7, -7, 1, -4]
    assert cast(x, "u4").astype(int).tolist() == [7, 9, 1, 12]
    assert cast(x, "i2").astype(int).tolist() == [-1, 1, 1, 0]
    assert cast(x, "u2").astype(int).tolist() == [3, 1, 1, 0]
    assert cast(cast(x, "i4"), "u4").astype(int).tolist() == [7, 9, 1, 12]
    assert cast(cast(x, "u4"), "i2").astype(int).tolist() == [-1, 1, 1, 0]


@pytest.mark.parametrize("copies", [1, 100])
def test_floats_outside_an_integer_type_do_not_depend_on_the_length(copies):
    x = np.tile(np.array([-1.5, 300.0, -3e9, 1e10, 1e20, -1e20, NAN, INF, -INF]), copies)
    expected = {
        "u8": [255, 44, 0, 0, 0, 0, 0, 0, 0],
        "i32": [-1, 300, *[-(2**31)] * 7],
        "u32": [2**32 - 1, 300, 2**32 - 3 * 10**9 % 2**32, 10**10 % 2**32, 0, 0, 0, 0, 0],
        "i64": [-1, 300, -3 * 10**9, 10**10, *[-(2**63)] * 5],
        "u64": [2**64 - 1, 300, 2**64 - 3 * 10**9, 10**10, 0, 2**63, 2**63, 0, 2**63],
    }
    for to, values in expected.items():
        assert cast(x, to).tolist() == values * copies


def test_the_upper_half_of_u64():
    assert cast(np.array([2.0**63, 1.5 * 2.0**63]), "u64").tolist() == [2**63, 3 * 2**62]


@pytest.mark.parametrize("source", FLOATS, ids=str)
def test_bool(source):
    if source.name == "f8e8m0":
        assert cast(np.array([2.0]).astype(source.numpy), "bool").tolist() == [True]
        return
    x = np.array([0.0, -0.0, 0.5, -1.0]).astype(source.numpy)
    assert cast(x, "bool").tolist() == [False, False, True, True]
    back = cast(np.array([True, False]), source)
    np.testing.assert_array_equal(back.astype(float), [1, 0])


def test_nan_is_true():
    assert cast(np.array([NAN, INF]), "bool").tolist() == [True, True]


def strings(*items):
    return np.array(items, object)


def test_text_to_floats():
    x = strings("3.14", "1e-5", "1E8", "+INF", "inf", "-Inf", "NaN", " 7 ", b"2.5")
    expected = np.array([3.14, 1e-5, 1e8, INF, INF, -INF, NAN, 7, 2.5], np.float32)
    np.testing.assert_array_equal(cast(x, "f32"), expected)
    np.testing.assert_array_equal(cast(strings("1000", "INF"), "f8e4m3fn").astype(float), 448)
    np.testing.assert_array_equal(cast(strings("1+2j"), "c64"), [1 + 2j])
    np.testing.assert_array_equal(cast(np.array(["1.5"]), "f64"), [1.5])


def test_text_to_integers():
    assert cast(strings("100", "-7", "100.5", "1e3"), "i32").tolist() == [100, -7, 100, 1000]
    assert cast(strings(str(2**64 - 1)), "u64").tolist() == [2**64 - 1]
    assert cast(strings("300", "-1"), "u8").tolist() == [44, 255]
    assert cast(strings("-3"), "i4").astype(int).tolist() == [-3]


def test_text_to_bool():
    x = strings("0", "1", "0.0", "2.5", "true", "False")
    assert cast(x, "bool").tolist() == [False, True, False, True, True, False]


def test_numbers_survive_text():
    for source in ("f32", "f64", "i64", "u64", "bool", "i4"):
        x = values_of(dtype(source))
        np.testing.assert_array_equal(cast(cast(x, "string"), source), x)


def test_text_stays_text():
    assert cast(strings("a", ""), "string").tolist() == ["a", ""]


@pytest.mark.parametrize("to", ["f32", "i64", "bool", "u4"])
def test_text_that_is_no_number_is_named(to):
    with pytest.raises(RunError, match="'Hello World!'"):
        cast(strings("1", "Hello World!"), to)


def test_infinite_text_is_no_integer():
    with pytest.raises(RunError, match="'INF'"):
        cast(strings("INF"), "i64")


def test_empty_and_scalar():
    assert cast(np.zeros((0, 3), np.float32), "f8e8m0").shape == (0, 3)
    assert cast(np.zeros((2, 0)), "string").shape == (2, 0)
    for to in DTYPES.values():
        assert cast(np.array(1.0), to).shape == ()


def test_unknown_round_mode_is_refused():
    b = Builder()
    with pytest.raises(GraphError, match="up or down or nearest"):
        b.cast(b.input("x", "f32[2]"), to="f8e8m0", round_mode="sideways")
