"""The copy between two views of one shape.

Axes that lie behind each other on both sides are taken as one, so that most copies have one or two
axes left; the innermost one then decides the kernel (`kernels.movement.copy`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bitwright.backends.cpu.kernels.movement import copy as kernels
from bitwright.backends.cpu.kernels.movement.interleave import MAX_ROWS, emit_interleave
from bitwright.backends.cpu.kernels.movement.transpose import tile_lanes
from bitwright.backends.cpu.lowering.context import COPY, KernelCode, Lowering
from bitwright.backends.cpu.lowering.region import collapse
from bitwright.errors import CompileError
from bitwright.ir.dim import Size, divide_exactly
from bitwright.lir.buffer import View


@dataclass(frozen=True)
class Axis:
    """A size, and the strides of source and target in elements."""

    n: Size
    x: Size
    y: Size

    @property
    def least(self) -> int:
        """The size; one that is not known is taken to be long."""
        return self.n if isinstance(self.n, int) else 1024


def copy_view(ctx: Lowering, source: View, target: View, name: str) -> None:
    """Append the step that copies `source` to `target`."""
    width = source.dtype.numpy.itemsize
    if len(source.shape) != len(target.shape) or width != target.dtype.numpy.itemsize:
        raise CompileError("a copy needs two views of one type", expected=target, found=source)
    axes, width = _regrouped(_axes(source, target), width, (source.offset, target.offset))
    form, axes = _arranged(ctx, axes, width)
    kernel = _kernel(ctx, form, axes, width)
    wanted = {slot.name for slot in kernel.signature.slots}
    sizes = {slot: size for slot, size in _slots(form, axes, width).items() if slot in wanted}
    ctx.call(kernel, name, {"x": source, "y": target}, sizes, why=f"{form} copy")


def _slots(form: str, axes: list[Axis], width: int) -> dict[str, Size]:
    """Every size and stride that a kernel of this form may ask for."""
    scale = width if form == "run" else 1
    slots = {
        f"{letter}{number}": getattr(axis, letter) * scale
        for number, axis in enumerate(axes)
        for letter in "nxy"
    }
    if form == "run":  # only rows are counted in bytes
        slots |= {f"n{number}": axis.n for number, axis in enumerate(axes[:-1])}
    elif form in ("zip", "unzip"):
        rows, long = (axes[-1], axes[-2]) if form == "zip" else (axes[-2], axes[-1])
        slots |= {"count": long.n, "stride": rows.x if form == "zip" else rows.y}
    return slots


def _axes(source: View, target: View) -> list[Axis]:
    """The fewest axes that say the same; the one that lies close in the target comes last."""
    order = list(range(len(target.shape)))
    if all(isinstance(stride, int) for stride in target.strides):
        order.sort(key=lambda axis: -abs(target.strides[axis]))  # type: ignore[arg-type]
    order.sort(key=lambda axis: target.strides[axis] == 1)
    x, y = collapse([replace(source, shape=target.shape).transpose(order), target.transpose(order)])
    return [Axis(*axis) for axis in zip(y.shape, x.strides, y.strides, strict=True)] or [
        Axis(1, 1, 1)
    ]


def _regrouped(axes: list[Axis], width: int, offsets: tuple[Size, Size]) -> tuple[list[Axis], int]:
    """The axes in elements of at most 8 bytes: short runs become one wide element."""
    if width == 16:
        return [*(Axis(a.n, a.x * 2, a.y * 2) for a in axes), Axis(2, 1, 1)], 8
    *outer, last = axes
    count = last.n
    if not (
        outer and isinstance(count, int) and last.x == last.y == 1 and count * width in (2, 4, 8)
    ):
        return axes, width
    if any(divide_exactly(offset, count) is None for offset in offsets):
        return axes, width
    wide: list[Axis] = []
    for axis in outer:
        x, y = divide_exactly(axis.x, count), divide_exactly(axis.y, count)
        if x is None or y is None:
            return axes, width
        wide.append(Axis(axis.n, x, y))
    return wide, width * count


def _arranged(ctx: Lowering, axes: list[Axis], width: int) -> tuple[str, list[Axis]]:
    """The form of a copy, and its axes in the order that its kernel wants."""
    *outer, last = axes
    if last.y == 1 and last.x in (0, 1):
        return ("run" if last.x == 1 else "fill"), axes
    close = next((axis for axis in outer if axis.x == 1), None)
    if last.y == 1 and close is not None and (form := _transposed(ctx, close, last, width)):
        outer.remove(close)
        return form, [*outer, close, last]
    if last.least < 8:  # the long axis is the inner loop
        long = max(axes, key=lambda axis: axis.least)
        axes.remove(long)
        axes.append(long)
    return "general", axes


def _transposed(ctx: Lowering, close: Axis, last: Axis, width: int) -> str:
    """The form for a matrix that lies close on one axis in x and on the other in y, if any."""
    if last.n in range(2, MAX_ROWS + 1) and close.y == last.n:
        return "zip"
    if close.n in range(2, MAX_ROWS + 1) and last.x == close.n:
        return "unzip"
    return "transpose" if _lanes(ctx, close, last, width) else ""


def _lanes(ctx: Lowering, close: Axis, last: Axis, width: int) -> int:
    """The side of the tiles for a transpose, or 0."""
    return tile_lanes(ctx.target, width, min(close.least, last.least))


def _kernel(ctx: Lowering, form: str, axes: list[Axis], width: int) -> KernelCode:
    rank = len(axes)
    if form == "run":
        return ctx.kernel("copy_run", rank, lambda m, name: kernels.emit_run(m, name, rank))
    if form == "transpose":
        key = rank, width, _lanes(ctx, axes[-2], axes[-1], width)
        return ctx.kernel("transpose", key, lambda m, name: kernels.emit_transpose(m, name, *key))
    if form in ("zip", "unzip"):
        rows = (axes[-1] if form == "zip" else axes[-2]).least
        spec = rank - 2, width, rows, form == "zip"
        return ctx.kernel(f"copy_{form}", spec, lambda m, name: emit_interleave(m, name, *spec))
    emit = {"fill": kernels.emit_fill, "general": kernels.emit_general}[form]
    return ctx.kernel(f"copy_{form}", (rank, width), lambda m, name: emit(m, name, rank, width))


COPY.append(copy_view)
