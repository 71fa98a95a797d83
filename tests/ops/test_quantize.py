"""Quantization, to the bit against ONNX's evaluator and, in f32, ONNX Runtime; and its bounds."""

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import helper
from onnx.reference import ReferenceEvaluator
from single_op import evaluate, infer

from bitwright.errors import InferenceError
from bitwright.ir import dtype

RNG = np.random.default_rng(0)
INTEGERS = ["i8", "u8", "i16", "u16", "i4", "u4", "i2", "u2"]
FLOATS = ["f8e4m3fn", "f8e4m3fnuz", "f8e5m2", "f8e5m2fnuz", "f4e2m1"]
SHAPE = (3, 5, 7)
# scale shape, then our attributes and ONNX's
GRANULARITY = {
    "tensor": ((), {}, {}),
    "axis": ((5,), {"axis": 1}, {"axis": 1}),
    "last axis": ((7,), {"axis": -1}, {"axis": -1}),
    "block": ((3, 2, 7), {"axis": 1, "block": 3}, {"axis": 1, "block_size": 3}),
}


def model(op, arrays, results, **attrs):
    names = [f"x{i}" for i, x in enumerate(arrays) if x is not None]
    kinds = [helper.np_dtype_to_tensor_dtype(x.dtype) for x in arrays if x is not None]
    infos = [
        helper.make_tensor_value_info(n, kind, None) for n, kind in zip(names, kinds, strict=True)
    ]
    outputs = [
        helper.make_tensor_value_info(f"y{i}", helper.np_dtype_to_tensor_dtype(np.dtype(r)), None)
        for i, r in enumerate(results)
    ]
    given = [f"x{i}" if x is not None else "" for i, x in enumerate(arrays)]
    node = helper.make_node(op, given, [o.name for o in outputs], **attrs)
    graph = helper.make_graph([node], "g", infos, outputs)
    found = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    return found, {f"x{i}": x for i, x in enumerate(arrays) if x is not None}


def by_evaluator(op, *arrays, results, **attrs):
    """The results by ONNX's evaluator."""
    proto, feeds = model(op, arrays, results, **attrs)
    return ReferenceEvaluator(proto).run(None, feeds)


def by_runtime(op, *arrays, results, **attrs):
    """The results by ONNX Runtime."""
    proto, feeds = model(op, arrays, results, **attrs)
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, feeds)


def same_bits(found, expected):
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert found.tobytes() == np.ascontiguousarray(expected).tobytes()


