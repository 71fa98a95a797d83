"""Lowering of resize with known sizes: tables of pixels and weights for the resized axes.

    y[i] = sum over taps t of weight[i, t] * x[index[i, t]], axis inside axis

The reference computes the tables at compile time; a program computes BLOCK results in memory order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.backends.cpu.lowering.layout import image_order
from bitwright.backends.gpu.codegen.expression import as_stored, loaded
from bitwright.backends.gpu.codegen.source import Config, KernelSource
from bitwright.backends.gpu.codegen.types import triton_type, widened
from bitwright.backends.gpu.kernels.movement.indices import decode, flat_grid, flat_index, word
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
    places = {axis: f"p{at}" for at, axis in enumerate(order)}
    loops: list[str] = []
    offset, weight = "flat * 0", "1.0"
    scales = attrs.get("scales") or (None,) * x.rank
    for axis in range(x.rank):
        found = _tables(node, x.shape[axis], y.shape[axis], scales[axis])
        if found is None:
            offset += f" + {places[axis]} * x_s{axis}"
            continue
        index, weights = found
        taps = index.shape[1]
        views[f"i{axis}"] = ctx.constant(index, f"{node.name}.pixels{axis}")
        pad = "    " * len(loops)
        loops.append(f"{pad}for t{axis} in range(0, {taps}):")
        spot = f"{places[axis]} * {taps} + t{axis}"
        offset += f" + tl.load(i{axis} + {spot}, ok, other=0).to(tl.int64) * x_s{axis}"
        if weights is not None:
            views[f"w{axis}"] = ctx.constant(weights.astype(wide.numpy), f"{node.name}.w{axis}")
            weight += f" * tl.load(w{axis} + {spot}, ok, other=0.0)"
    pad = "    " * len(loops)
    type_ = triton_type(element if is_nearest else widened(element))
    value = loaded(f"tl.load(x + {offset}, ok, other=0)", element)
    step = f"found = {value}" if is_nearest else f"found += {value} * ({weight})"
    names = [f"n{axis}" for axis in order]
    lines = [
        flat_index(y.count, view.count),
        f"ok = flat < {' * '.join(names)}",
        *decode("flat", names, "p"),
        f"found = tl.zeros([BLOCK], {type_})",
        *loops,
        f"{pad}{step}",
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


def _tables(
    node: Node, size: Size, count: Size, scale: float | None
) -> tuple[Array, Array | None] | None:
    """Pixels and weights of one axis; None if it stays as it is."""
    if size == count and scale in (None, 1.0):
        return None
    if not isinstance(size, int) or not isinstance(count, int):
        raise NoKernelError("a resized axis has no known size")
    if count and not size:
        raise NoKernelError("an empty axis is resized")
    where = coordinates_on_axis(node.attrs["coordinate_mode"], size, count, scale, 0.0, 1.0)
    found = axis_taps(size, where, scale, dict(node.attrs))
    return None if found is None else (found[0].astype(i32.numpy), found[1])
