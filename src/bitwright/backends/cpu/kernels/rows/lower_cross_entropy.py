"""Lowering of cross entropy and its gradient."""

from __future__ import annotations

from collections.abc import Sequence

from bitwright.backends.cpu.kernels.rows import cross_entropy as losses
from bitwright.backends.cpu.kernels.rows.cross_entropy_columns import emit_columns
from bitwright.backends.cpu.kernels.rows.cross_entropy_rows import emit_rows
from bitwright.backends.cpu.lowering import region as regions
from bitwright.backends.cpu.lowering.context import Lowering, RegionView, lowers
from bitwright.ir.dim import Size, max_size, product
from bitwright.ir.graph import Node, Value
from bitwright.lir.buffer import View
from bitwright.ops.core.registry import get


@lowers("cross_entropy")
def lower_cross_entropy(ctx: Lowering, node: Node, region: RegionView) -> None:
    form, pointers, sizes = _operands(ctx, node, node.inputs, is_gradient=False)
    y = ctx.output(node.outputs[0])
    if form.reduction == "none":
        _call(ctx, node, form, {**pointers, "y": y}, sizes)
        return
    rows, columns = sizes["rows"], sizes["columns"]
    if form.along_rows:
        units = (rows + (losses.BLOCK - 1)) // losses.BLOCK
    else:
        units = rows * ((columns + (losses.PIECE - 1)) // losses.PIECE)
    partial = ctx.scratch(f"{node.name}.partial", "f64", max_size(units * 2, 1))
    _call(ctx, node, form, {**pointers, "y": partial}, sizes)
    key = form.element, form.reduction == "mean"
    code = ctx.kernel("sum_losses", key, lambda m, name: losses.emit_total(m, name, *key))
    ctx.call(code, node, {"x": partial, "y": y}, {"units": units})


@lowers("cross_entropy_backward")
def lower_cross_entropy_backward(ctx: Lowering, node: Node, region: RegionView) -> None:
    dy, *rest = node.inputs
    assert dy is not None
    form, pointers, sizes = _operands(ctx, node, rest, is_gradient=True)
    pointers["dy"] = ctx.contiguous(dy)
    if form.reads_total:
        total, blocks = _sum_weights(ctx, node, form, pointers, sizes)
        pointers["total"], sizes["blocks"] = total, blocks
    pointers["y"] = ctx.output(node.outputs[0])
    _call(ctx, node, form, pointers, sizes)


def _operands(
    ctx: Lowering, node: Node, inputs: Sequence[Value | None], is_gradient: bool
) -> tuple[losses.CrossEntropy, dict[str, View], dict[str, Size]]:
    logits, labels, weights = (*inputs, None)[:3]
    assert logits is not None and labels is not None
    regions.require_elements(logits.dtype)
    rows, classes, *inner = logits.shape
    attrs = get(node.op).call_attrs(node.attrs)
    form = losses.CrossEntropy(
        logits.dtype,
        labels.dtype,
        weights is not None,
        attrs["ignore_index"],
        attrs["reduction"],
        attrs["from_log_probs"],
        all(size == 1 for size in inner),
        is_gradient,
    )
    pointers = {"logits": ctx.contiguous(logits), "labels": ctx.contiguous(labels)}
    if weights is not None:
        pointers["weights"] = ctx.contiguous(weights)
    pointers["fault"] = ctx.fault()
    number = ctx.number(node, logits)
    sizes = {"rows": rows, "classes": classes, "columns": product(inner), "node": number}
    return form, pointers, sizes


def _call(
    ctx: Lowering,
    node: Node,
    form: losses.CrossEntropy,
    pointers: dict[str, View],
    sizes: dict[str, Size],
) -> None:
    emit = emit_rows if form.along_rows else emit_columns
    code = ctx.kernel(f"{node.op}_{form.element}", form, lambda m, name: emit(m, name, form))
    why = "classes in lanes" if form.along_rows else "along an inner axis, columns in lanes"
    ctx.call(code, node, pointers, sizes, why=why)


def _sum_weights(
    ctx: Lowering,
    node: Node,
    form: losses.CrossEntropy,
    pointers: dict[str, View],
    sizes: dict[str, Size],
) -> tuple[View, Size]:
    """The sums of the weights of blocks of labels, and the number of blocks."""
    count = sizes["rows"] * sizes["columns"]
    blocks = (count + (losses.LABELS - 1)) // losses.LABELS
    total = ctx.scratch(f"{node.name}.weights", "f64", max_size(blocks, 1))
    code = ctx.kernel(
        f"label_weights_{form.element}",
        form,
        lambda m, name: losses.emit_label_weights(m, name, form),
    )
    given = {name: view for name, view in pointers.items() if name not in ("dy", "logits")}
    places: dict[str, Size] = {"count": count, "classes": sizes["classes"], "node": sizes["node"]}
    ctx.call(code, node, {**given, "y": total}, places)
    return total, blocks
