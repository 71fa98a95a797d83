"""Lowering of int8 attention: one kernel quantizes keys and values, a second one attends."""

from __future__ import annotations

from dataclasses import replace

from bitwright.backends.cpu.kernels.attention.int8 import emit_int8_attention, quantized_signature
from bitwright.backends.cpu.kernels.attention.int8_keys import QuantizedKeys, emit_int8_keys
from bitwright.backends.cpu.kernels.attention.spec import QUERY_BLOCK, Attention
from bitwright.backends.cpu.lowering.context import Lowering
from bitwright.ir.dim import Size
from bitwright.ir.graph import Node
from bitwright.lir.buffer import View

GIVEN = ("k", "v", "past_k", "past_v")


def call_quantized(
    ctx: Lowering, node: Node, kernel: Attention, views: dict[str, View], sizes: dict[str, Size]
) -> None:
    """Append both kernel calls; `views` and `sizes` are those of f32 attention."""
    form = QuantizedKeys.of(ctx.target, kernel)
    batches, heads, keys, _ = views["k"].shape
    total = keys + sizes.get("past", 0)
    count = batches * heads
    groups = (total + 3) // 4 * 4 if form.dots else total
    element = "i8" if form.dots else "f32"
    floats = dict.fromkeys(("k_scales", "v_multipliers", "v_log_multipliers"), count * total)
    floats |= {"v_inverse_scales": count, "v_means": count * form.width}
    bytes_ = {"k_q": count * total * form.row, "v_q": count * groups * form.width}
    kinds = ("f32", floats), (element, bytes_)
    made = {n: ctx.scratch(f"{node.name}.{n}", e, s) for e, all_ in kinds for n, s in all_.items()}
    given = {name: views[name] for name in GIVEN if name in views}
    strides = {f"{n}.{axis}": view.strides[axis] for n, view in given.items() for axis in range(3)}
    own: dict[str, Size] = {"batches": batches, "heads": heads, "keys": keys, **strides}
    if kernel.has_past:
        own["past"] = sizes["past"]
    quantize = ctx.kernel(
        "attention_quantize_kv_int8", form, lambda m, name: emit_int8_keys(m, name, form)
    )
    ctx.call(quantize, f"{node.name}.keys", {**given, **made}, own, writes=tuple(made))
    kernel = replace(kernel, has_past=False, paths=QUERY_BLOCK)
    attend = ctx.kernel(
        "attention_int8", kernel.key, lambda m, name: emit_int8_attention(m, name, kernel)
    )
    slots = {slot.name for slot in quantized_signature(kernel).slots}
    sizes = {**sizes, "keys": total}
    for name in ("q", "y"):
        sizes |= {f"{name}.{axis}": views[name].strides[axis] for axis in range(3)}
    pointers = {name: view for name, view in {**views, **made}.items() if name in slots}
    sizes = {name: size for name, size in sizes.items() if name in slots}
    ctx.call(attend, node, pointers, sizes, why="int8 products, summed in i32")
