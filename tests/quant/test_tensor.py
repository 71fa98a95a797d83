"""QuantizedTensor: packing, checks, reshape and transpose, sizes, interchange."""

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from bitwright.errors import QuantizationError
from bitwright.quant import QuantizedTensor, QuantParams, quantize_tensor
from bitwright.quant.core.packing import pack, unpack
from bitwright.quant.tensor import interchange

P = QuantParams


def test_packing_by_hand():
    assert pack(np.int8([1, -1, 7, -8, 3]), 4).tolist() == [0xF1, 0x87, 0x03]
    assert pack(np.int8([1, -1, -2, 0, 1]), 2).tolist() == [0b00_10_11_01, 0b01]
    assert pack(np.uint8([1, 0, 0, 0, 0, 0, 0, 1, 1]), 1).tolist() == [0b1000_0001, 1]


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 8, 9, 33])
def test_odd_lengths_keep_their_true_length(bits, count):
    signed = np.random.default_rng(count).integers(-(2 ** (bits - 1)), 2 ** (bits - 1), count)
    unsigned = signed + 2 ** (bits - 1)
    packed = pack(unsigned.astype(np.uint8), bits)
    assert packed.size == -(-count * bits // 8)
    np.testing.assert_array_equal(unpack(packed, bits, count, signed=False), unsigned)
    if bits > 1:
        back = unpack(pack(signed.astype(np.int8), bits), bits, count, signed=True)
        np.testing.assert_array_equal(back, signed)


def test_data_and_shape_must_agree():
    parameters = P.symmetric("int4", 1.0)
    with pytest.raises(QuantizationError, match="disagree; expected 3 elements, found 2"):
        QuantizedTensor(np.zeros(2, np.uint8), (5,), parameters)
    with pytest.raises(QuantizationError, match="flat array of uint8"):
        QuantizedTensor(np.zeros(3, np.int8), (5,), parameters)
    with pytest.raises(QuantizationError, match=r"expected -8\.\.7 for int4"):
        QuantizedTensor.from_qvalues(np.array([9]), parameters)
    with pytest.raises(QuantizationError, match="scales do not match axis 0"):
        QuantizedTensor(np.zeros(3, np.int8), (3,), P.symmetric("int8", [1, 2], axis=0))


def test_nbytes():
    x = np.random.default_rng(0).normal(size=(64, 128)).astype(np.float32)
    eight = quantize_tensor(x, "int8", "minmax")
    assert eight.nbytes == 64 * 128 + 4 and eight.compression_ratio == 64 * 128 * 4 / eight.nbytes
    four = quantize_tensor(x, "uint4", "minmax", axis=1, block=32)  # scale 4 bytes, zero point 1
    assert four.nbytes == 64 * 128 // 2 + 64 * 4 * (4 + 1)
    assert quantize_tensor(x, "binary", axis=0).nbytes == 64 * 128 // 8 + 64 * 4
    assert quantize_tensor(x, "mxfp4", "minmax").nbytes == 64 * 128 // 2 + 64 * 4
    assert quantize_tensor(x, "nvfp4", "minmax").nbytes == 64 * 128 // 2 + 64 * 8 + 4
    assert 0.74 < eight.saving < 0.75


@pytest.mark.parametrize("name", ["int8", "int4", "uint2", "binary", "f4e2m1"])
def test_reshape_and_transpose_preserve_values(name):
    x = np.random.default_rng(1).normal(size=(4, 6, 10)).astype(np.float32)
    for options in ({}, {"axis": 1}, {"axis": 2, "block": 4}):
        tensor = quantize_tensor(x, name, "minmax", **options)
        y = tensor.dequantize()
        np.testing.assert_array_equal(tensor.transpose(2, 0, 1).dequantize(), y.transpose(2, 0, 1))
        np.testing.assert_array_equal(tensor.transpose().dequantize(), y.T)
    tensor = quantize_tensor(x, name, "minmax")
    y = tensor.dequantize()
    np.testing.assert_array_equal(tensor.reshape(6, -1).dequantize(), y.reshape(6, -1))
    tensor = quantize_tensor(x, name, "minmax", axis=1)
    y = tensor.dequantize()
    moved = tensor.reshape(2, 2, 6, 5, 2)
    assert moved.parameters.axis == 2 and np.shares_memory(moved.data, tensor.data)
    np.testing.assert_array_equal(moved.dequantize(), y.reshape(2, 2, 6, 5, 2))
    with pytest.raises(QuantizationError, match="keeps axis 1 whole"):
        tensor.reshape(24, 10)
    with pytest.raises(QuantizationError, match="expected 240 values"):
        tensor.reshape(7, -1)


def test_rows_are_views_at_whole_bytes():
    x = np.random.default_rng(2).normal(size=(6, 3)).astype(np.float32)
    tensor = quantize_tensor(x, "int4", "minmax", axis=0)
    part = tensor[2:5]
    assert np.shares_memory(part.data, tensor.data)
    np.testing.assert_array_equal(part.dequantize(), tensor.dequantize()[2:5])
    with pytest.raises(QuantizationError, match="not a view of packed data"):
        tensor[1:5]
    blocked = quantize_tensor(x, "int8", "minmax", axis=0, block=2)
    np.testing.assert_array_equal(blocked[2:5].dequantize(), blocked.dequantize()[2:5])
    with pytest.raises(QuantizationError, match="inside a block"):
        blocked[1:]


ONNX_NAMES = ["int8", "uint8", "int16", "uint16", "int4", "uint4", "f8e4m3fn", "f8e5m2", "f4e2m1"]


@pytest.mark.parametrize("name", ONNX_NAMES)
def test_onnx_round_trip(name):
    x = np.random.default_rng(3).normal(size=(5, 7)).astype(np.float32)
    for options in ({}, {"axis": 0}, {"axis": 1, "block": 3}):
        tensor = quantize_tensor(x, name, "minmax", **options)
        data, scale, zero = interchange.to_onnx(tensor, "w")
        theirs = numpy_helper.to_array(data)
        np.testing.assert_array_equal(
            theirs.astype(np.float32), tensor.qvalues().astype(np.float32)
        )
        assert data.name == "w" and scale.name == "w_scale"
        back = interchange.from_onnx(
            data, scale, zero, options.get("axis"), options.get("block", 0)
        )
        np.testing.assert_array_equal(back.dequantize(), tensor.dequantize())
        assert back.parameters == tensor.parameters


def test_onnx_runs_the_exported_tensor():
    x = np.random.default_rng(4).normal(size=(4, 6)).astype(np.float32)
    tensor = quantize_tensor(x, "uint4", "minmax", axis=1, block=2)
    tensors = interchange.to_onnx(tensor, "w")
    node = onnx.helper.make_node(
        "DequantizeLinear", [t.name for t in tensors], ["y"], axis=1, block_size=2
    )
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [4, 6])
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "g", [], [y], list(tensors)))
    found = ReferenceEvaluator(model).run(None, {})[0]
    np.testing.assert_array_equal(found, tensor.dequantize())


