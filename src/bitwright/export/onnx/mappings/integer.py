"""Integer products as MatMulInteger and ConvInteger; requantize and lookup tables."""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.export.onnx.forms import as_scalar
from bitwright.export.onnx.mapping import Ref, Scope, exports
from bitwright.export.onnx.mappings.norms import per_channel
from bitwright.export.onnx.mappings.windows import static_windows
from bitwright.ir.dtype import DType, f32, i32


def _is_one(zero: Ref | None) -> bool:
    """Whether a zero point is one number or absent."""
    return zero is None or all(size == 1 for size in zero.shape)


def _scalar(e: Scope, zero: Ref | None) -> Ref | None:
    return None if zero is None else as_scalar(e, zero)


@exports("integer_matmul", widens=False)
def integer_matmul(
    e: Scope,
    x: Ref,
    w: Ref,
    x_zero: Ref | None,
    w_zero: Ref | None,
    bias: Ref | None,
    deepest: int | None,
) -> Ref:
    if _is_one(x_zero) and _is_one(w_zero):
        y = e.MatMulInteger(x, w, _scalar(e, x_zero), _scalar(e, w_zero))
    else:
        y = e.MatMul(_centred(e, x, x_zero), _centred(e, w, w_zero))
    return y if bias is None else e.Add(y, bias)


def _centred(e: Scope, qvalues: Ref, zero: Ref | None) -> Ref:
    wide = e.cast(qvalues, i32)
    return wide if zero is None else e.Sub(wide, e.cast(zero, i32))


@exports("integer_conv", widens=False)
def integer_conv(
    e: Scope,
    x: Ref,
    w: Ref,
    x_zero: Ref | None,
    w_zero: Ref | None,
    bias: Ref | None,
    groups: int,
    **windows: Any,
) -> Ref:
    """ConvInteger; a zero point per filter is subtracted: y - w_zero * (sum of the window)."""
    attrs = static_windows(e, "ConvInteger", windows)
    attrs["group"] = groups if groups != 1 else None
    centre = _scalar(e, x_zero)
    common = _scalar(e, w_zero) if _is_one(w_zero) else None
    y = e.ConvInteger(x, w, centre, common, **attrs)
    if w_zero is not None and common is None:
        ones = e.Sub(e.cast(w, i32), e.Sub(e.cast(w, i32), e.constant(np.array(1), i32)))
        sums = e.ConvInteger(x, e.cast(ones, w.element), centre, **attrs)
        y = e.Sub(y, e.Mul(sums, per_channel(e, e.cast(w_zero, i32), x.rank)))
    return y if bias is None else e.Add(y, per_channel(e, bias, x.rank))


@exports("requantize", widens=False)
def requantize(
    e: Scope, x: Ref, zero_point: Ref | None, highest: Ref | None, to: DType, bounded: bool
) -> Ref:
    """Requantize in plain arithmetic: QuantizeLinear of NaN differs between runtimes."""
    if highest is not None:
        x = e.Min(x, highest)
    qvalues = e.Round(e.Where(e.IsNaN(x), e.scalar(-np.inf, x), x))
    if zero_point is not None:
        qvalues = e.Add(qvalues, e.cast(zero_point, f32))
    return e.cast(e.Clip(qvalues, e.scalar(to.min, qvalues), e.scalar(to.max, qvalues)), to)


@exports("lookup_table", widens=False)
def lookup_table(e: Scope, x: Ref, table: Ref) -> Ref:
    places = e.cast(x, i32)
    if x.element.is_signed:
        is_upper = e.Less(places, e.scalar(0, places))
        places = e.Where(is_upper, e.Add(places, e.scalar(256, places)), places)
    return e.Gather(table, places, axis=0)
