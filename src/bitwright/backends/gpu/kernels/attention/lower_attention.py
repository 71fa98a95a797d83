"""Lowering of attention: operands are strided views, keys of the past are read in place."""

from __future__ import annotations

from bitwright.backends.cpu.kernels.attention.lower_attention import (
    NAMES,
    mask_view,
    order_of,
)
from bitwright.backends.cpu.lowering.region import close, split
from bitwright.backends.gpu.kernels.attention.flash import flash_source
from bitwright.backends.gpu.kernels.attention.spec import Attention
from bitwright.backends.gpu.kernels.attention.split_keys import (
    MAX_ROWS,
    join_source,
    part_source,
    split_count,
)
from bitwright.backends.gpu.lowering.context import (
    GpuLowering,
    NoKernelError,
    RegionView,
    lowers,
)
from bitwright.backends.gpu.lowering.operands import Tail
from bitwright.ir.dim import Size
from bitwright.ir.dtype import bf16, f16, f32
from bitwright.ir.graph import Node, Value

MAX_FEATURES = 256
"""Wider heads do not fit registers and shared memory."""


@lowers("attention")
def lower_attention(ctx: GpuLowering, node: Node, region: RegionView) -> None:
    anchor = region.anchor
    assert anchor is not None
    given = dict(zip(NAMES, anchor.inputs, strict=False))
    values = {name: region.outer(v) for name, v in given.items() if v is not None}
    form = _form(ctx, node, anchor, region, values)
    queries, group = form.sizes["queries"], form.sizes["group"]
    rows = queries * group
    if isinstance(rows, int) and isinstance(queries, int) and rows <= MAX_ROWS and queries <= 8:
        _split_keys(ctx, node, form, rows)
        return
    views = {**form.views, **form.tail.views}
    sizes = {**form.sizes, **form.stride_sizes, **form.tail.values}
    ctx.call(
        ctx.kernel(flash_source(form, ctx.machine.multiprocessors)),
        node,
        views,
        sizes,
        why=_why(form, "blocks of queries"),
    )


def _split_keys(ctx: GpuLowering, node: Node, form: Attention, rows: int) -> None:
    groups = form.sizes["batches"] * form.sizes["kv_heads"]
    splits = split_count(groups, form.sizes["total"], ctx.machine.multiprocessors)
    count = groups * splits * rows
    parts = {
        "tops": ctx.scratch(f"{node.name}.tops", "f32", count),
        "sum_parts": ctx.scratch(f"{node.name}.sums", "f32", count),
        "parts": ctx.scratch(f"{node.name}.parts", "f32", count * form.values),
    }
    sizes = {**form.sizes, **form.stride_sizes}
    why = _why(form, f"{splits} programs share the keys of a head")
    kernel = ctx.kernel(part_source(form, rows, splits))
    ctx.call(kernel, node, {**form.views, **parts}, sizes, writes=tuple(parts), why=why)
    names = ("batches", "heads", "kv_heads", "group", "queries")
    own: dict[str, Size] = {name: form.sizes[name] for name in names}
    join = ctx.kernel(join_source(form, rows, splits))
    views = {**parts, **form.tail.views}
    ctx.call(join, f"{node.name}.join", views, {**own, **form.tail.values}, why="parts in order")


def _why(form: Attention, text: str) -> str:
    return f"{text}; tf32 in place of int8" if form.is_int8 else text


def _form(
    ctx: GpuLowering, node: Node, anchor: Node, region: RegionView, values: dict[str, Value]
) -> Attention:
    features = _features(values)
    attrs = anchor.attrs
    views = {n: close(ctx, v) for n, v in values.items() if n not in ("mask", "lengths")}
    q, k = views["q"], views["k"]
    before: Size = views["past_k"].shape[2] if "past_k" in views else 0
    total = before + k.shape[2]
    sizes: dict[str, Size] = {
        "batches": q.shape[0],
        "heads": q.shape[1],
        "kv_heads": k.shape[1],
        "group": q.shape[1] // k.shape[1],
        "programs": q.shape[0] * q.shape[1],
        "queries": q.shape[2],
        "total": total,
        "offset": total - q.shape[2] if attrs["causal_offset"] == "end" else before,
    }
    if "mask" in values:
        ctx.require(values["mask"].dtype)
        views["mask"], sizes["limit"] = mask_view(ctx, values["mask"], (*q.shape[:3], total))
    if "lengths" in values:
        views["lengths"] = ctx.contiguous(values["lengths"])
    if "past_k" in views:
        sizes["past"] = before
    y = ctx.output(node.outputs[0], order_of(ctx, node.outputs[0]))
    after = split(region).after
    scale = attrs.get("scale")
    return Attention(
        q.dtype,
        *features,
        features[0] ** -0.5 if scale is None else scale,
        attrs["causal"],
        attrs.get("window"),
        attrs.get("window_right"),
        attrs["softcap"],
        views,
        sizes,
        Tail.of(ctx, region, after, y),
        attrs["int8"],
    )


def _features(values: dict[str, Value]) -> tuple[int, int]:
    """Features of q and of v; raises for operands that no kernel takes."""
    element = values["q"].dtype
    if element not in (f32, f16, bf16):
        raise NoKernelError(f"attention has no kernel for {element}")
    for name, value in values.items():
        if name not in ("mask", "lengths") and value.dtype != element:
            raise NoKernelError(f"attention has no kernel for {name} of {value.dtype}")
    counts = []
    for name in ("q", "v"):
        count = values[name].shape[3]
        if not isinstance(count, int) or not 0 < count <= MAX_FEATURES:
            raise NoKernelError(f"attention has no kernel for {count} features of {name}")
        counts.append(count)
    return counts[0], counts[1]
