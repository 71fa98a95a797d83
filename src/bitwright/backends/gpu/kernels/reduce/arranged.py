"""Operands of a reduction as tiles: kept positions by reduced positions.

Views have the kept axes first, each group with as few axes as possible. A tile's positions are flat
indices `k` [ROWS, 1] and `r` [1, BLOCK] of the groups, split by division.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bitwright.backends.cpu.lowering.region import Part, broadcast, collapse
from bitwright.backends.gpu.codegen.expression import loaded, render
from bitwright.backends.gpu.kernels.movement.indices import decode
from bitwright.backends.gpu.lowering.context import GpuLowering, RegionView
from bitwright.backends.gpu.lowering.operands import require_part
from bitwright.ir.dim import Size, product
from bitwright.ir.dtype import DType
from bitwright.lir.buffer import View


@dataclass(frozen=True)
class Arranged:
    part: Part
    views: Mapping[str, View]
    kept_axes: int
    """The first axes of every view."""

    @classmethod
    def of(
        cls,
        ctx: GpuLowering,
        region: RegionView,
        part: Part,
        shape: Sequence[Size],
        axes: list[int],
    ) -> Arranged:
        require_part(ctx, part)
        views = [broadcast(ctx.view(region.outer(v)), shape) for v in part.inputs]
        kept = [axis for axis in range(len(shape)) if axis not in axes]
        outer, inner = _group(views, kept), _group(views, axes)
        joined = [
            replace(a, shape=(*a.shape, *b.shape), strides=(*a.strides, *b.strides))
            for a, b in zip(outer, inner, strict=True)
        ]
        named = {f"x{n}": view for n, view in enumerate(joined)}
        return cls(part, named, len(outer[0].shape) if outer else 0)

    @property
    def shape(self) -> tuple[Size, ...]:
        return next(iter(self.views.values())).shape

    @property
    def kept_count(self) -> Size:
        return product(self.shape[: self.kept_axes])

    @property
    def reduced(self) -> Size:
        return product(self.shape[self.kept_axes :])

    @property
    def pointers(self) -> dict[str, DType]:
        return {name: view.dtype for name, view in self.views.items()}

    @property
    def sizes(self) -> dict[str, Size]:
        found: dict[str, Size] = {"kept": self.kept_count, "reduced": self.reduced}
        found |= {f"n{axis}": size for axis, size in enumerate(self.shape)}
        for name, view in self.views.items():
            found |= {f"{name}_s{axis}": stride for axis, stride in enumerate(view.strides)}
        return found

    @property
    def along_rows(self) -> bool:
        """Whether neighbours in memory are reduced, not kept."""
        view = next(iter(self.views.values()))
        strides = view.strides
        inner = any(s == 1 for s in strides[self.kept_axes :])
        return inner or not any(s == 1 for s in strides[: self.kept_axes])

    def kept_lines(self) -> list[str]:
        names = [f"n{axis}" for axis in range(self.kept_axes)]
        return decode("k", names, "k") if names else []

    def value_lines(self, mask: str, where: str = "r") -> list[str]:
        """Statements that compute `x`, the tile of the prologue's result."""
        rank = len(self.shape)
        names = [f"n{axis}" for axis in range(self.kept_axes, rank)]
        lines = decode(where, names, "r") if names else []
        places = [f"k{axis}" for axis in range(self.kept_axes)]
        places += [f"r{axis}" for axis in range(len(names))]
        for name, view in self.views.items():
            offset = " + ".join(f"{p} * {name}_s{axis}" for axis, p in enumerate(places)) or "0"
            other = "0.0" if view.dtype.is_float else "0"
            load = f"tl.load({name} + {offset}, {mask}, other={other})"
            lines.append(f"{name}_x = {loaded(load, view.dtype)}")
        steps, (found,) = render(self.part.expression, [f"{name}_x" for name in self.views])
        return [*lines, *steps, f"x = {found.text}"]


def _group(views: Sequence[View], axes: Sequence[int]) -> list[View]:
    """The views restricted to these axes, with as few axes as possible and at least one."""
    found = collapse(
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


def tile(arranged: Arranged) -> dict[str, int]:
    """ROWS and BLOCK of a tile of 4096 elements or fewer."""
    reduced = arranged.reduced
    if arranged.along_rows:
        block = 1024
        if isinstance(reduced, int):
            block = min(block, max(16, 1 << max(reduced - 1, 0).bit_length()))
        return {"ROWS": max(1, min(64, 1024 // block)), "BLOCK": block}
    return {"ROWS": 64, "BLOCK": 16}


MAX_SPLITS = 64


def split_count(arranged: Arranged) -> int:
    """How many programs share the reduced positions of a tile of rows, by sizes alone."""
    kept, reduced = arranged.kept_count, arranged.reduced
    if not isinstance(kept, int) or not isinstance(reduced, int):
        return 1
    programs = -(-kept // tile(arranged)["ROWS"])
    return max(1, min(MAX_SPLITS, reduced // 8192, 256 // max(programs, 1)))
