"""Quantized ops of com.microsoft against ONNX Runtime.

Its quantized kernels use tables and merged scales, so a quantized value may differ by 1.
"""

import ml_dtypes
import numpy as np
import pytest
from one_node import agree, by_bitwright, compare, feeds, model

from bitwright.errors import ImportModelError, UnsupportedError
from bitwright.frontend.onnx import load

BOTH_TYPES = pytest.mark.parametrize("element", [np.uint8, np.int8], ids=["u8", "i8"])
STEP = {"steps": 1}


def draw(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def qvalues(element, *shape, seed=0):
    info = np.iinfo(element)
    generator = np.random.default_rng((seed, *shape))
    return generator.integers(info.min, info.max + 1, shape).astype(element)


def scale(*values):
    return np.array(values if len(values) > 1 else values[0], np.float32)


@BOTH_TYPES
def test_binary(element):
    zero = lambda value: np.array(value, element)
    x, y = qvalues(element, 2, 3, 4), qvalues(element, 3, 4)
    operands = [x, scale(0.03), zero(3), y, scale(0.05), zero(7), scale(0.06), zero(11)]
    compare("QLinearAdd", operands, **STEP)
    compare("QLinearMul", operands, **STEP)
    one = [x, scale(0.03), zero(0), qvalues(element, 1), scale(0.05), zero(7), scale(0.6), zero(1)]
    compare("QLinearMul", one, **STEP)


@BOTH_TYPES
@pytest.mark.parametrize(
    "op_type, attrs",
    [
        ("QLinearSigmoid", {}),
        ("QLinearLeakyRelu", {"alpha": 0.1}),
        ("QLinearSoftmax", {"axis": -1, "opset": 13}),
        ("QLinearSoftmax", {"axis": 1, "opset": 13}),
        ("QLinearSoftmax", {"axis": 1, "opset": 12}),
        ("QLinearAveragePool", {"kernel_shape": [2, 3], "strides": [2, 1], "pads": [1, 1, 0, 0]}),
        ("QLinearAveragePool", {"kernel_shape": [2, 2], "count_include_pad": 1, "pads": [1] * 4}),
        ("QLinearAveragePool", {"kernel_shape": [2, 3], "channels_last": 1}),
        ("QLinearGlobalAveragePool", {}),
        ("QLinearGlobalAveragePool", {"channels_last": 1}),
    ],
)
def test_unary(element, op_type, attrs):
    low = np.array(np.iinfo(element).min, element)
    target = (scale(1 / 256), low) if "o" in op_type[7:9] or "Soft" in op_type else None
    target = target or (scale(0.02), np.array(5, element))
    x = qvalues(element, 1, 5, 6, 7)
    compare(op_type, [x, scale(0.03), np.array(3, element), *target], **STEP, **attrs)


@BOTH_TYPES
@pytest.mark.parametrize("levels", [200.7, 253.0, 254.6, 255.0, 256.0])
def test_softmax_of_quantized_values_has_a_whole_number_of_steps(element, levels):
    """As in ONNX Runtime, even where the exact quantized value differs by 1."""
    x = qvalues(element, 3, 40, 17) // 3
    low = np.array(np.iinfo(element).min, element)
    operands = [x, scale(0.02), np.array(3, element), scale(1 / levels), low]
    compare("QLinearSoftmax", operands, opset=13, axis=-1)
    even = np.repeat(x[:, :, :1], 17, axis=2)
    for count in (4, 8, 10):
        compare("QLinearSoftmax", [even[:, :, :count], *operands[1:]], opset=13, axis=-1)


@BOTH_TYPES
def test_concat_and_where(element):
    zero = lambda value: np.array(value, element)
    first, second = qvalues(element, 2, 3), qvalues(element, 2, 5)
    parts = [first, scale(0.03), zero(3), second, scale(0.05), zero(4)]
    compare("QLinearConcat", [scale(0.05), zero(4), *parts], axis=1, **STEP)
    condition = np.array([[True, False, True], [False, False, True]])
    third = qvalues(element, 2, 3, seed=1)
    operands = [first, scale(0.03), zero(3), third, scale(0.05), zero(4), scale(0.06), zero(5)]
    compare("QLinearWhere", [condition, *operands], **STEP)


@BOTH_TYPES
@pytest.mark.parametrize("per_channel", [False, True])
def test_conv(element, per_channel):
    w = qvalues(np.int8, 4, 3, 3, 3)
    w_scale = np.abs(draw(4)) * np.float32(0.05) if per_channel else scale(0.02)
    zero = lambda value: np.array(value, element)
    rest = [w, w_scale, np.zeros(w_scale.shape, np.int8), scale(1.5), zero(9)]
    bias = qvalues(np.int16, 4).astype(np.int32)
    options = {"constants": [3, 4, 5, 8], **STEP}
    given = [scale(0.03), zero(3)]
    first = [qvalues(element, 1, 3, 6, 7), *given, *rest, bias]
    compare("QLinearConv", first, pads=[1, 1, 1, 1], **options)
    last = [qvalues(element, 1, 6, 7, 3), *given, *rest, bias]
    compare("QLinearConv", last, channels_last=1, strides=[2, 2], **options)


@BOTH_TYPES
@pytest.mark.parametrize("weight", [np.uint8, np.int8], ids=["wu8", "wi8"])
def test_products(element, weight):
    if element is np.int8 and weight is np.uint8:
        pytest.skip("ONNX Runtime has no such kernel")
    zero, w_zero = np.array(5, element), np.array(3, weight)
    x, w, bias = qvalues(element, 3, 4), qvalues(weight, 4, 6), draw(6)
    scales = scale(0.03), scale(0.05)
    compare("MatMulIntegerToFloat", [x, w, *scales, zero, w_zero, bias])
    columns = np.abs(draw(6))
    compare("MatMulIntegerToFloat", [x, w, scales[0], columns, None, np.arange(6).astype(weight)])
    compare("DynamicQuantizeMatMul", [draw(2, 3, 4), w, scales[1], w_zero, bias])
    compare("DynamicQuantizeMatMul", [draw(3, 4), w, columns])
    added = qvalues(np.int16, 6).astype(np.int32)
    match_dequantize = [scale(0.7), np.array(3, element)]
    gemm = [x, scales[0], zero, w, scales[1], w_zero]
    compare("QGemm", [*gemm, added, *match_dequantize], **STEP)
    compare("QGemm", [x.T, *gemm[1:3], w.T, *gemm[4:], None], transA=1, transB=1, alpha=0.5)
    zeros = np.zeros(6, weight)
    compare("QGemm", [*gemm[:4], columns, zeros, None, *match_dequantize], constants=[4, 5], **STEP)


def test_product_of_16_bits():
    compare("MatMulInteger16", [qvalues(np.int16, 2, 3) // 32, qvalues(np.int16, 3, 4) // 32])


@pytest.mark.parametrize("weight", [np.uint8, np.int8])
def test_attention(weight):
    x, w, bias = qvalues(np.uint8, 2, 5, 8), qvalues(weight, 8, 24), draw(24)
    zero, w_zero = np.array(5, np.uint8), np.array(3, weight)
    operands = [x, w, bias, scale(0.01), scale(0.01), None, zero, w_zero]
    compare("QAttention", operands, num_heads=2)
    operands[5] = np.array([3, 5], np.int32)
    compare("QAttention", operands, num_heads=2, unidirectional=1)
    past = draw(2, 2, 2, 3, 4)
    compare("QAttention", [*operands[:5], None, *operands[6:], past], 2, num_heads=2)


@pytest.mark.parametrize("element", [np.int8, np.uint8, np.int16, np.uint16])
def test_quantize_and_dequantize(element):
    zero = lambda *values: np.array(values if len(values) > 1 else values[0], element)
    q = qvalues(element, 3, 4)
    compare("DequantizeLinear", [q, scale(0.02), zero(3)])
    compare("DequantizeLinear", [q, scale(0.02, 0.03, 0.04), zero(3, 4, 5)], axis=0)
    compare("QuantizeLinear", [draw(3, 4), scale(0.002), zero(3)])
    compare("QuantizeLinear", [draw(3, 4), scale(0.02, 0.03, 0.04), zero(3, 4, 5)], axis=0)


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("per_gate", [False, True])
def test_lstm_has_float_inputs(directions, per_gate):
    """ONNX Runtime also quantizes the inputs; the results differ by that error."""
    w, r = qvalues(np.int8, directions, 3, 16) // 4, qvalues(np.int8, directions, 4, 16) // 4
    shape = (directions, 16) if per_gate else (directions,)
    scales = [np.abs(draw(*shape, seed=i)) * np.float32(0.01) + np.float32(0.005) for i in (1, 2)]
    zeros = np.zeros(shape, np.int8)
    parameters = [scales[0], zeros, scales[1], zeros]
    operands = [draw(5, 2, 3), w, r, draw(directions, 32), *[None] * 4, *parameters]
    direction = "bidirectional" if directions == 2 else "forward"
    options = {"constants": [1, 2, 8, 9, 10, 11], "tolerance": 0.05}
    compare("DynamicQuantizeLSTM", operands, 3, hidden_size=4, direction=direction, **options)


def test_embeddings():
    ids, segments = qvalues(np.uint8, 2, 5) % 11, qvalues(np.uint8, 2, 5, seed=1) % 3
    mask = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32)
    tables = [qvalues(np.uint8, *shape) for shape in ((11, 8), (7, 8), (3, 8), (8,), (8,))]
    scales = [scale(value) for value in (0.01, 0.02, 0.03, 0.01, 0.02)]
    zeros = [np.array(value, np.uint8) for value in (100, 120, 110, 130, 5)]
    ids, segments = ids.astype(np.int32), segments.astype(np.int32)
    operands = [ids, segments, *tables, mask, *scales, *zeros]
    compare("QEmbedLayerNormalization", operands, 2, tolerance=1e-4)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("rows, columns, block", [(5, 32, 16), (7, 100, 32)])
def test_matmul_of_few_bits(bits, rows, columns, block):
    blocks = -(-columns // block)
    w = qvalues(np.uint8, rows, blocks, block * bits // 8)
    scales = np.abs(draw(rows, blocks)) * np.float32(0.1)
    x = draw(2, 3, columns)
    attrs = {"N": rows, "K": columns, "bits": bits, "block_size": block}
    options = {"constants": [1, 2, 3, 5], "tolerance": 2e-2 if bits == 8 else 1e-4}
    compare("MatMulNBits", [x, w, scales], **attrs, **options)
    packed = qvalues(np.uint8, rows, -(-blocks * bits // 8))
    compare("MatMulNBits", [x, w, scales, packed], **attrs, **options)
    flat = [x, w, scales.reshape(-1), packed.reshape(-1)]
    compare("MatMulNBits", flat, **attrs, **options)
    compare("MatMulNBits", [x, w, scales, None, None, draw(rows)], **attrs, **options)
    if bits < 8:  # ONNX Runtime has no kernel for it
        real_zeros = np.abs(draw(rows, blocks)) * 3
        compare("MatMulNBits", [x, w, scales, real_zeros], **attrs, **options)


def test_matmul_of_few_bits_keeps_quantized_values_and_names():
    w, scales = qvalues(np.uint8, 5, 2, 8), np.abs(draw(5, 2))
    proto = model(
        "MatMulNBits", [draw(3, 32), w, scales], N=5, K=32, block_size=16, constants=[1, 2]
    )
    graph = load(proto)
    (node,) = (node for _, node in graph.walk() if node.op == "dequant_matmul")
    assert node.inputs[1].name == "x1"
    assert str(node.inputs[1].type) == "i4[5, 32]"
    assert node.attrs["block"] == 16


@pytest.mark.parametrize(
    "changes, attrs, message",
    [
        ({4: np.zeros(32, np.int32)}, {}, "g_idx"),
        ({}, {"K": 1 << 40}, "do not fit"),
        ({}, {"bits": 3}, "3 is not in"),
        ({}, {"block_size": -16}, "block_size"),
        ({}, {"N": 0}, "K, N or block_size"),
        ({}, {"weight_prepacked": 1}, "GPU"),
    ],
)
def test_matmul_of_few_bits_refuses(changes, attrs, message):
    operands = [draw(3, 32), qvalues(np.uint8, 5, 2, 8), np.abs(draw(5, 2)), None, None, None]
    for index, operand in changes.items():
        operands[index] = operand
    sizes = {"N": 5, "K": 32, "bits": 4, "block_size": 16, **attrs}
    with pytest.raises(ImportModelError, match=message):
        load(model("MatMulNBits", operands, constants=[1, 2], **sizes))
    with pytest.raises(UnsupportedError, match="the weight must be constant"):
        load(model("MatMulNBits", operands[:3], N=5, K=32, block_size=16))


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("columns", [32, 7])
def test_matmul_by_a_table_of_4_bits(kind, columns):
    count = 5 * columns
    operands = [draw(3, columns), qvalues(np.uint8, -(-count // 2)), np.abs(draw(-(-count // 16)))]
    attrs = {"N": 5, "K": columns, "block_size": 16, "quant_type": kind}
    compare("MatMulBnb4", operands, constants=[1, 2], **attrs)


@pytest.mark.parametrize("element", [ml_dtypes.int4, ml_dtypes.uint4])
def test_gather_of_blocks(element):
    indices = np.array([[0, 5, 2], [1, 1, 4]])
    table = (qvalues(np.uint8, 6, 40) % 8).astype(np.int8).astype(element)
    zeros = (qvalues(np.uint8, 6, 3) % 8).astype(np.int8).astype(element)
    options = {"block_size": 16, "constants": [0, 2, 3]}
    compare("GatherBlockQuantized", [table, indices, draw(6, 3)], **options)
    compare("GatherBlockQuantized", [table, indices, draw(6, 3), zeros], **options)
    columns = {"quantize_axis": 0, "gather_axis": 1}
    compare("GatherBlockQuantized", [table, indices, draw(1, 40)], **columns, **options)
    compare("GatherBlockQuantized", [table, indices, draw(6, 3)], gather_axis=1, **options)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_gather_of_packed_blocks(bits):
    indices, table = np.array([[0, 5, 2]]), qvalues(np.uint8, 6, 32 * bits // 8)
    options = {"bits": bits, "block_size": 16, "constants": [0, 2, 3]}
    compare("GatherBlockQuantized", [table, indices, draw(6, 2)], **options)
    zeros = qvalues(np.uint8, 6, -(-2 * bits // 8))
    compare("GatherBlockQuantized", [table, indices, draw(6, 2), zeros], **options)


@pytest.mark.parametrize(
    "op_type, inputs, expected",
    [
        (
            "QLinearReduceMean",
            [qvalues(np.uint8, 2, 6), scale(0.5), np.array(3, np.uint8), scale(0.5)],
            lambda x: np.rint(x.astype(np.float64).mean(1, keepdims=True) - 3),
        ),
        (
            "ReduceSumInteger",
            [qvalues(np.int8, 2, 6)],
            lambda x: x.astype(int).sum(1, keepdims=True),
        ),
    ],
)
def test_op_without_a_kernel_in_onnxruntime(op_type, inputs, expected):
    proto = model(op_type, inputs, axes=[1], keepdims=1)
    (found,) = by_bitwright(proto, feeds(proto, inputs))
    agree([expected(inputs[0]).astype(found.dtype)], [found], 0)
