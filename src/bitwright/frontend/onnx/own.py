"""Functions and regions that bitwright's exporter writes, taken for the ops they stand for.

A file may call anything by such a name, so what does not fit the op is inlined as any function is.
The function's body says the same as the op, by the exporter's tests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bitwright.aliases import ATTRIBUTES, OPS, current
from bitwright.errors import BitwrightError
from bitwright.frontend.onnx.context import Context, Inputs
from bitwright.frontend.onnx.node import OnnxNode
from bitwright.frontend.onnx.regions import DOMAIN
from bitwright.ir.dtype import dtype
from bitwright.ir.graph import Value
from bitwright.ops.core.opdef import Kind
from bitwright.ops.core.registry import all_ops

_KINDS = (Kind.COMPUTE, Kind.REDUCTION, Kind.ELEMENTWISE)
_NOT_OURS = ("fallback", "custom")
"""Ops that stand for what a file or a user brings along."""


def call(ctx: Context, node: OnnxNode, inputs: Inputs) -> Sequence[Value] | None:
    """The op's results, or None if this is no call that an op stands for."""
    if node.domain != DOMAIN:
        return None
    region = ctx.importer.regions.called.get(node.op_type)
    name = region.op if region else re.sub(r"_\d+$", "", node.op_type)
    op = current(OPS, name, "op")
    saved: Mapping[str, Any] = region.attrs if region else node.attrs
    attrs = {current(ATTRIBUTES, key, "attribute"): item for key, item in saved.items()}
    operands = inputs[: len(region.operands)] if region else inputs
    try:
        if op in _PRODUCTS:
            return [_PRODUCTS[op](ctx, *operands, **attrs)]
        known = all_ops().get(op)
        if known is None or known.kind not in _KINDS or op in _NOT_OURS or not known.deterministic:
            return None
        given = {name: attrs[name] for name in known.attrs if name in attrs}
        if op == "dynamic_quantize" and given.get("per_token"):
            return _quantized_rows(ctx, *operands, given["to"])  # type: ignore[arg-type]
        results = ctx.b.op(op, *operands, **given)
    except (BitwrightError, TypeError, KeyError):
        return None
    return [results] if isinstance(results, Value) else list(results)


def _quantized_matmul(
    ctx: Context,
    x: Value,
    w: Value,
    scale: Value,
    steps: Value,
    zero: Value,
    offset: Value | None = None,
    *,
    block: int,
) -> Value:
    """A product of rows that the file quantizes."""
    rows = _shared_rows(ctx, (x, scale, zero), block)
    return ctx.b.matmul(rows, _weight(ctx, w, steps, offset))  # type: ignore[no-any-return]


def _dynamic_matmul(
    ctx: Context, x: Value, w: Value, steps: Value, offset: Value | None = None, *, to: str
) -> Value:
    """A product of float rows, which are to be quantized when the model runs."""
    rows = _shared_rows(ctx, _quantized_rows(ctx, x, to), int(x.shape[-1]))
    return ctx.b.matmul(rows, _weight(ctx, w, steps, offset))  # type: ignore[no-any-return]


def _static_conv(
    ctx: Context,
    x: Value,
    w: Value,
    w_scale: Value,
    w_zero: Value | None = None,
    bias: Value | None = None,
    bias_scale: Value | None = None,
    *,
    scale: float,
    zero_point: int,
    to: str,
    per_filter: bool,
    **attrs: Any,
) -> Value:
    """A convolution of a float image, which is to be quantized with one scale."""
    known, b = ctx.frame.quantized_rows, ctx.b
    key = x, f"{to} {scale!r} {zero_point}"
    if key not in known:
        point = np.array(zero_point, dtype(to).numpy)
        quantized = b.quantize(x, np.float32(scale), point, to=to)
        known[key] = (b.dequantize(quantized, np.float32(scale), point),)
    axis = 0 if per_filter else None
    weight = b.dequantize(w, w_scale, w_zero, axis=axis)
    if bias is not None and bias_scale is not None:
        bias = b.dequantize(bias, bias_scale, axis=0 if bias_scale.rank else None)
    return b.conv(known[key][0], weight, bias, **attrs)  # type: ignore[no-any-return]


def _quantized_rows(ctx: Context, x: Value, to: str) -> tuple[Value, ...]:
    """Values, scales and zero points of rows; made once for all that read them."""
    known = ctx.frame.quantized_rows
    if (x, to) not in known:
        known[x, to] = tuple(ctx.b.dynamic_quantize(x, to=to, per_token=True))
    return known[x, to]


def _shared_rows(ctx: Context, quantized: tuple[Value, ...], block: int) -> Value:
    """Dequantized rows; those that several products read are one value."""
    known = ctx.frame.dequantized
    if quantized not in known:
        known[quantized] = ctx.b.dequantize(*quantized, axis=-1, block=block)
    return known[quantized]


def _weight(ctx: Context, w: Value, steps: Value, offset: Value | None) -> Value:
    return ctx.b.dequantize(w, steps, offset, axis=1 if steps.rank else None)  # type: ignore[no-any-return]


_PRODUCTS = {
    "quantized_matmul": _quantized_matmul,
    "dynamic_matmul": _dynamic_matmul,
    "static_conv": _static_conv,
}
