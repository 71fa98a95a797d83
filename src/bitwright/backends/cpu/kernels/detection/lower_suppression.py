"""Lowering of non-maximum suppression: a size step reads the number of selected boxes."""

from __future__ import annotations

from bitwright.backends.cpu.kernels.detection import suppression
from bitwright.backends.cpu.lowering.context import Lowering, RegionView, lowers
from bitwright.backends.cpu.lowering.region import require_elements
from bitwright.ir.dim import Size
from bitwright.ir.graph import Node


@lowers("non_max_suppression")
def lower_suppression(ctx: Lowering, node: Node, region: RegionView) -> None:
    boxes, scores, *limits = (*node.inputs, None, None, None)[:5]
    assert boxes is not None and scores is not None
    require_elements(boxes.dtype)
    name, element = node.name, boxes.dtype
    batch, classes, count = scores.shape
    rows = batch * classes
    centred = bool(node.attrs.get("center_point_box"))
    corners = ctx.scratch(f"{name}.corners", "f64", batch * count * suppression.PARTS)
    first = ctx.kernel(
        f"box_corners_{element}",
        (element, centred),
        lambda m, n: suppression.emit_corners(m, n, element, centred),
    )
    sizes: dict[str, Size] = {"batch": batch, "count": count}
    given = {"boxes": ctx.contiguous(boxes), "corners": corners}
    ctx.call(first, node, given, sizes, writes=("corners",))
    kinds = suppression.Limits(*(None if limit is None else limit.dtype for limit in limits))
    second = ctx.kernel(
        f"non_max_suppression_{element}",
        (element, kinds),
        lambda m, n: suppression.emit_select(m, n, element, kinds),
    )
    made = {
        "left": ctx.scratch(f"{name}.left", "f64", rows * count),
        "picked": ctx.scratch(f"{name}.picked", "i64", rows * count),
        "counts": ctx.scratch(f"{name}.counts", "i64", rows),
    }
    pointers = {"scores": ctx.contiguous(scores), "corners": corners, **made}
    names = ("max_count", "max_overlap", "max_score")
    pointers |= {
        slot: ctx.contiguous(limit)
        for slot, limit in zip(names, limits, strict=True)
        if limit is not None
    }
    sizes = {"rows": rows, "classes": classes, "boxes": count}
    ctx.call(second, node, pointers, sizes, writes=tuple(made))
    found = node.outputs[0].shape[:1]
    ctx.read_sizes(node, [made["counts"]], found, lambda arrays, _: [int(arrays[0].sum())])
    last = ctx.kernel("non_max_suppression_rows", (), suppression.emit_rows)
    del made["left"]
    ctx.call(last, node, {**made, "y": ctx.output(node.outputs[0])}, sizes)
