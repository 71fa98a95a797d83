"""Lowering of a copy between two views of one shape.

Axes that are contiguous on both sides are merged, so most copies have one or two axes; the strides
of the innermost one select the kernel (`kernels.movement.copy`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bitwright.backends.cpu.kernels.movement import copy as kernels
from bitwright.backends.cpu.kernels.movement.interleave import MAX_ROWS, emit_interleave
from bitwright.backends.cpu.kernels.movement.transpose import tile_lanes
from bitwright.backends.cpu.lowering.artifact import KernelCode
from bitwright.backends.cpu.lowering.context import COPY, Lowering
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
        """The size; a symbolic size is assumed to be large."""
        return self.n if isinstance(self.n, int) else 1024


def copy_view(ctx: Lowering, source: View, target: View, name: str) -> None:
    """Append a kernel call that copies `source` to `target`."""
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
    """All sizes and strides that a kernel of this form may use."""
    scale = width if form == "contiguous" else 1
    slots = {
        f"{letter}{number}": getattr(axis, letter) * scale
        for number, axis in enumerate(axes)
        for letter in "nxy"
    }
    if form == "contiguous":  # only rows are counted in bytes
        slots |= {f"n{number}": axis.n for number, axis in enumerate(axes[:-1])}
    elif form == "interleave":
        slots |= {"count": axes[-2].n, "stride": axes[-1].x}
    elif form == "deinterleave":
        slots |= {"count": axes[-1].n, "stride": axes[-2].y}
    return slots


def _axes(source: View, target: View) -> list[Axis]:
    """The axes after merging; the one with target stride 1 comes last."""
    order = list(range(len(target.shape)))
    if all(isinstance(stride, int) for stride in target.strides):
        order.sort(key=lambda axis: -abs(target.strides[axis]))  # type: ignore[arg-type]
    order.sort(key=lambda axis: target.strides[axis] == 1)
    x, y = collapse([replace(source, shape=target.shape).transpose(order), target.transpose(order)])
    return [Axis(*axis) for axis in zip(y.shape, x.strides, y.strides, strict=True)] or [
        Axis(1, 1, 1)
    ]


def _regrouped(axes: list[Axis], width: int, offsets: tuple[Size, Size]) -> tuple[list[Axis], int]:
    """The axes in elements of at most 8 bytes; a short inner run becomes one wide element."""
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
    """The form of a copy, and its axes in the order of its kernel."""
    *outer, last = axes
    if last.y == 1 and last.x in (0, 1):
        return ("contiguous" if last.x == 1 else "fill"), axes
    close = next((axis for axis in outer if axis.x == 1), None)
    if last.y == 1 and close is not None and (form := _transposed(ctx, close, last, width)):
        outer.remove(close)
        return form, [*outer, close, last]
    if last.least < 8:  # the long axis is the inner loop
        long = max(axes, key=lambda axis: axis.least)
        axes.remove(long)
        axes.append(long)
    return "strided", axes


def _transposed(ctx: Lowering, close: Axis, last: Axis, width: int) -> str:
    """The form for a matrix that is contiguous on one axis in x and the other in y, or ""."""
    if last.n in range(2, MAX_ROWS + 1) and close.y == last.n:
        return "interleave"
    if close.n in range(2, MAX_ROWS + 1) and last.x == close.n:
        return "deinterleave"
    return "transpose" if _lanes(ctx, close, last, width) else ""


def _lanes(ctx: Lowering, close: Axis, last: Axis, width: int) -> int:
    """The tile side for a transpose, or 0."""
    return tile_lanes(ctx.target, width, min(close.least, last.least))


def _kernel(ctx: Lowering, form: str, axes: list[Axis], width: int) -> KernelCode:
    rank = len(axes)
    bits = f"{8 * width}bit"
    if form == "contiguous":
        emit_run = lambda m, name: kernels.emit_run(m, name, rank)
        return ctx.kernel("copy_contiguous", rank, emit_run)
    if form == "transpose":
        key = rank, width, _lanes(ctx, axes[-2], axes[-1], width)
        emit_transpose = lambda m, name: kernels.emit_transpose(m, name, *key)
        return ctx.kernel(f"transpose_{bits}", key, emit_transpose)
    if form in ("interleave", "deinterleave"):
        zips = form == "interleave"
        spec = rank - 2, width, (axes[-1] if zips else axes[-2]).least, zips
        return ctx.kernel(f"{form}_{bits}", spec, lambda m, name: emit_interleave(m, name, *spec))
    emit = {"fill": kernels.emit_fill, "strided": kernels.emit_strided}[form]
    family = f"copy_{form}_{bits}"
    return ctx.kernel(family, (rank, width), lambda m, name: emit(m, name, rank, width))


COPY.append(copy_view)
