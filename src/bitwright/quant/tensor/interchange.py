"""Convert quantized tensors to and from ONNX and PyTorch, which use the same packing.

ONNX      data, scales, zero points: the inputs of DequantizeLinear (blocks as in opset 21)
PyTorch   the packed data as a tensor that shares memory, scales and zero points
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from bitwright.errors import QuantizationError
from bitwright.ir import quant_types
from bitwright.ir.arrays import Array
from bitwright.ir.quant_params import QuantParams
from bitwright.ir.quant_types import Scheme
from bitwright.quant.core.packing import pack
from bitwright.quant.tensor.tensor import QuantizedTensor, storage

_INTEGERS = ("int8", "uint8", "int16", "uint16", "int4", "uint4", "int2", "uint2")
_ONNX = {name: name.upper() for name in _INTEGERS}
_ONNX |= {"f8e4m3fn": "FLOAT8E4M3FN", "f8e5m2": "FLOAT8E5M2", "f4e2m1": "FLOAT4E2M1"}


def to_onnx(
    tensor: QuantizedTensor, name: str
) -> tuple[onnx.TensorProto, onnx.TensorProto, onnx.TensorProto]:
    """Data, scales and zero points, named `name`, `name_scale` and `name_zero_point`."""
    parameters = tensor.parameters
    element = getattr(TensorProto, _ONNX.get(parameters.dtype.name, ""), None)
    if element is None or parameters.scheme in (Scheme.logarithmic, Scheme.binary):
        raise QuantizationError(
            f"ONNX has no tensor type for {parameters.scheme} {parameters.dtype}",
            where=name,
            expected="a symmetric or asymmetric type of " + ", ".join(_ONNX),
        )
    data = _proto(name, element, tensor.shape, tensor.data)
    scale = numpy_helper.from_array(parameters.effective_scale, f"{name}_scale")
    zero = _proto(
        f"{name}_zero_point", element, parameters.scale.shape, _packed_zero_points(parameters)
    )
    return data, scale, zero


def _proto(name: str, element: int, shape: tuple[int, ...], data: Array) -> onnx.TensorProto:
    raw = data.astype(data.dtype.newbyteorder("<"), copy=False) if data.dtype.kind in "iu" else data
    return onnx.TensorProto(name=name, data_type=element, dims=shape, raw_data=raw.tobytes())


def _packed_zero_points(parameters: QuantParams) -> Array:
    kind = parameters.dtype
    if not kind.is_integer:
        return np.zeros(kind.nbytes(parameters.scale.size), np.uint8)
    points = parameters.zero_point.astype(np.int8 if kind.bits < 8 else kind.element.numpy)
    return pack(points, kind.bits) if kind.bits < 8 else points


def from_onnx(
    data: onnx.TensorProto,
    scale: onnx.TensorProto,
    zero_point: onnx.TensorProto | None = None,
    axis: int | None = None,
    block: int = 0,
) -> QuantizedTensor:
    """The tensor with these DequantizeLinear inputs; without an axis, one scale."""
    qvalues = numpy_helper.to_array(data)
    scales = numpy_helper.to_array(scale).astype(np.float32)
    kind = quant_types.get(_name_of(qvalues.dtype, data.name))
    points = np.zeros(scales.shape, np.int64)
    if zero_point is not None:
        points = numpy_helper.to_array(zero_point).astype(np.float32).astype(np.int64)
    if axis is None:
        scales, points = scales.reshape(()), points.reshape(())
    parameters = QuantParams.linear(kind, scales, points, axis, block)
    return QuantizedTensor.from_qvalues(qvalues, parameters)


def _name_of(element: np.dtype[Any], where: str) -> str:
    for one in quant_types.TYPES.values():
        if one.name in _ONNX and one.element.numpy == element:
            return one.name
    raise QuantizationError(
        "this is not a quantized type", where=where, expected=", ".join(_ONNX), found=element
    )


def to_torch(tensor: QuantizedTensor) -> tuple[Any, Any, Any]:
    """Data (flat; packed below 8 bits), scales and zero points as PyTorch tensors."""
    import torch

    def shared(array: Array) -> Any:
        names = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
        if array.dtype.name in names:
            return torch.from_numpy(array.view(np.uint8)).view(names[array.dtype.name])
        return torch.from_numpy(array)

    parameters = tensor.parameters
    scale, points = parameters.effective_scale, parameters.zero_point
    return shared(tensor.data), shared(np.array(scale)), shared(np.array(points))


def from_torch(data: Any, parameters: QuantParams, shape: tuple[int, ...]) -> QuantizedTensor:
    """The inverse of `to_torch`; shares memory with tensors on the CPU."""
    import torch

    flat = data.detach().cpu().contiguous().reshape(-1)
    raw = flat.view(torch.uint8).numpy() if flat.dtype.is_floating_point else flat.numpy()
    return QuantizedTensor(raw.view(storage(parameters)), tuple(shape), parameters)


def from_torch_quantized(tensor: Any) -> QuantizedTensor:
    """A tensor of torch.quantize_per_tensor or torch.quantize_per_channel."""
    import torch

    if not getattr(tensor, "is_quantized", False):
        raise QuantizationError("this is not a quantized PyTorch tensor", found=type(tensor))
    qvalues = tensor.int_repr().cpu().numpy()
    kind = quant_types.get(qvalues.dtype.name)
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        axis, scale, points = None, np.float32(tensor.q_scale()), np.array(tensor.q_zero_point())
    else:
        axis = int(tensor.q_per_channel_axis())
        scale = tensor.q_per_channel_scales().cpu().numpy().astype(np.float32)
        points = tensor.q_per_channel_zero_points().cpu().numpy()
    parameters = QuantParams.linear(kind, np.asarray(scale), points, axis)
    return QuantizedTensor.from_qvalues(qvalues, parameters)
