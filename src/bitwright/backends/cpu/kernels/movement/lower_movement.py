"""Lowering of movement ops that copy into parts of their result: concat, tile, pad and roll."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from bitwright.backends.cpu.kernels.movement.lower_data_sizes import known_sizes, read_integers
from bitwright.backends.cpu.kernels.movement.lower_gather import word_width
from bitwright.backends.cpu.kernels.movement.pad import emit_pad
from bitwright.backends.cpu.lowering.context import Lowering, RegionView, lowers
from bitwright.backends.cpu.lowering.layout import image_order
from bitwright.ir.dim import Size
from bitwright.ir.graph import Node, Value
from bitwright.ir.types import normalize_axis
from bitwright.lir.buffer import View, row_major


@lowers("concat")
def lower_concat(ctx: Lowering, node: Node, region: RegionView) -> None:
    """Copy each operand into its slice of the result, which uses the layout of an image operand.

    Operands that a kernel wrote there (`place_in_concat`) stay.
    """
    result = node.outputs[0]
    orders = [image_order(ctx.view(value)) for value in node.operands]
    order = max(orders, key=lambda order: order != tuple(sorted(order)))
    y = ctx.view(result) if ctx.is_placed(result) else ctx.output(result, order)
    axis = normalize_axis(node.attrs["axis"], len(y.shape))
    start: Size = 0
    for value in node.operands:
        count = value.shape[axis]
        source, target = ctx.view(value), y.slice(axis, start, count, 1)
        if source.buffer is not target.buffer:
            ctx.copy(source, target, node.name)
        start = start + count


@lowers("tile")
def lower_tile(ctx: Lowering, node: Node, region: RegionView) -> None:
    """Split every axis in two; the outer one has stride 0."""
    value = node.inputs[0]
    assert value is not None
    repeats = node.attrs.get("repeats") or read_integers(ctx, node, node.inputs[1])
    if len(node.inputs) > 1:
        known_sizes(ctx, node, [a * b for a, b in zip(repeats, value.shape, strict=True)])
    x, y = ctx.view(value), ctx.output(node.outputs[0])
    shape = tuple(s for pair in zip(repeats, x.shape, strict=True) for s in pair)
    strides = tuple(s for stride in x.strides for s in (0, stride))
    source = replace(x, shape=shape, strides=strides)
    ctx.copy(source, replace(y, shape=shape, strides=row_major(shape)), node.name)


# pad and roll


@dataclass(frozen=True)
class _Axis:
    """The sizes of result and source, the begin of the source in the result, its stride."""

    n: Size
    m: Size
    b: Size
    x: Size

    @property
    def is_whole(self) -> bool:
        """Whether the axis is neither padded nor cropped."""
        return self.n == self.m and self.b == 0


@lowers("pad")
def lower_pad(ctx: Lowering, node: Node, region: RegionView) -> None:
    pads = node.attrs.get("pads")
    x = node.inputs[0]
    assert x is not None
    if pads is None:
        pads = read_integers(ctx, node, node.inputs[2])
        ends = zip(pads[: x.rank], x.shape, pads[x.rank :], strict=True)
        known_sizes(ctx, node, [before + size + after for before, size, after in ends])
    value = node.inputs[1] if len(node.inputs) > 1 else None
    _lower_window(ctx, node, pads[: len(pads) // 2], node.attrs["mode"], value)


@lowers("roll")
def lower_roll(ctx: Lowering, node: Node, region: RegionView) -> None:
    """A shift is wrap padding at the begin with the same amount cropped at the end."""
    begins = [0] * node.outputs[0].rank
    for shift, axis in zip(node.attrs["shifts"], node.attrs["axes"], strict=True):
        begins[axis % len(begins)] += shift
    _lower_window(ctx, node, begins, "wrap", None)


def _lower_window(
    ctx: Lowering, node: Node, begins: Sequence[Size], mode: str, value: Value | None
) -> None:
    source = node.inputs[0]
    assert source is not None
    x = ctx.view(source)
    order = image_order(x)
    y = ctx.output(node.outputs[0], order).transpose(order)
    fills = None if value is None else ctx.view(value)
    pad_view(ctx, node, x.transpose(order), y, [begins[axis] for axis in order], mode, fills)


def pad_view(
    ctx: Lowering,
    node: Node,
    x: View,
    y: View,
    begins: Sequence[Size],
    mode: str = "constant",
    fills: View | None = None,
) -> None:
    """Append a call that pads x into a row-major y, with `begins` elements before it per axis."""
    axes = _merged(x, y.shape, begins, mode)
    if axes[-1].x != 1:
        x = ctx.packed(x, node.name)
        axes = _merged(x, y.shape, begins, mode)
    if fills is None:
        fills = ctx.constant(np.zeros(1, x.dtype.numpy), "zero")
    key = mode, len(axes), word_width(x.dtype)
    family = f"pad_{mode}_{8 * key[2]}bit"
    kernel = ctx.kernel(family, key, lambda module, name: emit_pad(module, name, *key))
    sizes = {f"{o}{i}": getattr(axis, o) for i, axis in enumerate(axes) for o in "nmb"}
    strides = row_major([axis.n for axis in axes])
    sizes |= {f"x{i}": axis.x for i, axis in enumerate(axes[:-1])}
    sizes |= {f"y{i}": stride for i, stride in enumerate(strides[:-1])}
    sizes["node"] = ctx.number(node)
    ctx.call(kernel, node, {"x": x, "y": y, "value": fills, "fault": ctx.fault()}, sizes)


def _merged(x: View, shape: Sequence[Size], begins: Sequence[Size], mode: str) -> list[_Axis]:
    """The axes after merging unpadded axes into the one before them where x is contiguous."""
    found: list[_Axis] = []
    for axis in map(_Axis, shape, x.shape, begins, x.strides):
        if axis.n == 1 and axis.is_whole:
            continue
        if found and axis.is_whole and found[-1].x == axis.x * axis.m:
            outer = found[-1]
            if outer.is_whole or mode in ("constant", "wrap"):
                found[-1] = _Axis(outer.n * axis.n, outer.m * axis.m, outer.b * axis.n, axis.x)
                continue
        found.append(axis)
    return found or [_Axis(1, 1, 0, 1)]
