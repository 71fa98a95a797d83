"""Lowering of movement. Ops that are views and copies use the CPU's lowerings: they only call
`ctx.view`, `ctx.copy` and `ctx.read_sizes`. Pad, roll, tables and sequences have kernels here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bitwright.backends.cpu.kernels.movement import lower_data_sizes, lower_gather
from bitwright.backends.cpu.kernels.movement import lower_movement as cpu
from bitwright.backends.cpu.kernels.movement.lower_data_sizes import known_sizes, read_integers
from bitwright.backends.gpu.codegen.source import KernelSource
from bitwright.backends.gpu.kernels.elementwise.elementwise import FLAT, flat, flat_grid
from bitwright.backends.gpu.kernels.elementwise.lower_elementwise import table_lookup, word_type
from bitwright.backends.gpu.kernels.movement.window import window_source
from bitwright.backends.gpu.lowering.context import (
    LOWERINGS,
    GpuLowering,
    NoKernelError,
    RegionView,
    lowers,
)
from bitwright.ir.dim import Size, product
from bitwright.ir.dtype import i64
from bitwright.ir.graph import Node, Value
from bitwright.ir.types import normalize_axis
from bitwright.lir.buffer import View

assert lower_gather.__name__  # importing it makes a gather at a constant index a view

LOWERINGS |= {
    "concat": cpu.lower_concat,
    "tile": cpu.lower_tile,
    "reshape": lower_data_sizes.lower_reshape,
    "expand": lower_data_sizes.lower_expand,
    "slice": lower_data_sizes.lower_slice,
    "require": lower_data_sizes.lower_require,
}


@lowers("pad")
def lower_pad(ctx: GpuLowering, node: Node, region: RegionView) -> None:
    pads = node.attrs.get("pads")
    x = node.inputs[0]
    assert x is not None
    if pads is None:
        pads = read_integers(ctx, node, node.inputs[2])
        ends = zip(pads[: x.rank], x.shape, pads[x.rank :], strict=True)
        known_sizes(ctx, node, [before + size + after for before, size, after in ends])
    value = node.inputs[1] if len(node.inputs) > 1 else None
    _window(ctx, node, pads[: len(pads) // 2], node.attrs["mode"], value)


@lowers("roll")
def lower_roll(ctx: GpuLowering, node: Node, region: RegionView) -> None:
    """A shift is wrap padding at the begin with the same amount cropped at the end."""
    begins = [0] * node.outputs[0].rank
    for shift, axis in zip(node.attrs["shifts"], node.attrs["axes"], strict=True):
        begins[axis % len(begins)] += shift
    _window(ctx, node, begins, "wrap", None)


def _window(
    ctx: GpuLowering, node: Node, begins: Sequence[Size], mode: str, value: Value | None
) -> None:
    source = node.inputs[0]
    assert source is not None
    element = word_type(source.dtype)
    if not source.rank:
        raise NoKernelError("the operand has no axis")
    if mode not in ("constant", "edge", "wrap", "reflect"):
        raise NoKernelError(f"there is no kernel for mode {mode}")
    x, y = ctx.view(source), ctx.output(node.outputs[0])
    empty = [size for size in x.shape if size == 0]
    if empty and mode != "constant":
        raise NoKernelError("the operand is empty")
    fill = ctx.constant(np.zeros(1, source.dtype.numpy), "zero")
    if value is not None:
        fill = ctx.contiguous(value)
    sizes: dict[str, Size] = {"count": y.count}
    columns = zip(y.shape, x.shape, begins, x.strides, strict=True)
    for axis, (n, m, b, stride) in enumerate(columns):
        sizes |= {f"n{axis}": n, f"m{axis}": m, f"b{axis}": b, f"x{axis}": stride}
    kernel = ctx.kernel(window_source(mode, source.rank, element))
    ctx.call(kernel, node, {"x": x, "value": fill, "y": y}, sizes)


@lowers("lookup_table")
def lower_lookup_table(ctx: GpuLowering, node: Node, region: RegionView) -> None:
    """In the memory order of x. The table is read through the cache; it is 256 bytes."""
    x, table = node.operands
    view = ctx.contiguous(x)
    table_lookup(ctx, node, view, ctx.contiguous(table), ctx.output(node.outputs[0]))


@lowers("iota")
def lower_iota(ctx: GpuLowering, node: Node, region: RegionView) -> None:
    ctx.require(node.outputs[0].dtype)
    y = ctx.output(node.outputs[0])
    body = f"{flat()}\ntl.store(y + i, i.to(y.dtype.element_ty), mask)"
    source = KernelSource(f"iota_{y.dtype}", body, {"y": y.dtype}, ("count",), FLAT, flat_grid)
    ctx.call(ctx.kernel(source), node, {"y": y}, {"count": node.attrs["length"]})


@lowers("sizes", "shape_of")
def lower_sizes(ctx: GpuLowering, node: Node, region: RegionView) -> None:
    values = node.attrs["values"] if node.op == "sizes" else next(node.operands).shape
    names = tuple(f"v{n}" for n in range(len(values)))
    lines = [
        f"tl.store(y + {n}, {name} + tl.full([], 0, tl.int64))" for n, name in enumerate(names)
    ]
    y = ctx.output(node.outputs[0])
    source = KernelSource(
        "shape_of_i64", "\n".join(lines) or "pass", {"y": i64}, names, FLAT, lambda _: (1,)
    )
    ctx.call(ctx.kernel(source), node, {"y": y}, dict(zip(names, values, strict=True)))


@lowers("one_hot")
def lower_one_hot(ctx: GpuLowering, node: Node, region: RegionView) -> None:
    """y[p, d, q] = values[1] where indices[p, q] mod depth == d, else values[0]."""
    indices, values, *rest = node.operands
    if rest:
        raise NoKernelError("the depth is known only at run time")
    axis = normalize_axis(node.attrs["axis"], indices.rank + 1)
    depth = node.outputs[0].shape[axis]
    index, element = lower_gather.index_type(indices), word_type(values.dtype)
    body = f"""
{flat()}
column = i % q
place = (i // q) % depth
at = tl.load(indices + (i // q // depth) * q + column, mask, other=0).to(tl.int64)
hit = (at == place) | (at + depth == place)
tl.store(y + i, tl.where(hit, tl.load(values + 1), tl.load(values)), mask)
"""
    y = ctx.output(node.outputs[0])
    source = KernelSource(
        f"one_hot_{element.bits}",
        body,
        {"indices": index, "values": element, "y": element},
        ("count", "q", "depth"),
        FLAT,
        flat_grid,
    )
    sizes: dict[str, Size] = {"count": y.count, "q": product(indices.shape[axis:]), "depth": depth}
    views = {"indices": ctx.contiguous(indices), "values": ctx.contiguous(values), "y": y}
    ctx.call(ctx.kernel(source), node, views, sizes)


@lowers("trilu")
def lower_trilu(ctx: GpuLowering, node: Node, region: RegionView) -> None:
    x, *rest = node.operands
    element = word_type(x.dtype)
    k = "tl.load(k)" if rest else "k"
    sign = ">=" if node.attrs["upper"] else "<="
    body = f"""
{flat()}
row = (i // columns) % rows
column = i % columns
found = tl.load(x + i, mask, other=0)
tl.store(y + i, tl.where(column - row {sign} {k}, found, tl.zeros_like(found)), mask)
"""
    y = ctx.output(node.outputs[0])
    pointers = {"x": element, "y": element}
    views: dict[str, View] = {"x": ctx.contiguous(x), "y": y}
    sizes: dict[str, Size] = {"count": y.count, "rows": x.shape[-2], "columns": x.shape[-1]}
    if rest:
        pointers["k"], views["k"] = rest[0].dtype, ctx.contiguous(rest[0])
    else:
        sizes["k"] = node.attrs["k"]
    side = "upper" if node.attrs["upper"] else "lower"
    source = KernelSource(
        f"trilu_{side}_{element.bits}", body, pointers, tuple(sizes), FLAT, flat_grid
    )
    ctx.call(ctx.kernel(source), node, views, sizes)


@lowers("bitcast")
def lower_bitcast(ctx: GpuLowering, node: Node, region: RegionView) -> None:
    (x,) = node.operands
    to = node.attrs["to"]
    if to.bits < 8 or to.name == "bool" or x.dtype.bits < 8:
        raise NoKernelError("a type does not use all bits of its bytes")
    ctx.copy(ctx.view(x), ctx.output(node.outputs[0]), node.name)
