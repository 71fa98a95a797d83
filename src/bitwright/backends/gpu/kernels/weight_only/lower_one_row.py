"""Launches products of one row with packed weights, with the norm before them and the gate after.

norm -> product                 the norm has no kernel of its own where only products read it
product -> split -> gate        `act(y[:n]) * y[n:]` is computed where both halves are in
                                registers; the product's own result is not stored
"""

from __future__ import annotations

from dataclasses import dataclass

from bitwright.backends.cpu.codegen.expression import Expression
from bitwright.backends.cpu.kernels.elementwise.lower_elementwise import as_body
from bitwright.backends.cpu.lowering.region import broadcast, split
from bitwright.backends.gpu.codegen.expression import render, why_not_render
from bitwright.backends.gpu.codegen.source import KernelSource, Work
from bitwright.backends.gpu.codegen.types import triton_type
from bitwright.backends.gpu.kernels.matmul.forms import Finish, launch_sum_of_parts
from bitwright.backends.gpu.kernels.matmul.operands import rows_of
from bitwright.backends.gpu.kernels.matmul.product import (
    Product,
)
from bitwright.backends.gpu.kernels.rows.formulas import norm_formula
from bitwright.backends.gpu.kernels.rows.lower_normalization import Rows, quantize_node
from bitwright.backends.gpu.kernels.weight_only import one_row, packing
from bitwright.backends.gpu.kernels.weight_only.few_rows import PackedProduct
from bitwright.backends.gpu.kernels.weight_only.one_row import OneRow, RowSource
from bitwright.backends.gpu.lowering.context import GpuLowering, RegionView, defers, region_of
from bitwright.backends.gpu.lowering.operands import At, Head, Tail, Tiles
from bitwright.ir.dim import product
from bitwright.ir.dtype import bf16, dtype, f16, f32
from bitwright.ir.graph import Node, Value, constant_value
from bitwright.ir.types import normalize_axis
from bitwright.lir.buffer import View
from bitwright.passes.fuse.fuse_regions import is_elementwise

ROWS = (f32, f16, bf16)
LONGEST = 8192
"""Elements of a row whose norm every program computes."""


def is_one_row(x: Value) -> bool:
    """Whether a product of this operand takes the form of one row."""
    return x.dtype in ROWS and x.rank > 1 and product(x.shape[:-1]) == 1


@defers("rms_norm", "layer_norm")
def is_deferred(ctx: GpuLowering, node: Node, region: RegionView) -> bool:
    """Whether all readers of a norm are products that compute it themselves."""
    anchor, value = region.anchor, node.outputs[0]
    if anchor is None or len(node.outputs) != 1 or quantize_node(region) is not None:
        return False
    depth = value.shape[-1] if value.rank else 0
    if not is_one_row(value) or not isinstance(depth, int) or depth > LONGEST:
        return False
    if normalize_axis(anchor.attrs["axis"], value.rank) != value.rank - 1:
        return False
    readers = ctx.readers(value)
    return bool(readers) and all(_multiplies(reader, value) for reader in readers)


def _multiplies(node: Node, x: Value) -> bool:
    """Whether a node is a product of x with packed integer weights, and reads x once."""
    region = region_of(node)
    anchor = region.anchor
    if anchor is None or anchor.op != "dequant_matmul" or list(node.operands).count(x) != 1:
        return False
    q, scale, *zero = anchor.inputs[1:4]
    if q is None or scale is None or anchor.inputs[0] is None:
        return False
    arrays = [constant_value(region.outer(v)) for v in (q, scale, *zero) if v is not None]
    if region.outer(anchor.inputs[0]) is not x or any(array is None for array in arrays):
        return False
    kind = dtype(arrays[0].dtype)  # type: ignore[union-attr]
    depth = x.shape[-1]
    assert isinstance(depth, int)
    whole = len(arrays) < 3 or arrays[2].dtype.kind in "iu"  # type: ignore[union-attr]
    return (
        whole and kind.is_integer and not packing.why_not_pack(kind, anchor.attrs["block"], depth)
    )


