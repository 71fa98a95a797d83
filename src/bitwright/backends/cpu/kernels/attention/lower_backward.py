"""Lowering of attention_backward: operands and results are strided views, without copies."""

from __future__ import annotations

from bitwright.backends.cpu.kernels.attention import spec
from bitwright.backends.cpu.kernels.attention.backward import emit_attention_backward
from bitwright.backends.cpu.kernels.attention.backward_spec import (
    MAX_PARTS,
    ROW_UNIT,
    Backward,
    Work,
    backward_tiles,
)
from bitwright.backends.cpu.kernels.attention.lower_attention import (
    features_of,
    mask_form,
    mask_view,
    order_of,
)
from bitwright.backends.cpu.lowering import region as regions
from bitwright.backends.cpu.lowering.context import Lowering, RegionView, lowers
from bitwright.backends.cpu.lowering.joined import place_in_concat
from bitwright.ir.dim import Size, min_size
from bitwright.ir.graph import Node

NAMES = ("dy", "q", "k", "v", "mask", "lengths")


@lowers("attention_backward")
def lower_attention_backward(ctx: Lowering, node: Node, region: RegionView) -> None:
    values = {name: v for name, v in zip(NAMES, node.inputs, strict=False) if v is not None}
    features = features_of(values)
    views = {
        name: regions.close(ctx, v) for name, v in values.items() if name not in ("mask", "lengths")
    }
    q, k = views["q"], views["k"]
    keys = k.shape[2]
    sizes: dict[str, Size] = {
        "batches": q.shape[0],
        "heads": q.shape[1],
        "group": q.shape[1] // k.shape[1],
        "queries": q.shape[2],
        "keys": keys,
        "offset": keys - q.shape[2] if node.attrs["causal_offset"] == "end" else 0,
    }
    mask = None
    if "mask" in values:
        mask, sizes["limit"] = mask_view(ctx, values["mask"], (*q.shape[:3], keys))
        views["mask"] = mask
        sizes |= {f"mask.{axis}": stride for axis, stride in enumerate(mask.strides)}
    if "lengths" in values:
        views["lengths"] = ctx.contiguous(values["lengths"])
    attrs, scale = node.attrs, node.attrs.get("scale")
    form, mask_element, column = mask_form(mask, q.shape[2])
    kernel = spec.Attention(
        q.dtype,
        *features,
        features[0] ** -0.5 if scale is None else scale,
        attrs["causal"],
        attrs.get("window"),
        attrs.get("window_right"),
        attrs["softcap"],
        form,
        mask_element,
        column,
        False,
        "lengths" in values,
        spec.QUERY_BLOCK,
        None,
        regions.split(region).after,
        regions.Reads("e", ()),
    )
    results = dict(zip(("dq", "dk", "dv"), node.outputs, strict=True))
    outputs = {name for _, value in ctx.graph.outputs for name in results if value is results[name]}
    wanted = tuple(n for n, v in results.items() if ctx.graph.uses[v] or n in outputs)
    placed = place_in_concat(ctx, tuple(results.values()))
    for name, value in results.items():
        view = placed.get(value)
        if view is None or view.strides[-1] != 1:
            view = ctx.output(value, order_of(ctx, value))
        if name in wanted:
            views[name] = view
    if not wanted:
        return
    backward = Backward(kernel, wanted)
    work = Work(kernel, backward_tiles(ctx.target, kernel))
    rows = (keys + (2 * ROW_UNIT - 1)) // ROW_UNIT * ROW_UNIT
    parts = min_size(q.shape[0] * k.shape[1], MAX_PARTS)
    part = work.size(rows)
    element = "f64" if q.dtype.name == "f64" else "f32"
    views["work"] = ctx.scratch(f"{node.name}.work", element, parts * part)
    sizes |= {"rows": rows, "parts": parts, "part": part}
    for name in backward.tensors:
        sizes |= {f"{name}.{axis}": views[name].strides[axis] for axis in range(3)}
    code = ctx.kernel(
        f"attention_backward_{q.dtype}",
        backward.key,
        lambda m, name: emit_attention_backward(m, name, backward),
    )
    why = "scores computed again, per key head"
    ctx.call(code, node, views, sizes, writes=("work", *wanted), why=why)
