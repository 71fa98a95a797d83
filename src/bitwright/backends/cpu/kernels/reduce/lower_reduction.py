"""Lowering of reductions over any axes: lanes along a reduced axis, or along kept columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bitwright.backends.cpu.kernels.reduce.reduce import Reduction, emit_reduction
from bitwright.backends.cpu.kernels.reduce.reduction import OPS, ReductionOp
from bitwright.backends.cpu.lowering import region as regions
from bitwright.backends.cpu.lowering.context import Lowering, RegionView, lowers
from bitwright.ir.dim import Size
from bitwright.ir.graph import Node
from bitwright.ir.types import normalize_axis
from bitwright.lir.buffer import View

SHORT = 6
"""The longest contiguous axis that would leave most lanes empty."""


@lowers(*OPS)
def lower_reduction(ctx: Lowering, node: Node, region: RegionView) -> None:
    anchor = region.anchor
    assert anchor is not None
    before = regions.split(region).before
    shape = anchor.inputs[0].shape  # type: ignore[union-attr]
    regions.require_elements(before.dtype)
    axes = [normalize_axis(axis, len(shape)) for axis in anchor.attrs["axes"]]
    found = arrange(regions.operand_views(ctx, region, before.inputs, shape), axes)
    op = ReductionOp(anchor.op, before.dtype)
    x = regions.Reads("x", found.views)
    kernel = Reduction(op, before, x, found.kept, found.reduced, found.along_rows)
    family = f"{anchor.op}_{before.dtype}"
    code = ctx.kernel(family, kernel.key, lambda m, name: emit_reduction(m, name, kernel))
    y = ctx.output(node.outputs[0])
    ctx.call(code, node, {**x.pointers, "y": y}, found.sizes | x.sizes, why=found.why)


@dataclass(frozen=True)
class Arrangement:
    """Views with axes in the order kept, reduced, lanes."""

    views: tuple[View, ...]
    kept: int
    reduced: int
    """The number of axes of each kind, without the last."""
    along_rows: bool

    @property
    def sizes(self) -> dict[str, Size]:
        shape = self.views[0].shape
        found = {f"k{axis}": shape[axis] for axis in range(self.kept)}
        found |= {f"r{axis}": shape[self.kept + axis] for axis in range(self.reduced)}
        return found | {"columns": shape[-1]}

    @property
    def why(self) -> str:
        return "lanes along a reduced axis" if self.along_rows else "lanes along kept columns"


def arrange(views: Sequence[View], axes: Sequence[int]) -> Arrangement:
    """The loop order for operands that are reduced over `axes`."""
    first = views[0]
    rank = len(first.shape)
    kept = [axis for axis in range(rank) if axis not in axes and first.shape[axis] != 1]
    reduced = [axis for axis in range(rank) if axis in axes and first.shape[axis] != 1]
    close = [axis for axis in reduced if first.strides[axis] == 1]
    if close and kept and _is_short(first.shape[close[0]]):
        close = []
    elif not close and not (kept and first.strides[kept[-1]] == 1):
        close = reduced[-1:]
    if close or not kept:
        reduced = [axis for axis in reduced if axis not in close[:1]] + close[:1]
    outer, inner = _group(views, kept), _group(views, reduced)
    if close or not kept:
        return Arrangement(
            _joined(outer, inner), len(outer[0].shape), len(inner[0].shape) - 1, True
        )
    columns = [replace(v, shape=v.shape[-1:], strides=v.strides[-1:]) for v in outer]
    outer = [replace(v, shape=v.shape[:-1], strides=v.strides[:-1]) for v in outer]
    return Arrangement(
        _joined(outer, inner, columns), len(outer[0].shape), len(inner[0].shape), False
    )


def _is_short(size: Size) -> bool:
    return isinstance(size, int) and size <= SHORT


def _group(views: Sequence[View], axes: Sequence[int]) -> list[View]:
    """The views restricted to these axes, collapsed; at least one axis."""
    found = regions.collapse(
        [
            replace(
                view,
                shape=tuple(view.shape[axis] for axis in axes),
                strides=tuple(view.strides[axis] for axis in axes),
            )
            for view in views
        ]
    )
    if found[0].shape:
        return found
    return [replace(view, shape=(1,), strides=(0,)) for view in found]


def _joined(*groups: Sequence[View]) -> tuple[View, ...]:
    return tuple(
        replace(
            parts[0],
            shape=tuple(size for part in parts for size in part.shape),
            strides=tuple(stride for part in parts for stride in part.strides),
        )
        for parts in zip(*groups, strict=True)
    )
