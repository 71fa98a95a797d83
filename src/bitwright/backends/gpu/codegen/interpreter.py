"""Repairs of Triton's interpreter (3.6), which runs kernels on CPU tensors in tests.

    __index__       numpy 2.4 converts no tensor of one axis to a loop bound
    _convert_float  rounds ties away from zero and loses carries: 1.998 became 1.0 in bf16
    create_dot      multiplies the bits of bf16 values
    create_splat    gives a scalar comparison the type of its operands

Nothing happens where kernels run natively.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

_SHORT: dict[str, Any] = {
    "bf16": ml_dtypes.bfloat16,
    "fp8e4nv": ml_dtypes.float8_e4m3fn,
    "fp8e5": ml_dtypes.float8_e5m2,
    "fp16": np.float16,
    "fp32": np.float32,
}


@cache
def repair() -> None:
    """Apply the repairs, once."""
    found: Any = importlib.import_module("triton.runtime.interpreter")
    original = found._patch_lang_tensor
    convert = found._convert_float

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        """The bits of rounded values; 8-bit floats saturate like the conversions of the GPU."""
        if str(source) not in _SHORT or str(target) not in _SHORT:
            return convert(data, source, target, rounding)
        values = np.ascontiguousarray(data).view(_SHORT[str(source)]).astype(np.float32)
        to = _SHORT[str(target)]
        if target.primitive_bitwidth == 8:
            highest = float(ml_dtypes.finfo(to).max)  # type: ignore[no-untyped-call]
            values = np.clip(values, -highest, highest)
        rounded = np.asarray(values.astype(to))
        return rounded.view(np.dtype(f"u{rounded.dtype.itemsize}"))

    def create_splat(self: Any, result: Any, argument: Any) -> Any:
        shape = result.shape
        value = argument.data[0] if isinstance(result, found.tl.block_type) else argument.data
        filled = np.full(shape, value, dtype=argument.data.dtype)
        return found.TensorHandle(filled, argument.dtype.scalar)

    plain_dot = found.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        if str(a.dtype.scalar) not in _SHORT or str(b.dtype.scalar) not in _SHORT:
            return plain_dot(self, a, b, d, *rest)
        wide = [
            np.ascontiguousarray(x.data).view(_SHORT[str(x.dtype.scalar)]).astype(np.float32)
            for x in (a, b)
        ]
        total = np.matmul(*wide).astype(d.data.dtype) + d.data
        return found.TensorHandle(total, d.dtype.scalar)

    found._patch_lang_tensor = patch
    found.InterpreterBuilder.create_dot = create_dot
    found._convert_float = convert_float
    found.InterpreterBuilder.create_splat = create_splat
