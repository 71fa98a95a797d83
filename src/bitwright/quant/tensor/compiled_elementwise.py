"""Elementwise add, mul and requantize of quantized tensors, by one compiled kernel.

    add         t = f32(x - x_zero) * m_x + f32(y - y_zero) * m_y
    mul         t = f32((x - x_zero) (y - y_zero)) * m
    requantize  t = f32(x - x_zero) * m

then saturate(rne(t) + zero_point) for a quantized result; bit-identical to numpy. A program is
compiled for each combination of types at its second use; scales and zero points are inputs.
Small arrays, more than one scale per tensor, and types wider than 8 bits are not supported (None).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.executable import Executable
from bitwright.ir.arrays import Array
from bitwright.ir.dtype import DType, dtype
from bitwright.ir.graph import Graph
from bitwright.ir.quant_params import QuantParams
from bitwright.ir.quant_types import BINARY
from bitwright.ops.core.builder import Builder
from bitwright.quant.tensor import compiled_products
from bitwright.quant.tensor.arithmetic import Result, is_linear
from bitwright.quant.tensor.compiled_products import INTEGER_TYPES, int8_values
from bitwright.quant.tensor.tensor import QuantizedTensor

MIN_ELEMENTS = 1 << 14
"""Smaller arrays are faster in numpy."""

_PROGRAMS: dict[Any, Executable | None] = {}


def elementwise(
    op: str, tensors: tuple[QuantizedTensor, ...], output: QuantParams | None
) -> Result | None:
    """The result; None if numpy must compute it."""
    first = tensors[0]
    if first.size < MIN_ELEMENTS or any(t.shape != first.shape for t in tensors):
        return None
    if not all(compiled_products.is_narrow(t) and _is_plain(t.parameters) for t in tensors):
        return None
    if output is not None and not (
        is_linear(output) and _is_plain(output) and output.dtype.element in INTEGER_TYPES
    ):
        return None
    kinds = tuple(dtype(int8_values(t).dtype) for t in tensors)
    to = None if output is None else output.dtype.element
    key = op, kinds, to
    if key not in _PROGRAMS:
        _PROGRAMS[key] = None
        return None
    found = _PROGRAMS[key] = _PROGRAMS[key] or compiled_products.program_of(_graph(op, kinds, to))
    feeds: dict[str, Array] = {}
    unit = 1.0 if output is None else float(output.effective_scale.reshape(-1)[0])
    scales = [float(t.parameters.effective_scale.reshape(-1)[0]) for t in tensors]
    if op == "mul":
        scales = [scales[0] * scales[1]]
    for number, scale in enumerate(scales):
        feeds[f"m{number}"] = np.array([scale / unit], np.float32)
    for number, tensor in enumerate(tensors):
        feeds[f"x{number}"] = int8_values(tensor).reshape(-1)
        feeds[f"zero{number}"] = tensor.parameters.zero_point.reshape(1).astype(np.int32)
    if output is not None and to is not None:
        feeds["zero"] = output.zero_point.reshape(1).astype(to.numpy)
    y = np.asarray(found.run(feeds)["y"]).reshape(first.shape)
    return y if output is None else QuantizedTensor.from_qvalues(y, output)


def _is_plain(parameters: QuantParams) -> bool:
    """Whether the tensor has one scale."""
    return parameters.scale.size == 1 and not parameters.block and parameters.dtype != BINARY


def _graph(op: str, kinds: tuple[DType, ...], to: DType | None) -> Graph:
    b = Builder(op)
    centred = []
    for number, kind in enumerate(kinds):
        x = b.cast(b.input(f"x{number}", f"{kind}[n]"), to="i32")
        zero = b.input(f"zero{number}", "i32[1]")
        centred.append(b.sub(x, b.reshape(zero, shape=())))
    if op == "mul":
        centred = [b.mul(*centred)]
    terms = [
        b.mul(b.cast(value, to="f32"), b.reshape(b.input(f"m{number}", "f32[1]"), shape=()))
        for number, value in enumerate(centred)
    ]
    y = b.add(*terms) if op == "add" else terms[0]
    if to is not None:
        y = b.requantize(y, b.reshape(b.input("zero", f"{to}[1]"), shape=()), to=to)
    return b.build(y=y)
