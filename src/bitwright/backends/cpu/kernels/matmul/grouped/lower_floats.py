"""Lowering of products of float rows sorted by expert, and of the gradient of their weights."""

from __future__ import annotations

from bitwright.backends.cpu.kernels.matmul.grouped.floats import Grouped, emit_grouped, tile_of
from bitwright.backends.cpu.lowering.context import Lowering, NoKernelError, RegionView, lowers
from bitwright.backends.cpu.lowering.region import close
from bitwright.ir.dim import Size
from bitwright.ir.graph import Node

ELEMENTS = ("f32", "f64", "f16", "bf16")


@lowers("grouped_matmul", "grouped_matmul_backward_weight")
def lower_grouped(ctx: Lowering, node: Node, region: RegionView) -> None:
    first, second, counts = node.operands
    is_weight = node.op == "grouped_matmul_backward_weight"
    x, w = (second, first) if is_weight else (first, second)
    if x.dtype.name not in ELEMENTS or w.dtype != x.dtype:
        raise NoKernelError(f"there is no kernel for {x.dtype} times {w.dtype}")
    rows, columns = close(ctx, x), close(ctx, w)
    form = Grouped(x.dtype, is_weight, *tile_of(ctx.target))
    kernel = ctx.kernel(
        f"{node.op}_{x.dtype}", form, lambda module, name: emit_grouped(module, name, form)
    )
    sizes: dict[str, Size] = {
        "experts": counts.shape[0],
        "rows": x.shape[0],
        "depth": x.shape[1],
        "columns": w.shape[-1],
        "x_row": rows.strides[0],
        "w_expert": 0 if is_weight else columns.strides[0],
        "w_row": columns.strides[-2],
        "node": ctx.number(node),
    }
    pointers = {"x": rows, "w": columns, "counts": ctx.contiguous(counts), "fault": ctx.fault()}
    pointers["y"] = ctx.output(node.outputs[0])
    why = f"tiles of {form.rows} rows × {form.vectors} vectors, expert by expert"
    wanted = {slot.name for slot in kernel.signature.slots}
    ctx.call(kernel, node, pointers, {n: s for n, s in sizes.items() if n in wanted}, why=why)
