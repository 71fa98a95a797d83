"""Zero points and biases of integer products: what is added to the sum of the tensor cores.

The tensor cores multiply signed bytes xs and ws. An u8 operand is xs + 128, so with
X = x_zero - 128 (x_zero where x is signed) and W likewise

    Σ (x - x_zero) (w - w_zero) = Σ xs ws - X Σ ws - W Σ xs + K X W

modulo 2**32. For constant weights all terms but X of a run-time x_zero are constants of the
columns; for other weights the kernel sums the tiles as it loads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bitwright.backends.cpu.kernels.matmul.lower_int8 import Weight
from bitwright.backends.cpu.lowering.region import broadcast
from bitwright.backends.gpu.kernels.matmul.forms import Finish, Matrices, place
from bitwright.backends.gpu.lowering.context import GpuLowering
from bitwright.backends.gpu.lowering.operands import At, Tiles
from bitwright.ir.dim import Size
from bitwright.ir.dtype import DType, u8
from bitwright.lir.buffer import View

Array = np.ndarray[Any, Any]


def shift_of(dtype: DType) -> int:
    """What the tensor core's operand lacks: 128 for u8."""
    return 128 if dtype == u8 else 0


def corrections(
    matrices: Matrices,
    x_zero: View | None = None,
    w_zero: View | None = None,
    bias: View | None = None,
    shape: Sequence[Size] | None = None,
) -> Finish:
    """The terms of two run-time operands; views broadcast to the result's `shape`."""
    at, own = place(matrices), {"x_zero": x_zero, "w_zero": w_zero, "bias": bias}
    shape = shape or (*matrices.batch, matrices.rows, matrices.columns)
    views = {name: broadcast(view, shape) for name, view in own.items() if view is not None}
    operands = Operands(views, at)
    shifts = {"x_zero": shift_of(matrices.x.dtype), "w_zero": shift_of(matrices.w.dtype)}
    zeros = {name: operands.less(name, shift) for name, shift in shifts.items()}
    lines, x, w = operands.lines, zeros["x_zero"], zeros["w_zero"]
    if x:
        lines.append(f"acc = acc - ({x}) * column_sums[None, :]")
    if w:
        lines.append(f"acc = acc - ({w}) * row_sums[:, None]")
    if x and w:
        lines.append(f"acc = acc + ({x}) * ({w}) * K")
    if bias is not None:
        lines.append(f"acc = acc + {operands.load('bias')}")
    return Finish("\n".join(lines), operands.views, operands.values, bool(w), bool(x))


def weight_corrections(
    ctx: GpuLowering,
    name: str,
    x: DType,
    weight: Weight,
    x_zero: View | int,
    bias: View | Array | None,
    shape: Sequence[Size],
    at: At,
) -> Finish:
    """The terms of a constant weight. `x_zero` is a number or a view that broadcasts to `shape`,
    that of the result with the columns last."""
    constant = np.zeros(1, np.int64)
    views: dict[str, View] = {}
    shift, sums = shift_of(x), weight.sums.astype(np.int64)
    if isinstance(x_zero, int):
        constant = constant - (x_zero - shift) * sums
    else:
        views["x_zero"] = broadcast(x_zero, shape)
        if sums.any():
            array = sums.astype(np.int32)
            views["sums"] = broadcast(ctx.constant(array, f"{name}.sums"), shape)
    if isinstance(bias, View):
        views["bias"] = broadcast(bias, shape)
    elif bias is not None:
        constant = constant + bias.reshape(-1).astype(np.int64)
    if constant.any():
        columns = np.broadcast_to(constant, weight.qvalues.shape[-1:]).astype(np.int32)
        views["offset"] = broadcast(ctx.constant(columns, f"{name}.offset"), shape)
    if weight.zero is not None:
        views["w_zero"] = broadcast(ctx.constant(weight.zero, f"{name}.zeros"), shape)
    if "sums" not in views:
        views.pop("x_zero", None)
    operands = Operands(views, at)
    lines = operands.lines
    if "sums" in views:
        lines.append(f"acc = acc - ({operands.less('x_zero', shift)}) * {operands.load('sums')}")
    if weight.zero is not None:
        lines.append(f"acc = acc - {operands.load('w_zero')} * row_sums[:, None]")
    lines += [f"acc = acc + {operands.load(key)}" for key in ("offset", "bias") if key in views]
    return Finish(
        "\n".join(lines), operands.views, operands.values, row_sums=weight.zero is not None
    )


class Operands:
    """Integer operands of one shape at a place."""

    def __init__(self, views: dict[str, View], at: At) -> None:
        views = {f"z_{name}": view for name, view in views.items()}
        self._tiles, self._at = Tiles.of(views, "z_row"), at
        self.views, self.values = self._tiles.views, self._tiles.values
        self.lines = self._tiles.index_lines(at.row)

    def load(self, name: str) -> str:
        """An operand in i32."""
        return f"{self._tiles.load(f'z_{name}', self._at)}.to(tl.int32)"

    def less(self, name: str, shift: int) -> str:
        """An operand minus a number; "" where both are absent or 0."""
        if f"z_{name}" not in self.views:
            return f"{-shift}" if shift else ""
        return f"{self.load(name)} - {shift}" if shift else self.load(name)
