"""Lowering of products of two float operands that are known at run time (`kernels.matmul.blocked`).

Products with few rows or few elements of k read both operands once and pack nothing
(`kernels.matmul.batched`).
"""

from __future__ import annotations

from dataclasses import replace

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature
from bitwright.backends.cpu.codegen.emit import Value as Emitted
from bitwright.backends.cpu.kernels.matmul import blocked
from bitwright.backends.cpu.kernels.matmul.dot.dot_product import type_names
from bitwright.backends.cpu.kernels.matmul.epilogue import fused_epilogue
from bitwright.backends.cpu.kernels.matmul.register_tile import best_tile
from bitwright.backends.cpu.lowering import region as regions
from bitwright.backends.cpu.lowering.context import Lowering, NoKernelError, RegionView
from bitwright.ir.dim import Size
from bitwright.ir.dtype import bf16, f16, f32
from bitwright.ir.graph import Node
from bitwright.lir.buffer import View

LEAST_ROWS = 12
"""With fewer rows, packing w takes longer than reading it for every tile."""
LEAST_DEPTH = 8
LEAST_COLUMNS = 16


def is_blocked(region: RegionView) -> bool:
    """Whether the packed kernel is the faster one for a matmul."""
    anchor = region.anchor
    assert anchor is not None
    x, w = anchor.inputs
    assert x is not None and w is not None
    if x.dtype != w.dtype or x.dtype not in (f32, bf16, f16) or x.rank < 2 or w.rank < 2:
        return False
    rows = x.shape[-2]
    if w.rank == 2 and x.rank > 2:  # all axes in front of k are rows
        rows = anchor.outputs[0].tensor.count // max(1, _known(w.shape[1], 1))
    return (
        _known(rows, LEAST_ROWS) >= LEAST_ROWS
        and _known(w.shape[-2], LEAST_DEPTH) >= LEAST_DEPTH
        and _known(w.shape[-1], LEAST_COLUMNS) >= LEAST_COLUMNS
    )


def is_blocked_product(a: View, w: View) -> bool:
    """Whether the packed kernel is the faster one for matrices a[m, k] and w[k, n]."""
    pairs = zip((a.shape[0], *w.shape), (LEAST_ROWS, LEAST_DEPTH, LEAST_COLUMNS), strict=True)
    is_large = all(_known(size, least) >= least for size, least in pairs)
    return is_large and a.dtype == w.dtype and a.dtype in (f32, bf16, f16)


def _known(size: Size, usual: int) -> int:
    return size if isinstance(size, int) else usual


def lower_blocked_matmul(ctx: Lowering, node: Node, region: RegionView) -> None:
    anchor = region.anchor
    assert anchor is not None and anchor.inputs[0] is not None and anchor.inputs[1] is not None
    after = regions.split(region).after
    regions.require_elements(after.dtype)
    a = _matrices(ctx, ctx.view(region.outer(anchor.inputs[0])), f"{node.name}.x")
    w = _matrices(ctx, ctx.view(region.outer(anchor.inputs[1])), f"{node.name}.w")
    result = node.outputs[0]
    y, shape = ctx.output(result), result.shape
    others = regions.operand_views(ctx, region, after.inputs, shape)
    depth, outer = a.shape[-1], shape[:-2]
    a = regions.broadcast(a, (*outer, *a.shape[-2:]))
    w = regions.broadcast(w, (*outer, *w.shape[-2:]))
    aligned = [
        replace(a, shape=shape, strides=(*a.strides[:-1], 0)),
        replace(w, shape=shape, strides=(*w.strides[:-2], 0, w.strides[-1])),
        *(y, *others),
    ]
    found = regions.collapse(aligned, keep=1)
    if len(found[0].shape) == 1 or found[1].strides[-2] != 0:  # all rows share one matrix of w
        found = regions.collapse(aligned, keep=2)
    _call(ctx, node, found, a.strides[-1], w.strides[-2], depth, after)


def call_blocked(
    ctx: Lowering, node: Node, a: View, w: View, y: View, after: regions.Part, why: str
) -> None:
    """Calls the kernel for matrices a[m, k], w[k, n] and y[m, n]; `after` has no operands."""
    found = [
        replace(a, shape=y.shape, strides=(a.strides[0], 0)),
        replace(w, shape=y.shape, strides=(0, w.strides[1])),
        y,
    ]
    _call(ctx, node, found, a.strides[1], w.strides[0], a.shape[1], after, why)


def _matrices(ctx: Lowering, view: View, name: str) -> View:
    """The operand with one of its last two axes contiguous; copied if needed."""
    is_plain = any(view.strides[at] == 1 or view.shape[at] == 1 for at in (-1, -2))
    return view if is_plain else ctx.packed(view, name)


def _call(
    ctx: Lowering,
    node: Node,
    found: list[View],
    a_k: Size,
    w_k: Size,
    depth: Size,
    after: regions.Part,
    why: str = "both operands are known at run time, packed block by block",
) -> None:
    a, w, y, *others = found
    if y.strides[-1] != 1 and y.shape[-1] != 1:
        raise NoKernelError("the columns of its result are not contiguous")
    outer, columns = len(y.shape) - 2, y.shape[-1]
    tile = best_tile(ctx.target, columns if isinstance(columns, int) else 0)
    along_depth = a_k == 1 or depth == 1
    rows = blocked.TRANSPOSED
    if along_depth:
        rows = blocked.DIRECT if a.dtype == f32 else blocked.WIDENED
    by_rows = w.strides[-1] == 1 or columns == 1
    is_short = isinstance(depth, int) and depth <= blocked.DEPTH
    keeps = not is_short and after.dtype != f32
    form = blocked.Form(tile, outer, a.dtype, w.dtype, rows, by_rows, is_short, keeps)
    reads = regions.Reads("e", others)
    emitted: list[blocked.BlockedProduct] = []

    def operands(
        f: Kernel, value: Emitted, row: Emitted, column: Emitted, mask: Emitted | None
    ) -> list[Emitted]:
        place = (*emitted[-1].outer, row)
        return [value, *reads.at(f, place, tile.lanes).load(column, mask)]

    slots = (tuple(reads.pointers), tuple(reads.sizes), [view.dtype for view in reads.views])
    epilogue = fused_epilogue(after, operands, tile.lanes, *slots)

    def emit_product(module: Module, name: str) -> Signature:
        return blocked.emit_blocked(module, name, form, epilogue, emitted.append)

    kernel = ctx.kernel(
        f"blocked_matmul_{type_names(a.dtype, w.dtype, f32)}",
        (form, after.expression, reads.key, blocked.DEPTH, blocked.BUFFER_FLOATS),
        emit_product,
    )
    pointers = {"a": a, "w": w, "y": y, **reads.pointers}
    if keeps:
        pointers["t"] = ctx.scratch(f"{node.name}.sums", "f32", y.count)
    sizes: dict[str, Size] = {
        "rows": y.shape[-2],
        "columns": columns,
        "depth": depth,
        "a_step": a.strides[-2] if along_depth else a_k,
        "w_step": w_k if by_rows else w.strides[-1],
        "y_stride": y.strides[-2],
        **{f"size{axis}": size for axis, size in enumerate(y.shape[:-2])},
        **{f"a.{axis}": stride for axis, stride in enumerate(a.strides[:-2])},
        **{f"w.{axis}": stride for axis, stride in enumerate(w.strides[:-2])},
        **{f"y.{axis}": stride for axis, stride in enumerate(y.strides[:-2])},
        **reads.sizes,
    }
    writes = ("y", "t") if keeps else ("y",)
    ctx.call(kernel, node, pointers, sizes, writes=writes, why=why)
