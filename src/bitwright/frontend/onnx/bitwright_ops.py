"""Imports functions and regions that bitwright's exporter wrote as the ops that they implement.

Any file may use these names: a call that does not fit the op is inlined like any other function.
The exporter's tests check that the body of a function computes the same as its op. Names of the
last release are in `aliases`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bitwright.aliases import ATTRIBUTES, OPS, current
from bitwright.errors import BitwrightError
from bitwright.frontend.onnx.api import Context, Inputs, OnnxNode
from bitwright.frontend.onnx.regions import DOMAIN
from bitwright.ir import Value, dtype
from bitwright.ops.core.opdef import Kind
from bitwright.ops.core.registry import all_ops

_KINDS = (Kind.COMPUTE, Kind.REDUCTION, Kind.ELEMENTWISE)
_FOREIGN = ("fallback", "custom")
"""Ops that call functions from outside bitwright."""


def import_call(ctx: Context, node: OnnxNode, inputs: Inputs) -> Sequence[Value] | None:
    """The results of the op that a call implements, or None if there is no such op."""
    if node.domain != DOMAIN:
        return None
    region = ctx.importer.regions.called.get(node.op_type)
    name = region.op if region else re.sub(r"_\d+$", "", node.op_type)
    op = current(OPS, name, "op")
    given = region.attrs if region else node.attrs
    attrs = {current(ATTRIBUTES, key, f"attribute of {op}"): item for key, item in given.items()}
    operands = inputs[: len(region.operands)] if region else inputs
    try:
        if op in _PRODUCTS:
            return [_PRODUCTS[op](ctx, *operands, **attrs)]
        known = all_ops().get(op)
        if known is None or known.kind not in _KINDS or op in _FOREIGN or not known.deterministic:
            return None
        own = {name: attrs[name] for name in known.attrs if name in attrs}
        is_plain = own.get("per_token") and own.get("stored") is None
        if op == "dynamic_quantize" and is_plain and len(operands) == 1:
            return _quantize_rows(ctx, operands[0], own["to"])
        return ctx.b.results(op, *operands, **own)
    except (BitwrightError, TypeError, KeyError):
        return None


def _quantized_matmul(
    ctx: Context,
    x: Value,
    w: Value,
    x_scale: Value,
    w_scale: Value,
    x_zero: Value,
    w_zero: Value | None = None,
    *,
    block: int,
) -> Value:
    """A matmul whose rows the file quantizes."""
    rows = _dequantize_rows(ctx, (x, x_scale, x_zero), block)
    return ctx.b.matmul(rows, _dequantize_weight(ctx, w, w_scale, w_zero))


def _dynamic_matmul(
    ctx: Context, x: Value, w: Value, w_scale: Value, w_zero: Value | None = None, *, to: str
) -> Value:
    """A matmul of float rows, which are quantized at run time."""
    rows = _dequantize_rows(ctx, _quantize_rows(ctx, x, to), int(x.shape[-1]))
    return ctx.b.matmul(rows, _dequantize_weight(ctx, w, w_scale, w_zero))


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
    """A convolution of a float image, which is quantized with a static scale."""
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
    return b.conv(known[key][0], weight, bias, **attrs)


def _quantize_rows(ctx: Context, x: Value, to: str) -> tuple[Value, ...]:
    """Quantized rows, scales and zero points, computed once per value."""
    known = ctx.frame.quantized_rows
    if (x, to) not in known:
        known[x, to] = ctx.b.dynamic_quantize(x, to=to, per_token=True)
    return known[x, to]


def _dequantize_rows(ctx: Context, quantized: tuple[Value, ...], block: int) -> Value:
    """Dequantized rows, one value for all products that read them."""
    known = ctx.frame.dequantized
    if quantized not in known:
        known[quantized] = ctx.b.dequantize(*quantized, axis=-1, block=block)
    return known[quantized]


def _dequantize_weight(ctx: Context, w: Value, scale: Value, zero: Value | None) -> Value:
    return ctx.b.dequantize(w, scale, zero, axis=1 if scale.rank else None)


_PRODUCTS: dict[str, Callable[..., Value]] = {
    "quantized_matmul": _quantized_matmul,
    "dynamic_matmul": _dynamic_matmul,
    "static_conv": _static_conv,
}
