"""Panels of several constant int8 matrices, packed at compile time.

The layout is the one of `kernels.matmul.pack_rhs`, which packs matrices at run time, so that one
product reads both:

    panels   [matrices][n / columns][k / group][columns][group] of signed weights w'
    sums     Σ w' - K wz'                        offset  (shift - x_zero) sums + bias
    w_zero   wz'

Unsigned weights are moved by 128: w' = w - 128, wz' = wz - 128.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.backends.cpu.kernels.matmul.dot.int8_dot import Int8Dot, pack_int8
from bitwright.backends.cpu.kernels.matmul.register_tile import Tile
from bitwright.backends.cpu.lowering.context import Lowering, NoKernelError
from bitwright.ir.graph import Node, Value, constant_value
from bitwright.lir.buffer import View, contiguous

Array = np.ndarray[Any, Any]


def pack_constants(
    ctx: Lowering,
    node: Node,
    w: Array,
    tile: Tile,
    dot: Int8Dot,
    inputs: dict[str, Value | None],
    terms: tuple[str, ...],
) -> tuple[View, dict[str, View], View]:
    """Panels of w[..., K, N], the column terms in `terms`, and a view whose strides count
    matrices."""
    outer, (depth, columns) = w.shape[:-2], w.shape[-2:]
    moved = 128 if w.dtype == np.uint8 else 0
    signed = (w.astype(np.int16) - moved).astype(np.int8).reshape(-1, depth, columns)
    packed = [pack_int8(matrix[None], tile, dot.group) for matrix in signed]
    panels = ctx.constant(np.stack(packed), f"{node.name}.weight")
    known = {name: _known(value, name) for name, value in inputs.items()}
    zero = np.broadcast_to(known["w_zero"] - moved, (*outer, 1, columns)).reshape(-1, columns)
    found: dict[str, Array] = {"w_zero": zero}
    found["sums"] = signed.sum(axis=1, dtype=np.int64) - depth * zero
    bias = np.broadcast_to(known["bias"], (*outer, 1, columns)).reshape(-1, columns)
    found["offset"] = (dot.shift - known["x_zero"]) * found["sums"] + bias
    arrays = {
        name: ctx.constant(found[name].astype(np.int32), f"{node.name}.{name}") for name in terms
    }
    return panels, arrays, contiguous(panels.buffer, outer)


def _known(value: Value | None, name: str) -> Array:
    """A constant zero point or bias in i64; 0 where there is none."""
    if value is None:
        return np.zeros((), np.int64)
    found = constant_value(value)
    if found is None:
        raise NoKernelError(f"its {name} is not a constant")
    return found.reshape(()).astype(np.int64) if found.size == 1 else found.astype(np.int64)
