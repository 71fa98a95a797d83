"""Lowering of nonzero: a size step sums the counts of chunks, then coordinates are written."""

from __future__ import annotations

from bitwright.backends.cpu.kernels.movement.nonzero import CHUNK, emit_count, emit_write
from bitwright.backends.cpu.lowering.context import Lowering, NoKernelError, RegionView, lowers
from bitwright.backends.cpu.lowering.region import require_elements
from bitwright.ir.dim import Size
from bitwright.ir.graph import Node


@lowers("nonzero")
def lower_nonzero(ctx: Lowering, node: Node, region: RegionView) -> None:
    (x,) = node.operands
    require_elements(x.dtype)
    if not x.rank:
        raise NoKernelError("a scalar has no coordinates")
    element, rank, view = x.dtype, x.rank, ctx.contiguous(x)
    count = x.tensor.count
    chunks = (count + (CHUNK - 1)) // CHUNK
    counts = ctx.scratch(f"{node.name}.counts", "i64", chunks)
    sizes: dict[str, Size] = {"count": count, "chunks": chunks}
    family = f"nonzero_count_{element}"
    first = ctx.kernel(family, element, lambda m, n: emit_count(m, n, element))
    ctx.call(first, node, {"x": view, "counts": counts}, sizes, writes=("counts",))
    found = node.outputs[0].shape[1]
    ctx.read_sizes(node, [counts], [found], lambda arrays, _: [int(arrays[0].sum())])
    key = element, rank
    second = ctx.kernel(f"nonzero_{element}", key, lambda m, n: emit_write(m, n, *key))
    sizes |= {"found": found, **{f"n{axis}": size for axis, size in enumerate(x.shape)}}
    pointers = {"x": view, "counts": counts, "y": ctx.output(node.outputs[0])}
    ctx.call(second, node, pointers, sizes)
