"""Lowering of gather_backward: chains of slices per row, then sums; one element: direct sums."""

from __future__ import annotations

from bitwright.backends.cpu.codegen.emit import computed
from bitwright.backends.cpu.kernels.movement import gather_backward
from bitwright.backends.cpu.kernels.movement.lower_gather import index_type
from bitwright.backends.cpu.lowering.context import Lowering, NoKernelError, RegionView, lowers
from bitwright.ir.dim import Size, max_size, product
from bitwright.ir.graph import Node
from bitwright.ir.types import normalize_axis

ELEMENTS = ("f32", "f64", "f16", "bf16", "i32", "i64")


@lowers("gather_backward")
def lower_gather_backward(ctx: Lowering, node: Node, region: RegionView) -> None:
    dy, indices = node.operands
    result = node.outputs[0]
    if dy.dtype.name not in ELEMENTS:
        raise NoKernelError(f"there is no kernel for sums of {dy.dtype}")
    index = index_type(indices)
    axis = normalize_axis(node.attrs["axis"], result.rank)
    inner, size = product(result.shape[axis + 1 :]), result.shape[axis]
    batches, count = product(result.shape[:axis]), product(indices.shape)
    views = {"dy": ctx.contiguous(dy), "y": ctx.output(result)}
    given = {"i": ctx.contiguous(indices), "fault": ctx.fault()}
    sizes: dict[str, Size] = {"b": batches, "m": count, "size": size}
    number = {"node": ctx.number(node)}
    if inner == 1 and computed(dy.dtype).bits == dy.dtype.bits:
        key = dy.dtype, index
        family = f"gather_backward_direct_{dy.dtype}_{index}"
        kernel = ctx.kernel(family, key, lambda m, n: gather_backward.emit_direct(m, n, *key))
        ctx.call(kernel, node, {**views, **given}, {**sizes, **number}, why="adds in memory")
        return
    links = {
        "head": ctx.scratch(f"{node.name}.head", "i64", max_size(size, 1)),
        "next": ctx.scratch(f"{node.name}.next", "i64", max_size(count, 1)),
    }
    kernel = ctx.kernel(
        f"gather_backward_links_{index}",
        index,
        lambda m, n: gather_backward.emit_links(m, n, index),
    )
    slots = {"m": count, "size": size, **number}
    ctx.call(kernel, node, {**given, **links}, slots, writes=tuple(links))
    group = _group(inner, ctx.target.lanes(computed(dy.dtype).bits))
    kernel = ctx.kernel(
        f"gather_backward_{dy.dtype}",
        (dy.dtype, group),
        lambda m, n: gather_backward.emit_sums(m, n, dy.dtype, group),
    )
    why = f"sums of {group} vectors in registers, every row written once"
    ctx.call(kernel, node, {**views, **links}, {**sizes, "columns": inner}, why=why)


def _group(columns: Size, lanes: int) -> int:
    """Vectors that are summed together, fewer if rows are known to be short."""
    group = gather_backward.GROUP
    while isinstance(columns, int) and group > 1 and columns <= lanes * group // 2:
        group //= 2
    return group
