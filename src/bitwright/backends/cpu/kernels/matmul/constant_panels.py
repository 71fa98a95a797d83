"""Several constant matrices of 8-bit codes, packed when the program is made.

Panels and what is known of the columns are what `kernels.matmul.pack_rhs` makes of matrices that the run
brings; the product reads both alike:

    panels   [matrices][n / columns][k / group][columns][group] of signed codes w'
    sums     Σ w' - K wz'                        offset  (shift - x_zero) sums + bias
    w_zero   wz'

Codes without a sign lose 128: w' = w - 128, wz' = wz - 128.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.backends.cpu.kernels.matmul.dot.int8_dot import Int8Dot, pack_qvalues
from bitwright.backends.cpu.kernels.matmul.matmul import Tile
from bitwright.backends.cpu.lowering.context import Lowering, NoKernelError
from bitwright.ir.graph import Node, Value, constant_value
from bitwright.lir.buffer import View, contiguous

Array = np.ndarray[Any, Any]


def pack_constants(
    ctx: Lowering,
    node: Node,
    w: Array,
    tile: Tile,
    numbers: Int8Dot,
    given: dict[str, Value | None],
    makes: tuple[str, ...],
) -> tuple[View, dict[str, View], View]:
    """Panels of w[..., K, N], the facts in `makes`, and a view whose strides count matrices."""
    outer, (depth, columns) = w.shape[:-2], w.shape[-2:]
    moved = 128 if w.dtype == np.uint8 else 0
    signed = (w.astype(np.int16) - moved).astype(np.int8).reshape(-1, depth, columns)
    packed = [pack_qvalues(matrix[None], tile, numbers.group) for matrix in signed]
    panels = ctx.constant(np.stack(packed), f"{node.name}.weight")
    known = {name: _known(value, name) for name, value in given.items()}
    zero = np.broadcast_to(known["w_zero"] - moved, (*outer, 1, columns)).reshape(-1, columns)
    facts: dict[str, Array] = {"w_zero": zero}
    facts["sums"] = signed.sum(axis=1, dtype=np.int64) - depth * zero
    spread = np.broadcast_to(known["bias"], (*outer, 1, columns)).reshape(-1, columns)
    facts["offset"] = (numbers.shift - known["x_zero"]) * facts["sums"] + spread
    made = {
        name: ctx.constant(facts[name].astype(np.int32), f"{node.name}.{name}") for name in makes
    }
    return panels, made, contiguous(panels.buffer, outer)


def _known(value: Value | None, name: str) -> Array:
    """A zero point or bias that is a constant, in i64; 0 where there is none."""
    if value is None:
        return np.zeros((), np.int64)
    found = constant_value(value)
    if found is None:
        raise NoKernelError(f"its {name} is not a constant")
    return found.reshape(()).astype(np.int64) if found.size == 1 else found.astype(np.int64)
