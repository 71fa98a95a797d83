"""Sums and products of quantized tensors, element by element, in one compiled pass.

    add         t = f32(x - x_zero) * m_x + f32(y - y_zero) * m_y
    mul         t = f32((x - x_zero) (y - y_zero)) * m
    requantize  t = f32(x - x_zero) * m

and saturate(rne(t) + zero_point) for a result in codes, with the bits of numpy. A program is made
for each pair of types when it is asked for a second time; scales and zero points are operands.
Small arrays, several scales in a tensor, and codes beyond 8 bits give None.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.executable import Executable
from bitwright.ir.dtype import DType, dtype
from bitwright.ir.graph import Graph
from bitwright.ops.core.builder import Builder
from bitwright.quant.core.parameters import QuantizationParameters
from bitwright.quant.core.types import BINARY
from bitwright.quant.tensor.arithmetic import Result, takes_steps
from bitwright.quant.tensor.compiled_products import PLAIN_QVALUES, is_narrow, program_of
from bitwright.quant.tensor.tensor import QuantizedTensor

Array = np.ndarray[Any, Any]
LEAST_ELEMENTS = 1 << 14
"""Smaller arrays take less time in numpy than a program takes to start."""

_PROGRAMS: dict[Any, Executable | None] = {}


def elementwise(
    op: str, tensors: tuple[QuantizedTensor, ...], output: QuantizationParameters | None
) -> Result | None:
    """The result, or None where numpy has to compute it."""
    first = tensors[0]
    if first.size < LEAST_ELEMENTS or any(t.shape != first.shape for t in tensors):
        return None
    if not all(is_narrow(t) and _is_plain(t.parameters) for t in tensors):
        return None
    if output is not None and not (
        takes_steps(output) and _is_plain(output) and output.dtype.element in PLAIN_QVALUES
    ):
        return None
    kinds = tuple(dtype(_stored(t).dtype) for t in tensors)
    to = None if output is None else output.dtype.element
    key = op, kinds, to
    if key not in _PROGRAMS:
        _PROGRAMS[key] = None
        return None
    found = _PROGRAMS[key] = _PROGRAMS[key] or program_of(_graph(op, kinds, to))
    feeds: dict[str, Array] = {}
    step = 1.0 if output is None else float(output.effective_scale.reshape(-1)[0])
    scales = [float(t.parameters.effective_scale.reshape(-1)[0]) for t in tensors]
    if op == "mul":
        scales = [scales[0] * scales[1]]
    for number, scale in enumerate(scales):
        feeds[f"m{number}"] = np.array([scale / step], np.float32)
    for number, tensor in enumerate(tensors):
        feeds[f"x{number}"] = _stored(tensor).reshape(-1)
        feeds[f"zero{number}"] = tensor.parameters.zero_point.reshape(1).astype(np.int32)
    if output is not None and to is not None:
        feeds["zero"] = output.zero_point.reshape(1).astype(to.numpy)
    y = np.asarray(found.run(feeds)["y"]).reshape(first.shape)
    return y if output is None else QuantizedTensor.from_qvalues(y, output)


def _is_plain(parameters: QuantizationParameters) -> bool:
    """Whether one scale serves the tensor."""
    return parameters.scale.size == 1 and not parameters.block and parameters.dtype != BINARY


def _stored(tensor: QuantizedTensor) -> Array:
    qvalues = tensor.qvalues()
    return qvalues.astype(np.int8 if tensor.parameters.dtype.is_signed else np.uint8, copy=False)


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
