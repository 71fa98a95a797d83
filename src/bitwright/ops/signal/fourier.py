"""Discrete Fourier transforms along one axis.

    forward  y[k] = sum over n of x[n] * exp(-2 pi i k n / N)
    inverse  y[n] = sum over k of x[k] * exp(+2 pi i k n / N) / N

`fft` works on complex tensors. `dft` has real and imaginary parts in a last axis of size 2 (or 1
for real signals), as in ONNX; its signal is truncated or zero-padded to `length`. A one-sided
forward transform gives the first `length // 2 + 1` terms of a real signal, and the one-sided
inverse maps these terms back to the real signal.

An f32 signal is transformed in f32, not in f64: where terms cancel, ONNX's test cases expect the
f32 rounding error to 1e-7, whatever the scale.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.errors import InferenceError
from bitwright.ir.dim import Size
from bitwright.ir.graph import Node, Value
from bitwright.ir.types import TensorType, normalize_axis
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.derivatives import reciprocal_of_size
from bitwright.ops.core.inference import same
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.reverse import Gradients
from bitwright.ops.shape.movement import pad_axis, slice_axis


def _signal_axis(axis: int, rank: int) -> int:
    position = normalize_axis(axis, rank)
    if position == rank - 1:
        raise InferenceError(
            f"axis {axis} holds real and imaginary parts", expected="a signal axis before the last"
        )
    return position


def _length(size: Any, length: Any, inverse: bool, onesided: bool) -> Any:
    if length is None:
        length = 2 * (size - 1) if inverse and onesided else size
    if isinstance(length, int) and length < 1:
        raise InferenceError("the length is too small", expected="at least 1", found=length)
    return length


def _infer_dft(
    x: TensorType, axis: int, length: Size | None, inverse: bool, onesided: bool
) -> TensorType:
    expect.floating("x", x)
    if x.rank < 2 or x.shape[-1] not in (1, 2):
        raise InferenceError(
            "x holds no signal", expected="a last axis of size 1 (real) or 2 (complex)", found=x
        )
    if onesided and x.shape[-1] != (2 if inverse else 1):
        raise InferenceError(
            "a one-sided transform goes from a real signal to complex terms, or inversely back",
            expected=f"a last axis of size {2 if inverse else 1}",
            found=x,
        )
    position = _signal_axis(axis, x.rank)
    terms = _length(x.shape[position], length, inverse, onesided)
    if onesided and not inverse:
        terms = terms // 2 + 1
    parts = 1 if onesided and inverse else 2
    return x.with_shape((*x.shape[:position], terms, *x.shape[position + 1 : -1], parts))


def _dft(x: Array, axis: int, length: int | None, inverse: bool, onesided: bool) -> Array:
    position = _signal_axis(axis, x.ndim)
    terms = _length(x.shape[position], length, inverse, onesided)
    parts = x if x.dtype == np.float32 else wide(x)
    signal = parts[..., 0] if x.shape[-1] == 1 else parts[..., 0] + 1j * parts[..., 1]
    if onesided and inverse:
        return np.fft.irfft(signal, terms, position)[..., None]
    transform: Any = np.fft.ifft if inverse else np.fft.rfft if onesided else np.fft.fft
    result = transform(signal, terms, position)
    return np.stack([result.real, result.imag], axis=-1)


def _infer_fft(x: TensorType, axis: int, inverse: bool) -> TensorType:
    expect.dtype("x", x, lambda d: d.is_complex, "a complex type")
    normalize_axis(axis, x.rank)
    return same(x)


def _fft(x: Array, axis: int, inverse: bool) -> Any:
    if not x.size:
        return x
    return (np.fft.ifft if inverse else np.fft.fft)(wide(x), axis=axis)


def _dft_samples() -> list[Sample]:
    return [
        sample(draw(2, 10, 1), axis=1),
        sample(draw(2, 10, 2), axis=1, inverse=True),
        sample(draw(3, 7, 4, 2), axis=-2),
        sample(draw(3, 7, 4, 2), axis=0, length=5),
        sample(draw(2, 9, 1), axis=1, onesided=True),
        sample(draw(2, 10, 1), axis=-2, length=16, onesided=True),
        sample(draw(2, 6, 2), axis=1, onesided=True, inverse=True),
        sample(draw(2, 6, 2), axis=1, onesided=True, inverse=True, length=11),
    ]


# Gradients. A transform is a matrix, and its gradient the conjugate transpose: that of the forward
# transform is N times the inverse one, that of the inverse one the forward transform over N.


def _grad_fft(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    axis, inverse = node.attrs["axis"], node.attrs["inverse"]
    dx = b.fft(dys[0], axis=axis, inverse=not inverse)
    scale = reciprocal_of_size(b, dx, (normalize_axis(axis, dx.rank),))
    return [b.mul(dx, scale) if inverse else b.div(dx, scale)]


def _grad_dft(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    (x,), attrs, dy = node.operands, node.attrs, dys[0]
    axis, inverse, onesided = (
        _signal_axis(attrs["axis"], x.rank),
        attrs["inverse"],
        attrs["onesided"],
    )
    terms = _length(x.shape[axis], attrs.get("length"), inverse, onesided)
    if onesided and inverse:
        dx = _half_spectrum(b, dy, axis)
    else:
        if onesided:  # the terms that the forward transform left out
            dy = pad_axis(b, dy, axis, 0, terms - dy.shape[axis])
        dx = b.dft(dy, axis=axis, inverse=not inverse)
    whole = dy if onesided and inverse else dx
    scale = reciprocal_of_size(b, whole, (axis,))
    dx = b.mul(dx, scale) if inverse else b.div(dx, scale)
    if x.shape[-1] == 1:  # a real signal
        dx = slice_axis(b, dx, x.rank - 1, 0, 1)
    # the signal was truncated or padded with zeros to `terms`
    return [pad_axis(b, dx, axis, 0, x.shape[axis] - dx.shape[axis])]


def _half_spectrum(b: Builder, dy: Value, axis: int) -> Any:
    """The forward terms of a real signal; all but the first, and the middle one of an even number,
    stand for two terms of the whole spectrum."""
    half = b.dft(dy, axis=axis, onesided=True)
    aligned = [half.shape[axis] if at == axis else 1 for at in range(half.rank)]
    twice = b.mul(b.reshape(b.iota(length=half.shape[axis]), shape=aligned), 2)
    count = b.gather(b.shape_of(dy), np.array(axis))
    is_alone = b.or_(b.eq(twice, 0), b.eq(twice, count))
    return b.where(is_alone, half, b.mul(half, 2.0))


OPDEFS = [
    OpDef(
        "dft",
        Kind.COMPUTE,
        "x",
        infer=_infer_dft,
        reference=_dft,
        grad=_grad_dft,
        samples=_dft_samples,
        attrs={
            "axis": Attr("int"),
            "length": Attr("size", None),
            "inverse": Attr("bool", False),
            "onesided": Attr("bool", False),
        },
        doc="The discrete Fourier transform along an axis; the last axis holds real, imaginary.",
    ),
    OpDef(
        "fft",
        Kind.COMPUTE,
        "x",
        infer=_infer_fft,
        reference=_fft,
        grad=_grad_fft,
        samples=lambda: [
            sample(draw(3, 8, dtype="c64")),
            sample(draw(3, 5, dtype="c128"), axis=0, inverse=True),
            sample(draw(0, 5, dtype="c64"), axis=0),
        ],
        attrs={"axis": Attr("int", -1), "inverse": Attr("bool", False)},
        doc="The discrete Fourier transform of complex numbers along an axis.",
    ),
]
