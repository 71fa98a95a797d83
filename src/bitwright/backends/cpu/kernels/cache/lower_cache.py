"""Lowering of key-value caches: states are updated in place."""

from __future__ import annotations

from bitwright.backends.cpu.kernels.cache.attention import (
    FEW_ROWS,
    PART,
    CachedAttention,
    emit_cached_attention,
    emit_combine,
    part_floats,
)
from bitwright.backends.cpu.kernels.cache.write import emit_kv_write
from bitwright.backends.cpu.kernels.movement import lower_gather
from bitwright.backends.cpu.lowering import region as regions
from bitwright.backends.cpu.lowering.context import Lowering, NoKernelError, RegionView, lowers
from bitwright.ir.dim import Size, min_size
from bitwright.ir.dtype import f16, f32, i8
from bitwright.ir.graph import Node, Value
from bitwright.lir.buffer import View
from bitwright.ops.nn.attention import score_factor

MAX_FEATURES = 512


def _updated(ctx: Lowering, node: Node, number: int, x: Value) -> View:
    """The memory of a result that starts as a copy of x.

    That is x itself if x is a state, the result updates it, and nothing else needs its old value.
    """
    y = node.outputs[number]
    others = any(n is not node and x in n.operands for n in ctx.graph.nodes)
    is_shown = any(value is x for _, value in (*ctx.graph.outputs, *ctx.graph.updates))
    if dict(ctx.graph.updates).get(x) is y and not (others or is_shown):
        ctx.alias(y, ctx.view(x))
        return ctx.view(x)
    target = ctx.output(y)
    ctx.copy(ctx.view(x), target, node.name)
    return target


@lowers("kv_write")
def lower_kv_write(ctx: Lowering, node: Node, region: RegionView) -> None:
    cache, new, slot, position, *rest = node.operands
    regions.require_elements(cache.dtype, new.dtype)
    if new.dtype.bits > 32 or cache.dtype.bits > 32:
        raise NoKernelError(f"there is no kernel for {new.dtype} in a cache of {cache.dtype}")
    types = new.dtype, cache.dtype, *(lower_gather.index_type(v) for v in (slot, position))
    kernel = ctx.kernel(
        f"kv_write_{cache.dtype}", types, lambda m, name: emit_kv_write(m, name, *types)
    )
    source = regions.close(ctx, new)
    sizes: dict[str, Size] = {
        "rows": new.shape[0],
        "heads": cache.shape[1],
        "slots": cache.shape[0],
        "context": cache.shape[2],
        "features": cache.shape[3],
        "new.0": source.strides[0],
        "new.1": source.strides[1],
        "node": ctx.number(node),
    }
    pointers = {
        "y": _updated(ctx, node, 0, cache),
        "new": source,
        "slot": ctx.contiguous(slot),
        "position": ctx.contiguous(position),
        "fault": ctx.fault(),
    }
    if rest:
        pointers["scale"] = _updated(ctx, node, 1, rest[0])
    written = ("y", "scale") if rest else ("y",)
    ctx.call(kernel, node, pointers, sizes, writes=written)


@lowers("cached_attention")
def lower_cached_attention(ctx: Lowering, node: Node, region: RegionView) -> None:
    q, k, v, slot, position, *scales = node.operands
    for value, types in ((q, (f32, f16)), (k, (f32, f16, i8)), (v, (f32, f16, i8))):
        if value.dtype not in types:
            raise NoKernelError(f"cached_attention has no kernel for {value.dtype}")
    counts = k.shape[1], q.shape[1], q.shape[2], v.shape[3]
    if not all(isinstance(count, int) and count > 0 for count in counts):
        raise NoKernelError("cached_attention has no kernel for heads of unknown size")
    heads, all_heads, features, value_features = (int(str(count)) for count in counts)
    if max(features, value_features) > MAX_FEATURES:
        raise NoKernelError(f"cached_attention has no kernel for {features} features")
    kernel = CachedAttention(
        q.dtype,
        k.dtype,
        lower_gather.index_type(slot),
        lower_gather.index_type(position),
        all_heads // heads,
        features,
        value_features,
        score_factor(features, node.attrs.get("scale")),
        node.attrs["softcap"],
        node.attrs.get("window"),
    )
    source, y = regions.close(ctx, q), ctx.output(node.outputs[0])
    rows, context = q.shape[0], k.shape[2]
    most = (context + (PART - 1)) // PART
    room = min_size(rows, FEW_ROWS) * most * (all_heads * part_floats(kernel))
    parts = ctx.scratch(f"{node.name}.parts", "f32", room)
    pointers = {
        "q": source,
        "k": ctx.contiguous(k),
        "v": ctx.contiguous(v),
        "slot": ctx.contiguous(slot),
        "position": ctx.contiguous(position),
        "parts": parts,
        "y": y,
        "fault": ctx.fault(),
    }
    if scales:
        pointers |= {"k_scale": ctx.contiguous(scales[0]), "v_scale": ctx.contiguous(scales[1])}
    sizes: dict[str, Size] = {
        "rows": rows,
        "heads": heads,
        "slots": k.shape[0],
        "context": context,
        "q.0": source.strides[0],
        "q.1": source.strides[1],
        "node": ctx.number(node),
    }
    code = ctx.kernel(
        f"cached_attention_{k.dtype}",
        kernel,
        lambda m, name: emit_cached_attention(m, name, kernel),
    )
    ctx.call(code, node, pointers, sizes, writes=("y", "parts"))
    combine = ctx.kernel(
        "cached_attention_combine", kernel, lambda m, name: emit_combine(m, name, kernel)
    )
    combined = {name: pointers[name] for name in ("parts", "position", "y")}
    ctx.call(
        combine,
        node,
        combined,
        {"rows": rows, "heads": heads, "context": context},
        why="parts of few rows",
    )
