"""Lowering of resize, axis inside axis:

    y[i] = sum over taps t of weight[i, t] * x[index[i, t]]

The reference computes tables of pixels and weights at compile time for axes of known sizes; for
others the kernel computes them by the reference's formulas in f64 (`computed_axis`). A program
computes BLOCK results in memory order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.backends.cpu.lowering.layout import image_order
from bitwright.backends.gpu.codegen.expression import as_stored, loaded
from bitwright.backends.gpu.codegen.source import Config, KernelSource
from bitwright.backends.gpu.codegen.types import triton_type, widened
from bitwright.backends.gpu.kernels.movement.indices import (
    decode,
    flat_grid,
    flat_index,
    reach,
    word,
)
from bitwright.backends.gpu.lowering.context import (
    GpuLowering,
    NoKernelError,
    RegionView,
    lowers,
)
from bitwright.ir.dim import Size
from bitwright.ir.dtype import DType, f32, f64, i32
from bitwright.ir.graph import Node
from bitwright.lir.buffer import View
from bitwright.ops.vision.resize import CROP, axis_taps, coordinates_on_axis

Array = np.ndarray[Any, Any]


@lowers("resize")
def lower_resize(ctx: GpuLowering, node: Node, region: RegionView) -> None:
    x, result = node.inputs[0], node.outputs[0]
    assert x is not None
    attrs = node.attrs
    if attrs["coordinate_mode"] == CROP or attrs.get("sizes") is None:
        raise NoKernelError("there is no kernel for crops and for sizes known at run time")
    is_nearest = attrs["mode"] == "nearest"
    if x.dtype.is_integer and not is_nearest:
        raise NoKernelError(f"there is no kernel for interpolated {x.dtype}")
    element = word(x.dtype) if is_nearest else x.dtype
    ctx.require(element)
    order = image_order(ctx.view(x))
    view, y = ctx.ordered(x, order), ctx.output(result, order)
    wide = f64 if element == f64 else f32
    views: dict[str, View] = {"x": view}
    sizes: dict[str, Size] = {f"n{axis}": size for axis, size in enumerate(y.shape)}
    sizes |= {f"x_s{axis}": stride for axis, stride in enumerate(view.strides)}
    axes = _Axes(ctx, node, wide)
    for at, axis in enumerate(order):
        axes.add(axis, f"p{at}")
    views |= axes.views
    sizes |= axes.sizes
    type_ = triton_type(element if is_nearest else widened(element))
    value = loaded(f"tl.load(x + {axes.offset}, ok, other=0)", element)
    scaled = f"{value} * ({axes.weight}).to({triton_type(wide)})" if axes.depth else value
    step = f"found = {value}" if is_nearest else f"found += {scaled}"
    names = [f"n{axis}" for axis in order]
    lines = [
        flat_index(y.count, reach(view)),
        f"ok = flat < {' * '.join(names)}",
        *decode("flat", names, "p"),
        *axes.before,
        f"found = tl.zeros([BLOCK], {type_})",
        *axes.loops,
        "    " * axes.depth + step,
        f"tl.store(y + flat, {as_stored('found', element)}, ok)",
    ]
    views["y"] = y
    pointers: dict[str, DType] = {name: v.dtype for name, v in views.items()}
    pointers |= {"x": element, "y": element}
    source = KernelSource(
        f"resize_{attrs['mode']}_{element}",
        "\n".join(lines),
        pointers,
        tuple(sizes),
        (Config({"BLOCK": 256}, 4, 1),),
        flat_grid(names),
    )
    ctx.call(ctx.kernel(source), node, views, sizes, why="tables of pixels and weights")


class _Axes:
    """The statements of all axes: what comes before the loops over taps, and these loops. They
    leave the offset of a pixel in x and its weight."""

    def __init__(self, ctx: GpuLowering, node: Node, wide: DType) -> None:
        self.ctx, self.node, self.wide = ctx, node, wide
        self.views: dict[str, View] = {}
        self.sizes: dict[str, Size] = {}
        self.before: list[str] = []
        self.loops: list[str] = []
        self.depth = 0
        self.offset, self.weight = "flat * 0", "1.0"

    def add(self, axis: int, place: str) -> None:
        """`place` is the result's index on this axis."""
        x, y = self.node.inputs[0], self.node.outputs[0]
        assert x is not None
        size, count = x.shape[axis], y.shape[axis]
        scale = (self.node.attrs.get("scales") or (None,) * x.rank)[axis]
        found = None
        if size == count and scale in (None, 1.0):
            self.offset += f" + {place} * x_s{axis}"
        elif not isinstance(size, int) or not isinstance(count, int):
            self.sizes[f"m{axis}"] = size
            before, loop = computed_axis(axis, place, scale, dict(self.node.attrs))
            self.before += before
            self.offset += f" + j{axis} * x_s{axis}"
            if loop:
                self._loop(*loop)
                self.weight += f" * k{axis}"
        elif (found := _tables(self.node, size, count, scale)) is None:
            self.offset += f" + {place} * x_s{axis}"
        else:
            self._read(axis, place, *found)

    def _read(self, axis: int, place: str, index: Array, weights: Array | None) -> None:
        """Read pixels and weights from tables."""
        ctx, name, taps = self.ctx, self.node.name, index.shape[1]
        self.views[f"i{axis}"] = ctx.constant(index, f"{name}.pixels{axis}")
        self._loop(f"for t{axis} in range(0, {taps}):")
        spot = f"{place} * {taps} + t{axis}"
        self.offset += f" + tl.load(i{axis} + {spot}, ok, other=0).to(tl.int64) * x_s{axis}"
        if weights is not None:
            array = weights.astype(self.wide.numpy)
            self.views[f"w{axis}"] = ctx.constant(array, f"{name}.w{axis}")
            self.weight += f" * tl.load(w{axis} + {spot}, ok, other=0.0)"

    def _loop(self, head: str, *body: str) -> None:
        self.loops.append("    " * self.depth + head)
        self.depth += 1
        self.loops += ["    " * self.depth + line for line in body]