def test_types_that_onnx_lacks_are_errors():
    for name in ("binary", "mixed"):
        tensor = quantize_tensor(
            np.ones((2, 2)), name, axis=0, widths=[4, 8] if name == "mixed" else ()
        )
        with pytest.raises(QuantizationError, match="ONNX has no tensor type"):
            interchange.to_onnx(tensor, "w")
    logs = quantize_tensor(np.ones(2), "int8", scheme="logarithmic")
    with pytest.raises(QuantizationError, match="ONNX has no tensor type"):
        interchange.to_onnx(logs, "w")


def test_qvalues_are_ml_dtypes():
    tensor = quantize_tensor(np.arange(-4, 4), "int4", "minmax")
    assert tensor.qvalues().dtype == ml_dtypes.int4
    same = QuantizedTensor.from_qvalues(tensor.qvalues(), tensor.parameters)
    np.testing.assert_array_equal(same.data, tensor.data)


@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "int4", "f8e4m3fn", "f8e5m2"])
def test_torch_round_trip(name):
    x = np.random.default_rng(5).normal(size=(5, 7)).astype(np.float32)
    tensor = quantize_tensor(x, name, "minmax", axis=0)
    data, scale, zero = interchange.to_torch(tensor)
    if name != "int4":
        theirs = (data.reshape(5, 7).to(torch.float32) - zero[:, None]) * scale[:, None]
        np.testing.assert_array_equal(theirs.numpy(), tensor.dequantize())
    back = interchange.from_torch(data, tensor.parameters, tensor.shape)
    np.testing.assert_array_equal(back.dequantize(), tensor.dequantize())


def test_import_of_torch_quantized_tensors():
    x = torch.linspace(-1, 2, 12).reshape(3, 4)
    one = torch.quantize_per_tensor(x, 0.02, 30, torch.quint8)
    found = interchange.from_torch_quantized(one)
    assert found.parameters.dtype.name == "uint8"
    np.testing.assert_array_equal(found.dequantize(), one.dequantize().numpy())
    scales = torch.tensor([0.01, 0.02, 0.03])
    two = torch.quantize_per_channel(x, scales, torch.zeros(3, dtype=torch.long), 0, torch.qint8)
    found = interchange.from_torch_quantized(two)
    assert found.parameters.scheme.name == "symmetric" and found.parameters.axis == 0
    np.testing.assert_allclose(found.dequantize(), two.dequantize().numpy(), rtol=1e-6)