def row_source(ctx: GpuLowering, x: Value) -> RowSource:
    """How programs compute the row: from memory, or as a norm."""
    node = ctx.deferred.get(x)
    if node is None or ctx.is_placed(x):
        return one_row.plain(rows_of(ctx, x))
    region = region_of(node)
    anchor = region.anchor
    assert anchor is not None
    parts, shape = split(region), anchor.outputs[0].shape
    rows = Rows.along(ctx, node, shape, len(shape) - 1)
    before = rows.head(region, parts.before, "x")
    after = rows.head(region, parts.after, "f")
    given = {
        name: rows.view(ctx.view(region.outer(value)))
        for name, value in zip("wb", anchor.inputs[1:], strict=False)
        if value is not None
    }
    weights = Tiles.of(given, "w")
    formula = norm_formula(anchor.op, anchor.attrs["eps"], f32)
    width = 1 << max(int(shape[-1]) - 1, 0).bit_length()
    lines = [f"whole = tl.arange(0, {max(width, 16)})[None, :]"]
    loads, (value,) = before.lines([], At("0", "whole", "", "whole < K"))
    lines += [*loads, f"x = {value}"]
    for one in formula.passes:
        masked = f"tl.where(whole < K, {one.value}, {one.masked})"
        lines.append(f"total = tl.{one.reduction}({masked}, axis=1)[:, None]")
        lines += [line.replace("columns", "K") for line in one.after]
    kept = {"mean", "rstd", "K", "whole"}
    lines = one_row.renamed(lines, "_of_row", kept)
    at = At("0", "at", "", "here")
    loads, (value,) = before.lines([], at)
    element = [*loads, f"x = {value}", f"n = {formula.result}"]
    element += weights.index_lines("0")
    for name, sign in (("w", "*"), ("b", "+")):
        if name in weights.names:
            element.append(f"n = n {sign} {weights.load(name, at)}")
    steps, (value,) = after.lines(["n"], at)
    element += [*steps, f"v = ({value}).to({triton_type(x.dtype)}).to(tl.float32)"]
    element.append("v = tl.where(here, v, 0.0)")
    views = {**before.views, **after.views, **weights.views}
    values = {**before.values, **after.values, **weights.values}
    return RowSource(views, values, tuple(lines), tuple(element))


@dataclass(frozen=True)
class Gate:
    """An elementwise node of the two halves of a product's columns."""

    node: Node
    head: Head
    result: View
    halves: tuple[int, ...]
    """By operand of the expression: 0 or 1 for a half, -1 for a loaded operand."""

    def text(self, kind: str) -> str:
        """Statements that combine `acc` and `acc_1` and store the result."""
        at = At("row", "column", "", "column < WIDTH")
        lines = [f"half{n} = acc{c}.to({kind}).to(tl.float32)" for n, c in enumerate(("", "_1"))]
        lines += self.head.tiles.index_lines(at.row)
        texts, loaded = [], iter(self.head.operands)
        for half in self.halves:
            if half >= 0:
                texts.append(f"half{half}")
                continue
            name = next(loaded)
            lines.append(f"{name}_x = {self.head.tiles.load(name, at)}")
            texts.append(f"{name}_x")
        steps, (term,) = render(self.head.expression, texts, "gate")
        return "\n".join([*lines, *steps, self.head.tiles.store("y", term.text, at)])