def values(seed, element=np.float32):
    """Ordinary numbers, halves that must go to even, and numbers far out of range."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=SHAPE) * 10 ** rng.uniform(-1, 3)
    halves = rng.integers(-300, 300, SHAPE) / 2
    return np.where(rng.random(SHAPE) < 0.3, halves, x).astype(element)


@pytest.mark.parametrize("granularity", GRANULARITY)
@pytest.mark.parametrize("to", INTEGERS + FLOATS)
@pytest.mark.parametrize("element", [np.float32, np.float16])
def test_quantize_equals_onnx_to_the_bit(to, granularity, element):
    shape, ours, theirs = GRANULARITY[granularity]
    code = dtype(to)
    for seed in range(5):
        x, scale = values(seed, element), RNG.uniform(0.1, 2, shape).astype(element)
        if seed % 2:
            scale = np.ones(shape, element)
        zero = np.zeros(shape, np.int64)
        if code.is_integer:
            zero = RNG.integers(code.min, code.max + 1, shape)
        zero = zero.astype(np.int16 if to != "u16" else np.uint16).astype(code.numpy)
        (expected,) = by_evaluator("QuantizeLinear", x, scale, zero, results=[code.numpy], **theirs)
        found = evaluate("quantize", x, scale, zero, to=to, **ours)
        same_bits(found, expected)
        (expected,) = by_evaluator(
            "DequantizeLinear", found, scale, zero, results=[element], **theirs
        )
        same_bits(evaluate("dequantize", found, scale, zero, **ours), expected)


@pytest.mark.parametrize("granularity", GRANULARITY)
@pytest.mark.parametrize("to", ["i8", "u8", "i16", "u16"])
def test_f32_equals_onnxruntime_to_the_bit(to, granularity):
    shape, ours, theirs = GRANULARITY[granularity]
    code = dtype(to)
    for seed in range(5):
        x, scale = values(seed), RNG.uniform(0.01, 2, shape).astype(np.float32)
        zero = RNG.integers(code.min, code.max + 1, shape).astype(code.numpy)
        (expected,) = by_runtime("QuantizeLinear", x, scale, zero, results=[code.numpy], **theirs)
        found = evaluate("quantize", x, scale, zero, to=to, **ours)
        same_bits(found, expected)
        arrays = found, scale, zero
        (expected,) = by_runtime("DequantizeLinear", *arrays, results=[np.float32], **theirs)
        same_bits(evaluate("dequantize", *arrays, **ours), expected)


@pytest.mark.parametrize("to", INTEGERS)
def test_nothing_wraps(to):
    code = dtype(to)
    x = np.array([np.inf, 3e38, -3e38, -np.inf, np.nan], np.float32)
    zero = np.array(1, np.int8).astype(code.numpy)
    found = evaluate("quantize", x, np.float32(1e-3), zero, to=to).astype(int)
    assert found.tolist() == [code.max, code.max, code.min, code.min, code.min]


@pytest.mark.parametrize("count", [1, 16, 67])
@pytest.mark.parametrize("to", ["i8", "u8", "i16", "u16"])
def test_what_is_no_number_equals_onnxruntime(to, count):
    code = dtype(to)
    half, zero = np.array(0.5, np.float32), np.array(7, code.numpy)
    for bad in (np.nan, np.inf, -np.inf):
        x = np.full(count, bad, np.float32)
        (expected,) = by_runtime("QuantizeLinear", x, half, zero, results=[code.numpy])
        same_bits(evaluate("quantize", x, half, zero, to=to), expected)


def test_float8_saturates_or_not():
    x = np.array([1e6, -1e6, np.inf], np.float32)
    one = np.float32(1)
    assert evaluate("quantize", x, one, to="f8e4m3fn").astype(float).tolist() == [448, -448, 448]
    loose = evaluate("quantize", x, one, to="f8e5m2", saturate=False).astype(float)
    assert loose.tolist() == [np.inf, -np.inf, np.inf]


def test_precision_of_the_division():
    """2049 is no f16 number, and the scale's type is what divides unless told otherwise."""
    x, scale = np.float32(2049), np.float16(1)
    assert evaluate("quantize", x, scale, to="i16") == 2048
    assert evaluate("quantize", x, scale, to="i16", precision="f32") == 2049