def _tables(
    node: Node, size: int, count: int, scale: float | None
) -> tuple[Array, Array | None] | None:
    """Pixels and weights of one axis; None if it stays as it is."""
    if count and not size:
        raise NoKernelError("an empty axis is resized")
    where = coordinates_on_axis(node.attrs["coordinate_mode"], size, count, scale, 0.0, 1.0)
    found = axis_taps(size, where, scale, dict(node.attrs))
    return None if found is None else (found[0].astype(i32.numpy), found[1])


def computed_axis(
    axis: int, place: str, scale: float | None, attrs: dict[str, Any]
) -> tuple[list[str], list[str]]:
    """Statements for an axis of m pixels whose n results are at `place`: what comes before the
    loops, and a loop over taps (none for one tap). They leave the pixel `j` and the weight `k`."""
    a = axis
    width = f"count{a}"
    before = [
        f"size{a} = tl.cast(m{a}, tl.float64)",
        f"count{a} = tl.cast(n{a}, tl.float64)",
        f"place{a} = {place}.to(tl.float64)",
    ]
    if scale is not None:
        given, width = f"given{a}", f"width{a}"
        most = f"tl.maximum(tl.abs({given}), tl.abs(count{a}))"
        before += [
            f"{given} = tl.full([], {float(scale)!r}, tl.float64) * size{a}",
            f"near{a} = tl.abs({given} - count{a}) <= {most} * tl.full([], 1e-6, tl.float64)",
            f"{width} = tl.where(near{a}, count{a}, {given})",
        ]
    centred = f"(place{a} + 0.5) * size{a} / {width} - 0.5"
    coordinate = {
        "align_corners": f"tl.where({width} > 1, place{a} * (size{a} - 1) / ({width} - 1), 0.0)",
        "asymmetric": f"place{a} * size{a} / {width}",
        "pytorch_half_pixel": f"tl.where(count{a} > 1, {centred}, 0.0)",
        "half_pixel": centred,
        "half_pixel_symmetric": f"({centred}) + size{a} / 2 * (1 - count{a} / {width})",
    }[attrs["coordinate_mode"]]
    before.append(f"c{a} = {coordinate}")
    if attrs["mode"] == "nearest":
        rounded = {
            "floor": f"tl.floor(c{a})",
            "ceil": f"tl.ceil(c{a})",
            "round_prefer_ceil": f"tl.floor(c{a} + 0.5)",
            "round_prefer_floor": f"tl.ceil(c{a} - 0.5)",
        }[attrs["nearest_mode"]]
        return [*before, f"q{a} = {rounded}", _inside(a)], []
    if attrs["antialias"]:
        raise NoKernelError("an axis without a known size is resized with antialiasing")
    first, last = (-1, 2) if attrs["mode"] == "cubic" else (0, 1)
    before.append(f"left{a} = tl.ceil(c{a}) - 1")
    if attrs["exclude_outside"]:
        before.append(f"total{a} = place{a} * 0")
        for tap in range(first, last + 1):
            before += [f"q{a} = left{a} + ({tap})", *_weight(a, attrs), f"total{a} += k{a}"]
    loop = [
        f"for t{a} in range({first}, {last + 1}):",
        f"q{a} = left{a} + t{a}",
        *_weight(a, attrs),
    ]
    if attrs["exclude_outside"]:
        loop.append(f"k{a} = k{a} / tl.where(total{a} == 0, 1.0, total{a})")
    return before, [*loop, _inside(a)]


def _inside(a: int) -> str:
    return f"j{a} = tl.maximum(tl.minimum(q{a}, size{a} - 1), 0.0).to(tl.int64)"


def _weight(a: int, attrs: dict[str, Any]) -> list[str]:
    """Statements that compute the weight `k` of the pixel `q` for the coordinate `c`."""
    lines = [f"d{a} = tl.abs(q{a} - c{a})"]
    if attrs["mode"] == "cubic":
        cubic = float(attrs["cubic_coeff_a"])
        near = f"((b{a} + 2) * d{a} - (b{a} + 3)) * d{a} * d{a} + 1"
        far = f"((b{a} * d{a} - 5 * b{a}) * d{a} + 8 * b{a}) * d{a} - 4 * b{a}"
        lines.append(f"b{a} = tl.full([], {cubic!r}, tl.float64)")
        lines.append(f"k{a} = tl.where(d{a} <= 1, {near}, tl.where(d{a} < 2, {far}, 0.0))")
    else:
        lines.append(f"k{a} = tl.maximum(1.0 - d{a}, 0.0)")
    if attrs["exclude_outside"]:
        lines.append(f"k{a} = tl.where((q{a} < 0) | (q{a} >= size{a}), 0.0, k{a})")
    return lines