def gate_after(ctx: GpuLowering, node: Node) -> Gate | None:
    """The gate that reads a product's result, if nothing else does. Its result gets memory."""
    y = node.outputs[0]
    readers = ctx.readers(y)
    if node.op == "fused" or len(readers) != 1 or readers[0].op != "split":
        return None
    halves = readers[0].outputs
    if len(halves) != 2 or halves[0].shape != halves[1].shape or halves[0].rank != y.rank:
        return None
    if halves[0].shape[:-1] != y.shape[:-1]:
        return None
    first, second = (ctx.readers(half) for half in halves)
    if len(first) != 1 or second != first:  # or a run keeps a half
        return None
    (gate,) = first
    if len(gate.outputs) != 1 or gate.outputs[0].shape != halves[0].shape:
        return None
    if region_of(gate).anchor is not None and not is_elementwise(gate):
        return None
    body = gate.attrs["body"] if gate.op == "fused" else as_body(gate)
    operands = list(gate.operands)
    others = [v for v in operands if v not in halves]
    expression = Expression.of(body)
    if len(expression.inputs) != len(operands) or why_not_render(expression):
        return None
    if any(not (v.is_constant or ctx.is_placed(v)) for v in others):
        return None
    result = ctx.output(gate.outputs[0])
    names = {f"e{n}": broadcast(ctx.view(v), result.shape) for n, v in enumerate(others)}
    head = Head(expression, Tiles.of({**names, "y": result}, "e"), tuple(names))
    places = tuple(halves.index(v) if v in halves else -1 for v in operands)
    return Gate(gate, head, result, places)


def launch_one(
    ctx: GpuLowering,
    node: Node,
    x: Value,
    packed: packing.PackedWeight,
    tail: Tail,
    added: Finish,
    gate: Gate | None,
) -> None:
    """Append the kernel of one row times packed weights."""
    depth = x.shape[-1]
    assert isinstance(depth, int)
    facts = PackedProduct(
        packed.kind,
        1,
        len(packed.words),
        packed.groups,
        depth,
        packed.block,
        packed.offset,
        packed.zero is not None,
        0,
    )
    source = row_source(ctx, x)
    columns = facts.columns // 2 if gate is not None else facts.columns
    parts = 1 if gate is not None else one_row.parts_of(ctx.machine, columns, facts.groups)
    at = At("row", "column", "row < M", "column < WIDTH")
    if gate is not None:
        end = gate.text(triton_type(node.outputs[0].dtype))
    else:
        end = "\n".join(part for part in (added.text, tail.text("acc", at, 0)) if part)
    views = {"q": ctx.constant(packed.words, f"{node.name}.weight"), **source.views}
    views["scale"] = ctx.constant(packed.scale, f"{node.name}.scale")
    if packed.zero is not None:
        views["zero"] = ctx.constant(packed.zero, f"{node.name}.zero")
    sizes = dict(source.values)
    written = "y"
    partial = None
    if gate is not None:
        views |= gate.head.views
        sizes |= gate.head.values
    elif parts > 1:
        partial = ctx.scratch(f"{node.name}.partial", "f32", parts * facts.columns)
        views["partial"], written = partial, "partial"
    else:
        views |= {**added.views, **tail.views}
        sizes |= {**added.values, **tail.values}
        written = tail.result
    one = OneRow(facts, source, parts, gate is not None)
    kernel = KernelSource(
        f"dequant_matmul_{facts.kind}_row" + ("_gate" if gate is not None else ""),
        one.body(end),
        {name: view.dtype for name, view in views.items()},
        tuple(sizes),
        one_row.configs(ctx.machine, one),
        one_row.grid(one),
        contracts=True,
        work=Work(lambda _: 2.0 * facts.columns * facts.depth, x.dtype.name),
    )
    fused = [name for name, is_fused in (("norm", source.before), ("gate", gate)) if is_fused]
    why = f"weights in {facts.kind}, row in f32" + "".join(f", {name} inside" for name in fused)
    ctx.call(ctx.kernel(kernel), node, views, sizes, writes=(written,), why=why)
    if gate is not None:
        ctx.done.add(gate.node)
    elif partial is not None:
        spec = Product(f32, f32, facts.columns, facts.depth)
        end = end.replace("WIDTH", "N")
        launch_sum_of_parts(ctx, node, spec, 1, partial, tail, added, end, parts)
