"""Complex numbers and Fourier transforms."""

from __future__ import annotations

import math
from typing import Any

from bitwright.frontend.torch.context import Context, maps
from bitwright.ir import Dim, Value
from bitwright.ir.types import normalize_axis

# Torch's numbers of the normalizations of a transform: none, 1 / sqrt(n), 1 / n.
_NONE, _BY_ROOT, _BY_COUNT = range(3)


@maps("complex.default")
def complex_(ctx: Context, real: Value, imaginary: Value) -> Value:
    return ctx.b.complex(real, imaginary)


@maps("polar.default")
def polar(ctx: Context, size: Value, angle: Value) -> Value:
    parts = (ctx.b.mul(size, ctx.b.op(function, angle)) for function in ("cos", "sin"))
    return ctx.b.complex(*parts)


@maps("view_as_complex.default", "view_as_complex_copy.default")
def view_as_complex(ctx: Context, x: Value) -> Value:
    return ctx.b.complex(ctx.take(x, x.rank - 1, 0), ctx.take(x, x.rank - 1, 1))


@maps("view_as_real.default", "view_as_real_copy.default")
def view_as_real(ctx: Context, x: Value) -> Value:
    parts = [ctx.unsqueeze(part, x.rank) for part in (ctx.b.real(x), ctx.b.imag(x))]
    return ctx.b.concat(*parts, axis=x.rank)


@maps("real.default")
def real(ctx: Context, x: Value) -> Value:
    return ctx.b.real(x) if x.dtype.is_complex else x


@maps("imag.default")
def imag(ctx: Context, x: Value) -> Value:
    return ctx.b.imag(x)


@maps("conj.default", "_conj.default", "_conj_physical.default", "conj_physical.default")
def conj(ctx: Context, x: Value) -> Value:
    return ctx.b.conj(x) if x.dtype.is_complex else x


@maps("abs.default")
def absolute(ctx: Context, x: Value) -> Value:
    return ctx.b.sqrt(ctx.b.squared_norm(x)) if x.dtype.is_complex else ctx.b.abs(x)


@maps("angle.default")
def angle(ctx: Context, x: Value) -> Value:
    if x.dtype.is_complex:
        return ctx.b.atan2(ctx.b.imag(x), ctx.b.real(x))
    x = ctx.operand(x)
    return ctx.b.where(ctx.b.lt(x, 0.0), ctx.operand(math.pi), ctx.b.mul(x, 0.0))


def _normalized(
    ctx: Context, x: Value, axes: list[int], norm: int, divided: bool, like: Value
) -> Value:
    """`x` times torch's factor; `divided` if our transform has divided by the count."""
    count = ctx.count(like, axes)
    power = {_NONE: 0.0, _BY_ROOT: -0.5, _BY_COUNT: -1.0}[norm] + (1.0 if divided else 0.0)
    if power == 0:
        return x
    if isinstance(count, Dim):
        part = ctx.b.real(x).dtype if x.dtype.is_complex else x.dtype
        factor = ctx.b.pow(ctx.scalar(count, part), power)
        if x.dtype.is_complex:
            factor = ctx.b.complex(factor, ctx.const(0, part))
        return ctx.b.mul(x, factor)
    return ctx.b.mul(x, ctx.const(float(count) ** power, x.dtype))


@maps("_fft_c2c.default")
def fft_c2c(ctx: Context, x: Value, dims: list[int], norm: int, forward: bool) -> Value:
    axes = [normalize_axis(dim, x.rank) for dim in dims]
    y = x
    for axis in axes:
        y = ctx.b.fft(y, axis=axis, inverse=not forward)
    return _normalized(ctx, y, axes, norm, not forward, x)


@maps("_fft_r2c.default")
def fft_r2c(ctx: Context, x: Value, dims: list[int], norm: int, onesided: bool) -> Value:
    *outer, last = [normalize_axis(dim, x.rank) for dim in dims]
    parts = ctx.b.dft(ctx.unsqueeze(x, x.rank), axis=last, onesided=onesided)
    y = view_as_complex(ctx, parts)
    for axis in outer:
        y = ctx.b.fft(y, axis=axis)
    return _normalized(ctx, y, [*outer, last], norm, False, x)


@maps("_fft_c2r.default")
def fft_c2r(ctx: Context, x: Value, dims: list[int], norm: int, last_size: Any) -> Value:
    *outer, last = [normalize_axis(dim, x.rank) for dim in dims]
    y = x
    for axis in outer:
        y = ctx.b.fft(y, axis=axis, inverse=True)
    parts = view_as_real(ctx, y)
    wave = ctx.b.dft(parts, axis=last, length=last_size, inverse=True, onesided=True)
    real_y = ctx.reshape(wave, wave.shape[:-1])
    return _normalized(ctx, real_y, [*outer, last], norm, True, real_y)
