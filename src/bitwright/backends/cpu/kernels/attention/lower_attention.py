"""Lowering of attention: q, k and v are read through strided views, without copies."""

from __future__ import annotations

from bitwright.backends.cpu.kernels.attention import spec
from bitwright.backends.cpu.kernels.attention.attention import emit_attention
from bitwright.backends.cpu.kernels.attention.bf16 import pair_products
from bitwright.backends.cpu.kernels.attention.lower_int8 import call_quantized
from bitwright.backends.cpu.kernels.attention.transposed_values import KEYS, LANES, emit_transposed
from bitwright.backends.cpu.lowering import region as regions
from bitwright.backends.cpu.lowering.context import Lowering, NoKernelError, RegionView, lowers
from bitwright.ir.dim import Size, min_size, product
from bitwright.ir.dtype import DType
from bitwright.ir.graph import Node, Value
from bitwright.lir.buffer import View, contiguous

NAMES = ("q", "k", "v", "mask", "past_k", "past_v", "lengths")
MAX_FEATURES = 512
"""Blocks of queries and values are on the stack."""
HEADS_INSIDE = (0, 2, 1, 3)


@lowers("attention")
def lower_attention(ctx: Lowering, node: Node, region: RegionView) -> None:
    anchor = region.anchor
    assert anchor is not None
    given = dict(zip(NAMES, anchor.inputs, strict=False))
    values = {name: region.outer(v) for name, v in given.items() if v is not None}
    features = features_of(values)
    views = {
        name: regions.close(ctx, v) for name, v in values.items() if name not in ("mask", "lengths")
    }
    q, k = views["q"], views["k"]
    keys: Size = k.shape[2]
    before: Size = views["past_k"].shape[2] if "past_k" in views else 0
    sizes: dict[str, Size] = {
        "batches": q.shape[0],
        "heads": q.shape[1],
        "group": q.shape[1] // k.shape[1],
        "queries": q.shape[2],
        "keys": keys,
        "offset": before,
    }
    if anchor.attrs["causal_offset"] == "end":
        sizes["offset"] = before + keys - q.shape[2]
    mask = None
    if "mask" in values:
        mask, sizes["limit"] = mask_view(ctx, values["mask"], (*q.shape[:3], before + keys))
        views["mask"] = mask
        sizes |= {f"mask.{axis}": stride for axis, stride in enumerate(mask.strides)}
    if "lengths" in values:
        views["lengths"] = ctx.contiguous(values["lengths"])
    if "past_k" in views:
        sizes["past"] = before
    after = regions.split(region).after
    regions.require_elements(after.dtype)
    shape = anchor.outputs[0].shape
    extras = regions.Reads("e", regions.operand_views(ctx, region, after.inputs, shape))
    kernel = _describe(ctx, anchor, features, views, mask, after, extras)
    if kernel.transposes_values:
        for name in ("v", "past_v"):
            if name in views:
                views[f"transposed_{name}"] = _transposed(ctx, node, views[name])
    y = ctx.output(node.outputs[0], order_of(ctx, node.outputs[0]))
    views |= {"y": y, **extras.pointers}
    if anchor.attrs["int8"]:
        call_quantized(ctx, node, kernel, views, sizes | extras.sizes)
        return
    for name in ("q", "k", "v", "y", "past_k", "past_v", "transposed_v", "transposed_past_v"):
        if name in views:
            sizes |= {f"{name}.{axis}": views[name].strides[axis] for axis in range(3)}
    code = ctx.kernel(
        f"attention_{kernel.element}", kernel.key, lambda m, name: emit_attention(m, name, kernel)
    )
    ctx.call(code, node, views, sizes | extras.sizes, why=_why(kernel))


