"""Products with weight-only quantization: few rows by words, many rows on the tensor cores.

Weights without a packed form (short or odd blocks) are dequantized at compile time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from bitwright.backends.cpu.kernels.matmul.lower_matmul import optional_inputs
from bitwright.backends.cpu.lowering.region import broadcast, split
from bitwright.backends.gpu.codegen.source import KernelSource, Work, cdiv
from bitwright.backends.gpu.kernels.matmul import tiles
from bitwright.backends.gpu.kernels.matmul.forms import (
    Finish,
    Matrices,
    launch_product,
    launch_sum_of_parts,
    may_contract,
)
from bitwright.backends.gpu.kernels.matmul.operands import packed_weight, rows_of
from bitwright.backends.gpu.kernels.matmul.product import Product
from bitwright.backends.gpu.kernels.weight_only import few_rows, many_rows, packing
from bitwright.backends.gpu.kernels.weight_only.few_rows import MOST_ROWS, PackedProduct
from bitwright.backends.gpu.kernels.weight_only.lower_one_row import (
    gate_after,
    is_one_row,
    launch_one,
)
from bitwright.backends.gpu.lowering.context import GpuLowering, NoKernelError, RegionView, lowers
from bitwright.backends.gpu.lowering.operands import At, Tail, Tiles
from bitwright.ir.dim import Size
from bitwright.ir.dtype import bf16, dtype, f16, f32
from bitwright.ir.graph import Node, Value, constant_value
from bitwright.lir.buffer import View
from bitwright.ops.quant.dequant_matmul import dequantize_blocks

Array = np.ndarray[Any, Any]
ROW_BITS = {f16: 16, bf16: 16, f32: 0}
"""The bits that rows are quantized to in the integer form; 0 means the float form."""


@lowers("dequant_matmul")
def lower_dequant_matmul(ctx: GpuLowering, node: Node, region: RegionView) -> None:
    anchor = region.anchor
    assert anchor is not None
    x, q, scale, zero, bias = optional_inputs(anchor, 5)
    assert x is not None
    arrays = [None if v is None else constant_value(region.outer(v)) for v in (q, scale, zero)]
    qvalues, scales, zeros = arrays
    if qvalues is None or scales is None or (zero is not None and zeros is None):
        raise NoKernelError("its weight is not a constant")
    if x.dtype not in ROW_BITS:
        raise NoKernelError(f"its rows are {x.dtype}")
    block = anchor.attrs["block"]
    source = region.outer(x)
    is_packed = x.rank > 1 and not packing.why_not_pack(
        dtype(qvalues.dtype), block, qvalues.shape[1]
    )
    tail = Tail.of(ctx, region, split(region).after, ctx.output(node.outputs[0]))
    added = _bias(ctx, region, bias, anchor.outputs[0].shape)
    if not is_packed:
        weight = dequantize_blocks(qvalues, scales, zeros, block).T.astype(x.dtype.numpy)
        rows = _as_rows(ctx, source)
        matrices = Matrices(rows, packed_weight(ctx, weight, f"{node.name}.weight"))
        why = "weights dequantized at compile time"
        launch_product(ctx, node, matrices, tail, added, why=why)
        return
    packed = packing.pack(qvalues, scales, zeros, block)
    if packed.is_integer and is_one_row(source):
        gate = gate_after(ctx, node) if bias is None else None
        launch_one(ctx, node, source, packed, tail, added, gate)
        return
    launch_packed(ctx, node, rows_of(ctx, source), packed, tail, added)


def launch_packed(
    ctx: GpuLowering,
    node: Node,
    x: View,
    packed: packing.PackedWeight,
    tail: Tail,
    added: Finish,
    row_bits: int | None = None,
) -> None:
    """Append the kernels of x[M, K] times packed weights."""
    rows, depth = x.shape
    assert isinstance(depth, int)
    is_few = isinstance(rows, int) and rows <= MOST_ROWS
    bits = ROW_BITS[x.dtype] if row_bits is None else row_bits
    facts = PackedProduct(
        packed.kind,
        rows if isinstance(rows, int) and is_few else 0,
        len(packed.words),
        packed.groups,
        depth,
        packed.block,
        packed.offset,
        packed.zero is not None,
        bits if packed.is_integer and is_few else 0,
    )
    views = {
        "q": ctx.constant(packed.words, f"{node.name}.weight"),
        "scale": ctx.constant(packed.scale, f"{node.name}.scale"),
    }
    if packed.zero is not None:
        views["zero"] = ctx.constant(packed.zero, f"{node.name}.zero")
    if is_few and rows:
        _launch_few(ctx, node, x, facts, views, tail, added)
    else:
        _launch_many(ctx, node, x, facts, views, tail, added)


def _launch_few(
    ctx: GpuLowering,
    node: Node,
    x: View,
    facts: PackedProduct,
    views: dict[str, View],
    tail: Tail,
    added: Finish,
) -> None:
    parts = few_rows.parts_of(ctx.machine, facts)
    at = At("row", "column", "row < M", "column < N")
    end = "\n".join(part for part in (added.text, tail.text("acc", at, 0)) if part)
    sizes: dict[str, Size] = {}
    if facts.bits:
        views = {**quantized_rows(ctx, node, x, facts), **views}
    else:
        views = {"x": x, **views}
        sizes["x_row"] = x.strides[0]
    form = f"{facts.bits}-bit rows" if facts.bits else "rows in f32"
    partial = None
    if parts > 1:
        count = parts * facts.rows * facts.columns
        partial = views["partial"] = ctx.scratch(f"{node.name}.partial", "f32", count)
    else:
        views |= {**added.views, **tail.views}
        sizes |= {**added.values, **tail.values}
    twin, native = (replace(facts, is_twin=is_twin) for is_twin in (True, False))
    bodies = [few_rows.product_body(one, end, parts) for one in (twin, native)]
    source = KernelSource(
        f"dequant_matmul_{facts.kind}_words",
        bodies[0],
        {name: view.dtype for name, view in views.items()},
        tuple(sizes),
        few_rows.configs(ctx.machine, facts, parts),
        few_rows.grid(facts),
        contracts=may_contract(tail),
        work=Work(lambda _: 2.0 * facts.rows * facts.columns * facts.depth, x.dtype.name),
        helpers=facts.helpers,
        native_body=bodies[1] if bodies[0] != bodies[1] else "",
    )
    written = tail.result if partial is None else "partial"
    why = f"weights in {facts.kind}, {form}"
    ctx.call(ctx.kernel(source), node, views, sizes, writes=(written,), why=why)
    if partial is None:
        return
    spec = Product(f32, f32, facts.columns, facts.depth)
    launch_sum_of_parts(ctx, node, spec, facts.rows, partial, tail, added, end, parts)


def quantized_rows(ctx: GpuLowering, node: Node, x: View, facts: PackedProduct) -> dict[str, View]:
    """Rows quantized per group of 32, as words of four bytes; a kernel of its own."""
    groups = facts.rows * facts.groups
    names = {"x_high": ("i32", 8), "x_low": ("i32", 8), "x_scale": ("f32", 1), "x_sum": ("i32", 1)}
    if facts.bits == 8:
        del names["x_low"]
    made = {
        name: ctx.scratch(f"{node.name}.{name}", kind, groups * count)
        for name, (kind, count) in names.items()
    }
    views = {"x": x, **made}
    source = KernelSource(
        f"quantize_words_{facts.bits}",
        few_rows.quantize_body(facts),
        {name: view.dtype for name, view in views.items()},
        ("x_row",),
        few_rows.quantize_configs(),
        lambda size: (cdiv(facts.groups, size["BG"]), facts.rows),
    )
    sizes = {"x_row": x.strides[0]}
    ctx.call(ctx.kernel(source), node, views, sizes, writes=tuple(made), why="rows as bytes")
    return made


def _launch_many(
    ctx: GpuLowering,
    node: Node,
    x: View,
    facts: PackedProduct,
    views: dict[str, View],
    tail: Tail,
    added: Finish,
) -> None:
    rows = x.shape[0]
    at = At("row", "column", "row < M", "column < N")
    end = "\n".join(part for part in (added.text, tail.text("acc", at, 0)) if part)
    views = {"x": x, **views, **added.views, **tail.views}
    sizes = {"M": rows, "x_row": x.strides[0], **added.values, **tail.values}
    twin, native = (replace(facts, is_twin=is_twin) for is_twin in (True, False))
    known = rows if isinstance(rows, int) and rows else tiles.UNKNOWN_ROWS
    bodies = [many_rows.body(one, x.dtype, end) for one in (twin, native)]
    source = KernelSource(
        f"dequant_matmul_{facts.kind}_tiles",
        bodies[0],
        {name: view.dtype for name, view in views.items()},
        tuple(sizes),
        many_rows.configs(known),
        many_rows.grid(facts.columns),
        contracts=may_contract(tail),
        work=Work(lambda size: 2.0 * size["M"] * facts.columns * facts.depth, x.dtype.name),
        helpers=facts.helpers,
        native_body=bodies[1] if bodies[0] != bodies[1] else "",
    )
    why = f"weights in {facts.kind}, dequantized in the kernel"
    ctx.call(ctx.kernel(source), node, views, sizes, writes=(tail.result,), why=why)


def _as_rows(ctx: GpuLowering, x: Value) -> View:
    if x.rank > 1:
        return rows_of(ctx, x)
    view = ctx.contiguous(x)
    return View(view.buffer, view.offset, (1, *view.shape), (0, *view.strides))


def _bias(
    ctx: GpuLowering, region: RegionView, bias: Value | None, shape: tuple[Size, ...]
) -> Finish:
    """The bias input as statements before the tail."""
    if bias is None:
        return Finish()
    found = Tiles.of({"bias": broadcast(ctx.view(region.outer(bias)), shape)}, "b_row")
    at = At("row", "column", "row < M", "column < N")
    lines = [*found.index_lines(at.row), f"acc = acc + {found.load('bias', at)}"]
    return Finish("\n".join(lines), found.views, found.values)
