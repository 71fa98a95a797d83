"""Quantized models with invalid parameters, or at the limits of i32: correct or refused."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import bitwright as bw
from bitwright.errors import BitwrightError

RNG = np.random.default_rng(0)
ELEMENTS = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.uint8): TensorProto.UINT8}


def model(nodes, inputs, constants, outputs=("y",), opset=21):
    """A model of these nodes; `inputs` are arrays of the fed types and ranks, by name."""
    given = [
        helper.make_tensor_value_info(name, ELEMENTS[x.dtype], x.shape)
        for name, x in inputs.items()
    ]
    held = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    results = [helper.make_empty_tensor_value_info(name) for name in outputs]
    graph = helper.make_graph(nodes, "bad", given, results, held)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def node(op, inputs, output="y", **attrs):
    domain = "com.microsoft" if op in ("QLinearAdd", "QGemm") else ""
    return helper.make_node(op, inputs.split(), [output], domain=domain, **attrs)


def real(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def qvalues(*shape):
    return RNG.integers(0, 256, shape).astype(np.uint8)


def signed(*shape):
    return RNG.integers(-128, 128, shape).astype(np.int8)


@pytest.mark.parametrize("scale", [0.0, -0.5, np.nan, np.inf])
@pytest.mark.parametrize("op", ["QuantizeLinear", "QLinearMatMul", "QLinearConv"])
def test_an_invalid_scale_is_refused(op, scale):
    x, w = (
        (real(3, 4), signed(4, 5))
        if op != "QLinearConv"
        else (real(1, 4, 5, 5), signed(2, 4, 3, 3))
    )
    constants = {"s": np.float32(0.1), "z": np.uint8(3), "wz": np.int8(0)}
    constants["bad"] = np.float32(scale)
    if op == "QuantizeLinear":
        nodes = [node(op, "x bad z")]
    else:
        constants["w"] = w
        nodes = [node("QuantizeLinear", "x s z", "q"), node(op, "q s z w s wz bad z")]
    with pytest.raises(BitwrightError, match=r"is not valid.*") as failure:
        bw.load(model(nodes, {"x": x}, constants))
    message = str(failure.value)
    assert "'bad'" in message and "positive finite numbers" in message and op in message


@pytest.mark.parametrize("scale", [np.nan, -np.inf])
def test_a_scale_that_is_not_finite_is_refused(scale):
    scales = np.array([0.1, scale, 0.2], np.float32)
    made = model([node("DequantizeLinear", "x s", axis=1)], {"x": qvalues(2, 3)}, {"s": scales})
    with pytest.raises(BitwrightError, match="finite numbers") as failure:
        bw.load(made)
    assert "at 1" in str(failure.value)


def test_channels_with_a_scale_of_zero_are_zeros():
    """Some tools write them for channels whose weights are all zero."""
    constants = {
        "w": signed(16, 3),
        "s": np.array([0.1, 0, 0.2], np.float32),
        "xs": np.float32(0.05),
    }
    nodes = [
        node("QuantizeLinear", "x xs", "q"),
        node("DequantizeLinear", "q xs", "xd"),
        node("DequantizeLinear", "w s", "wd", axis=1),
        node("MatMul", "xd wd"),
    ]
    x = np.abs(real(5, 16))
    y = bw.compile(bw.load(model(nodes, {"x": x}, constants))).run({"x": x})["y"]
    steps = np.clip(np.rint(x / np.float32(0.05)), 0, 255) * 0.05
    exact = steps @ (constants["w"].astype(np.float64) * constants["s"])
    assert not y[:, 1].any()
    np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-5)


def parameters(scales=(), zeros=()):
    return {"s": np.full(scales, 0.1, np.float32), "z": np.zeros(zeros, np.uint8)}


SIGNED_ZERO = {"wz": np.int8(-3)}
INT8_SCHEMES = node("QuantizeLinear", "x s z", "q")


@pytest.mark.parametrize(
    "nodes, constants",
    [
        ([node("QuantizeLinear", "x s z", axis=1)], parameters(3, 3)),
        ([node("QuantizeLinear", "x s z", axis=7)], parameters(4, 4)),
        ([node("QuantizeLinear", "x s z", axis=1)], parameters(4, 3)),
        ([node("QuantizeLinear", "x s z", axis=1, block_size=3)], parameters((3, 3), (3, 3))),
        ([INT8_SCHEMES, node("DequantizeLinear", "q s wz")], parameters() | SIGNED_ZERO),
        ([INT8_SCHEMES, node("QLinearAdd", "q s wz q s z s z")], parameters() | SIGNED_ZERO),
    ],
    ids=["count", "axis", "zero count", "blocks", "zero type", "zero type of an op"],
)
def test_parameters_that_do_not_fit_are_refused(nodes, constants):
    with pytest.raises(BitwrightError) as failure:
        bw.load(model(nodes, {"x": real(3, 4)}, constants))
    assert nodes[-1].op_type in str(failure.value)


@pytest.mark.parametrize("form", ["qdq", "integer"])
def test_sums_beyond_32_bits_are_right(form):
    """70,000 terms of 255 * 127 overflow i32: computed in float, or wrapped as in ONNX."""
    terms = 70_000
    x, w = np.full((2, terms), 255, np.uint8), np.full((terms, 3), 127, np.int8)
    constants = {"w": w, "s": np.float32(0.5), "ws": np.float32(0.25), "z": np.uint8(0)}
    if form == "qdq":
        nodes = [
            node("DequantizeLinear", "x s", "xd"),
            node("DequantizeLinear", "w ws", "wd"),
            node("MatMul", "xd wd"),
        ]
    else:
        nodes = [node("MatMulInteger", "x w z")]
    graph = bw.load(model(nodes, {"x": x}, constants))
    y = bw.compile(graph).run({"x": x})["y"]
    exact = x.astype(np.int64) @ w.astype(np.int64)
    if form == "qdq":
        np.testing.assert_allclose(y, exact * 0.125, rtol=1e-5)
    else:
        np.testing.assert_array_equal(y, exact.astype(np.int32))


def test_zero_points_of_every_kind_meet_in_one_product():
    """One for each row, one for each column, of two types."""
    x, w = qvalues(7, 33), signed(33, 5)
    constants = {"w": w, "xz": qvalues(7), "wz": signed(5)}
    made = model([node("MatMulInteger", "x w xz wz")], {"x": x}, constants)
    y = bw.compile(bw.load(made)).run({"x": x})["y"]
    centred = x.astype(np.int64) - constants["xz"][:, None].astype(np.int64)
    np.testing.assert_array_equal(y, centred @ (w.astype(np.int64) - constants["wz"]))


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 0)])
def test_empty_tensors_give_empty_answers_or_zeros(shape):
    x, w = qvalues(*shape), signed(shape[1], 5)
    constants = {
        "w": w, "s": np.float32(0.1), "z": np.uint8(9), "wz": np.int8(0), "ys": np.float32(0.3)
    }  # fmt: skip
    made = model([node("QLinearMatMul", "x s z w s wz ys z")], {"x": x}, constants)
    y = bw.compile(bw.load(made)).run({"x": x})["y"]
    assert y.shape == (shape[0], 5) and (y == 9).all()


@pytest.mark.parametrize("name", ["w", "s"])
def test_quantized_values_and_scales_that_are_fed_work_too(name):
    """They are inputs, so no constant is known at compile time."""
    inputs = {"x": qvalues(4, 8), "w": qvalues(8, 3), "s": np.array(0.25, np.float32)}
    held = {key: value for key, value in inputs.items() if key not in ("x", name)}
    nodes = [
        node("DequantizeLinear", "x s", "xd"),
        node("DequantizeLinear", "w s", "wd"),
        node("MatMul", "xd wd"),
    ]
    given = {key: value for key, value in inputs.items() if key in ("x", name)}
    y = bw.compile(bw.load(model(nodes, given, held))).run(given)["y"]
    exact = inputs["x"].astype(np.int64) @ inputs["w"].astype(np.int64) * 0.0625
    np.testing.assert_allclose(y, exact, rtol=1e-5)
