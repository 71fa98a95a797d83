"""Products of 8-bit integers with zero points and bias, exact in i32."""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.backends.cpu.kernels.matmul.lower_int8 import Weight
from bitwright.backends.cpu.kernels.matmul.lower_matmul import optional_inputs
from bitwright.backends.gpu.kernels.matmul.forms import launch_product, place
from bitwright.backends.gpu.kernels.matmul.operands import constant_matrix, matrices_of
from bitwright.backends.gpu.kernels.matmul.zero_points import corrections, weight_corrections
from bitwright.backends.gpu.lowering.context import GpuLowering, RegionView, lowers
from bitwright.backends.gpu.lowering.operands import Tail
from bitwright.ir.graph import Node, Value, constant_value
from bitwright.lir.buffer import View

Array = np.ndarray[Any, Any]

WHY = "int8, summed in i32"


@lowers("integer_matmul")
def lower_integer_matmul(ctx: GpuLowering, node: Node, region: RegionView) -> None:
    anchor = region.anchor
    assert anchor is not None
    x, w, x_zero, w_zero, bias = (
        None if value is None else region.outer(value) for value in optional_inputs(anchor, 5)
    )
    assert x is not None and w is not None
    shape = anchor.outputs[0].shape
    array = constant_matrix(w)
    zeros = None if w_zero is None else constant_value(w_zero)
    fixed = array is not None and array.ndim == 2 and (w_zero is None or zeros is not None)
    if not fixed or array is None or x.rank < 2:
        matrices = matrices_of(ctx, x, w, None, node.name)
        zero, w_points, added = (None if v is None else ctx.view(v) for v in (x_zero, w_zero, bias))
        finish = corrections(matrices, zero, w_points, added, shape)
    else:
        weight = Weight.of(array, zeros)
        matrices = matrices_of(ctx, x, w, weight.qvalues, node.name)
        finish = weight_corrections(
            ctx,
            node.name,
            x.dtype,
            weight,
            zero_of(ctx, x_zero),
            _bias(ctx, bias),
            shape,
            place(matrices),
        )
    tail = Tail.of_region(ctx, node, region)
    launch_product(ctx, node, matrices, tail, finish, why=WHY)


def zero_of(ctx: GpuLowering, value: Value | None) -> View | int:
    """A zero point: a number where it is constant, else its view."""
    if value is None:
        return 0
    known = constant_value(value)
    return int(known.reshape(-1)[0]) if known is not None and known.size == 1 else ctx.view(value)


def _bias(ctx: GpuLowering, value: Value | None) -> View | Array | None:
    """A bias: an array where it is constant and differs only between columns, else its view."""
    if value is None:
        return None
    known = constant_value(value)
    if known is not None and (known.size == 1 or known.size == known.shape[-1]):
        return known
    return ctx.view(value)