@pytest.mark.parametrize("block", [1, 3, 4, 7, 9])
def test_error_is_at_most_half_a_step(block):
    x = RNG.uniform(-1, 1, (4, 7)).astype(np.float32)
    parts = -(-7 // block)
    scale = RNG.uniform(1 / 127, 0.1, (4, parts)).astype(np.float32)
    qvalues = evaluate("quantize", x, scale, to="i8", axis=1, block=block)
    back = evaluate("dequantize", qvalues, scale, axis=1, block=block)
    steps = np.repeat(scale, block, axis=1)[:, :7]
    assert (np.abs(back - x) <= steps / 2 * (1 + 1e-6)).all()


def test_dequantize_to_another_type():
    qvalues, scale = np.arange(-8, 8, dtype=np.int8), np.array(0.1, np.float16)
    assert dtype(evaluate("dequantize", qvalues, scale).dtype).name == "f16"
    expected = (qvalues * np.float32(scale)).astype(np.float32)
    same_bits(evaluate("dequantize", qvalues, scale, to="f32"), expected)
    power = scale.astype(dtype("f8e8m0").numpy)
    assert dtype(evaluate("dequantize", qvalues, power).dtype).name == "f32"


def test_int32_dequantizes_exactly_once_rounded():
    qvalues = np.array([2**31 - 1, -(2**31), 16777217], np.int32)
    same_bits(evaluate("dequantize", qvalues, np.float32(1)), qvalues.astype(np.float32))


def test_dynamic_quantize_equals_onnx_to_the_bit():
    for seed in range(20):
        x = values(seed) + np.float32(seed - 10)
        kinds = [np.uint8, np.float32, np.uint8]
        found = evaluate("dynamic_quantize", x)
        for run in (by_evaluator, by_runtime):
            for one, other in zip(
                found, run("DynamicQuantizeLinear", x, results=kinds), strict=True
            ):
                same_bits(one, np.asarray(other))


def test_dynamic_quantize_of_zeros_has_scale_one():
    qvalues, scale, zero = evaluate("dynamic_quantize", np.zeros((2, 3), np.float32))
    assert scale == 1 and zero == 0 and not qvalues.any()


def test_per_token_is_the_rows_one_by_one():
    x = values(0)[0]
    qvalues, scale, zero = evaluate("dynamic_quantize", x, per_token=True)
    assert scale.shape == zero.shape == (5, 1)
    for i, row in enumerate(x):
        for one, other in zip(
            (qvalues[i], scale[i, 0], zero[i, 0]), evaluate("dynamic_quantize", row), strict=True
        ):
            assert np.array_equal(one, other)
    back = evaluate("dequantize", qvalues, scale, zero, axis=-1, block=x.shape[-1])
    assert (np.abs(back - x) <= scale / 2 * (1 + 1e-5)).all()


@pytest.mark.parametrize("low, high", [(-128, 127), (0, 255), (-8, 7)])
def test_fake_quantize_agrees_with_torch(low, high):
    x = values(3)
    scale, zero = float(np.float32(0.37)), low + 5
    expected = torch.fake_quantize_per_tensor_affine(torch.tensor(x), scale, zero, low, high)
    found = evaluate("fake_quantize", x, np.float32(scale), np.int32(zero), low=low, high=high)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6, atol=1e-6)
    scales, zeros = torch.rand(5) + 0.1, torch.randint(low, high, (5,), dtype=torch.int32)
    expected = torch.fake_quantize_per_channel_affine(torch.tensor(x), scales, zeros, 1, low, high)
    arrays = x, scales.numpy(), zeros.numpy()
    found = evaluate("fake_quantize", *arrays, axis=1, low=low, high=high)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-5)


def test_fake_quantize_is_dequantize_of_quantize():
    x, scale = values(4), RNG.uniform(0.5, 2, 5).astype(np.float32)
    qvalues = evaluate("quantize", x, scale, to="i8", axis=1)
    found = evaluate("fake_quantize", x, scale, axis=1, low=-128, high=127)
    same_bits(found, evaluate("dequantize", qvalues, scale, axis=1))


def test_quantized_sizes_stay_symbolic():
    attrs = {"axis": 1, "block": 32, "to": "i4"}
    found = infer("quantize", "f32[rows, size]", "f32[rows, (size+31)//32]", **attrs)
    assert str(found) == "i4[rows, size]"
    found = infer("dynamic_quantize", "f32[rows, size]", per_token=True)
    assert list(map(str, found)) == ["u8[rows, size]", "f32[rows, 1]", "u8[rows, 1]"]


@pytest.mark.parametrize(
    "types, attrs, message",
    [
        (["f32[3, 4]", "f32[4]"], {"to": "i8"}, "wrong size"),
        (["f32[3, 4]", "f32[3]"], {"to": "i8", "axis": 1}, "axis 0 of scale"),
        (["f32[3, 4]", "f32[3, 1]"], {"to": "i8", "axis": 1, "block": 3}, "axis 1 of scale"),
        (["f32[3, 4]", "f32[]"], {"to": "i8", "block": 2}, "'block' does not fit"),
        (["f32[3, 4]", "f32[4]"], {"to": "i8", "axis": 2}, "axis 2 is outside"),
        (["f32[3, 4]", "f32[]", "u8[]"], {"to": "i8"}, "zero_point"),
        (["f32[3, 4]", "f32[]"], {"to": "f32"}, "no value is quantized"),
        (["i8[3, 4]", "f32[]"], {"to": "i8"}, "x has the wrong element type"),
    ],
)
def test_quantize_faults(types, attrs, message):
    with pytest.raises(InferenceError, match=message):
        infer("quantize", *types, **attrs)