def _transposed(ctx: Lowering, node: Node, v: View) -> View:
    """The values transposed to features by keys."""
    batches, heads, keys, features = v.shape
    assert isinstance(features, int)
    pitch = (keys + (KEYS - 1)) // KEYS * KEYS
    shape = (batches, heads, -(-features // LANES) * LANES, pitch)
    y = contiguous(ctx.buffer(f"{node.name}.transposed", v.dtype, product(shape)), shape)
    kernel = ctx.kernel(
        "attention_transpose_values_bf16",
        features,
        lambda m, name: emit_transposed(m, name, features),
    )
    sizes: dict[str, Size] = {"batches": batches, "heads": heads, "keys": keys, "pitch": pitch}
    for name, view in (("v", v), ("y", y)):
        sizes |= {f"{name}.{axis}": view.strides[axis] for axis in range(3)}
    ctx.call(kernel, node, {"v": v, "y": y}, sizes, why="values transposed for AMX tiles")
    return y


def features_of(values: dict[str, Value]) -> tuple[int, int]:
    """Features of q and of v; raises for operands that the kernel does not support."""
    regions.require_elements(*(v.dtype for v in values.values()))
    elements = {name: v.dtype for name, v in values.items() if name not in ("mask", "lengths")}
    for name, element in elements.items():
        if not element.is_float or element != elements["q"]:
            raise NoKernelError(f"attention has no kernel for {name} of {element}")
    counts = []
    for name in ("q", "v"):
        features = values[name].shape[3]
        if not isinstance(features, int) or not 0 < features <= MAX_FEATURES:
            raise NoKernelError(f"attention has no kernel for {features} features of {name}")
        counts.append(features)
    return counts[0], counts[1]


def mask_view(ctx: Lowering, value: Value, scores: tuple[Size, ...]) -> tuple[View, Size]:
    """The mask in the shape of the scores, and the number of keys it covers.

    A mask may be shorter than the keys, which hides the remaining keys; a mask of one key is
    broadcast.
    """
    view, total = ctx.view(value), scores[-1]
    found = regions.broadcast(view, scores)
    length = view.shape[-1]
    if length == total:
        return found, total
    repeats = min_size(length - 1, 1)  # 0 for a mask of one key
    return found, length + (total - 1) * (1 - repeats)


def mask_form(mask: View | None, queries: Size) -> tuple[str, DType | None, str]:
    """How the kernel reads a mask: its form, its element type, and its columns."""
    if mask is None:
        return spec.NO_MASK, None, regions.ONE
    form = spec.KEY_MASK if mask.strides[2] == 0 or queries == 1 else spec.FULL_MASK
    return form, mask.dtype, regions.column_form(mask)


def order_of(ctx: Lowering, value: Value) -> tuple[int, ...] | None:
    """The order with heads inside positions, if the only reader transposes to it."""
    readers = [node for node in ctx.graph.nodes if value in node.operands]
    alone = len(readers) == 1 and ctx.graph.uses[value] == 1
    if alone and readers[0].op == "transpose" and readers[0].attrs["perm"] == HEADS_INSIDE:
        return HEADS_INSIDE
    return None


def _describe(
    ctx: Lowering,
    anchor: Node,
    features: tuple[int, int],
    views: dict[str, View],
    mask: View | None,
    after: regions.Part,
    extras: regions.Reads,
) -> spec.Attention:
    attrs = anchor.attrs
    queries, element = views["q"].shape[2], views["q"].dtype
    scale = attrs.get("scale")
    paths = spec.BOTH
    if isinstance(queries, int):
        paths = (
            spec.SINGLE_QUERY
            if queries <= spec.max_single_queries(ctx.target, element)
            else spec.QUERY_BLOCK
        )
    form, mask_element, column = mask_form(mask, queries)
    return spec.Attention(
        element,
        *features,
        features[0] ** -0.5 if scale is None else scale,
        attrs["causal"],
        attrs.get("window"),
        attrs.get("window_right"),
        attrs["softcap"],
        form,
        mask_element,
        column,
        "past_k" in views,
        "lengths" in views,
        paths,
        None if paths == spec.SINGLE_QUERY else pair_products(ctx.target, element),
        after,
        extras,
    )


def _why(kernel: spec.Attention) -> str:
    words = {
        spec.SINGLE_QUERY: "one query at a time",
        spec.QUERY_BLOCK: "queries in lanes",
        spec.BOTH: "by the number of queries",
    }
    found = words[kernel.paths]
    return found if kernel.pairs is None else f"{found}, bf16 dots"
