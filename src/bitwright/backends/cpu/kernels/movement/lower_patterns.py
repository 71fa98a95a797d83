"""Lowering of ops whose results depend on positions (`kernels.movement.patterns`)."""

from __future__ import annotations

from bitwright.backends.cpu.kernels.movement import lower_gather, patterns
from bitwright.backends.cpu.lowering.context import Lowering, NoKernelError, RegionView, lowers
from bitwright.backends.cpu.lowering.region import require_elements
from bitwright.ir.dim import Size, product
from bitwright.ir.graph import Node
from bitwright.ir.types import normalize_axis


@lowers("iota")
def lower_iota(ctx: Lowering, node: Node, region: RegionView) -> None:
    element = node.outputs[0].dtype
    require_elements(element)
    family = f"iota_{element}"
    kernel = ctx.kernel(family, element, lambda m, name: patterns.emit_iota(m, name, element))
    y = ctx.output(node.outputs[0])
    ctx.call(kernel, node, {"y": y}, {"count": node.attrs["length"]})


@lowers("sizes", "shape_of")
def lower_sizes(ctx: Lowering, node: Node, region: RegionView) -> None:
    values = node.attrs["values"] if node.op == "sizes" else next(node.operands).shape
    count = len(values)
    kernel = ctx.kernel("shape_of_i64", count, lambda m, name: patterns.emit_sizes(m, name, count))
    y = ctx.output(node.outputs[0])
    ctx.call(kernel, node, {"y": y}, {f"v{j}": value for j, value in enumerate(values)})


@lowers("one_hot")
def lower_one_hot(ctx: Lowering, node: Node, region: RegionView) -> None:
    indices, values, *rest = node.operands
    axis = normalize_axis(node.attrs["axis"], indices.rank + 1)
    depth = node.outputs[0].shape[axis]
    if rest:
        ctx.read_sizes(node, rest, [depth], lambda arrays, _: [int(arrays[0].item())])
    key = lower_gather.index_type(indices), lower_gather.word_width(values.dtype)
    family = f"one_hot_{8 * key[1]}bit_{key[0]}"
    kernel = ctx.kernel(family, key, lambda m, name: patterns.emit_one_hot(m, name, *key))
    pointers = {"i": ctx.contiguous(indices), "values": ctx.contiguous(values)}
    sizes = {"p": product(indices.shape[:axis]), "q": product(indices.shape[axis:])}
    sizes["d"] = depth
    ctx.call(kernel, node, {**pointers, "y": ctx.output(node.outputs[0])}, sizes)


@lowers("trilu")
def lower_trilu(ctx: Lowering, node: Node, region: RegionView) -> None:
    x, *rest = node.operands
    key = (
        node.attrs["upper"],
        lower_gather.word_width(x.dtype),
        lower_gather.index_type(rest[0]) if rest else None,
    )
    matrices, (rows, columns) = product(x.shape[:-2]), x.shape[-2:]
    view = lower_gather.grouped(ctx, x, (matrices, rows, columns))
    family = f"trilu_{8 * key[1]}bit"
    kernel = ctx.kernel(family, key, lambda m, name: patterns.emit_trilu(m, name, *key))
    pointers = {"x": view, "y": ctx.output(node.outputs[0])}
    sizes: dict[str, Size] = {"matrices": matrices, "rows": rows, "columns": columns}
    sizes |= {"x0": view.strides[0], "x1": view.strides[1]}
    if rest:
        pointers["k"] = ctx.contiguous(rest[0])
    else:
        sizes["k"] = node.attrs["k"]
    ctx.call(kernel, node, pointers, sizes)


@lowers("reverse_sequence")
def lower_reverse_sequence(ctx: Lowering, node: Node, region: RegionView) -> None:
    x, lengths = node.operands
    batch, time = (normalize_axis(node.attrs[f"{a}_axis"], x.rank) for a in ("batch", "time"))
    if {batch, time} != {0, 1}:
        raise NoKernelError("batch and time are not the first two axes")
    key = time, lower_gather.index_type(lengths)
    kernel = ctx.kernel(
        "reverse_sequence", key, lambda m, name: patterns.emit_reverse_sequence(m, name, *key)
    )
    pointers = {"x": ctx.contiguous(x), "lengths": ctx.contiguous(lengths)}
    sizes: dict[str, Size] = {"n0": x.shape[0], "n1": x.shape[1], "node": ctx.number(node)}
    sizes["bytes"] = product(x.shape[2:]) * lower_gather.byte_width(x.dtype)
    pointers |= {"y": ctx.output(node.outputs[0]), "fault": ctx.fault()}
    ctx.call(kernel, node, pointers, sizes)
