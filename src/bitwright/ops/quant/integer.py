"""Products of 8-bit integers, exact in i32, and requantization of real values.

    integer_matmul   (x - x_zero) @ (w - w_zero) + bias
    integer_conv     the same over windows of an image; padding has the value x_zero
    requantize       saturate(rne(min(x, highest)) + zero_point)

Q/DQ graphs are lowered to these ops. A layer with quantized input and output is

    requantize(activation(cast(integer_matmul(x, w, x_zero, w_zero, bias), f32) * m), y_zero)

with m[c] = f32(s_x s_w[c] / s_y). A layer with float output has no s_y and no requantize.
Sums wrap at 32 bits, so they do not depend on the order of the terms. Zero points and bias
broadcast: x_zero is per tensor or per row, w_zero per tensor or per column.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.errors import InferenceError
from bitwright.ir.dim import Size
from bitwright.ir.dtype import DType, f32, i32
from bitwright.ir.types import TensorType, broadcast_shapes
from bitwright.ops.core import expect
from bitwright.ops.core.opdef import ROUNDS, Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.math.matmul import infer_matmul, multiply
from bitwright.ops.nn.channels import add_channel_bias
from bitwright.ops.nn.conv import convolve, infer_conv
from bitwright.ops.nn.windows import WINDOW_ATTRS


def _require_int8(**types: TensorType) -> None:
    for name, type_ in types.items():
        expect.dtype(name, type_, lambda d: d.is_integer and d.bits == 8, "i8 or u8")


def _require_zero(name: str, zero: TensorType | None, qvalues: TensorType, axis: int) -> None:
    """Check that the zero point has the operand's dtype and is constant on the contracted axis."""
    if zero is None:
        return
    expect.element(name, zero, qvalues.dtype)
    if zero.rank >= -axis:
        expect.size(f"the contracted axis of {name}", zero.shape[axis], 1)
    _require_within(name, zero, qvalues.shape)


def _require_within(name: str, type_: TensorType, shape: tuple[Size, ...]) -> None:
    if broadcast_shapes(type_.shape, shape) != shape:
        raise InferenceError(
            f"{name} does not broadcast to its operand", expected=list(shape), found=type_
        )


def _require_i32(bias: TensorType | None) -> None:
    if bias is not None:
        expect.element("bias", bias, i32)


def _infer_integer_matmul(
    x: TensorType,
    w: TensorType,
    x_zero: TensorType | None,
    w_zero: TensorType | None,
    bias: TensorType | None,
    deepest: int | None,
) -> TensorType:
    _require_int8(x=x, w=w)
    expect.rank("w", w, *range(2, max(w.rank, 2) + 1))
    _require_zero("x_zero", x_zero, x, -1)
    _require_zero("w_zero", w_zero, w, -2)
    _require_i32(bias)
    y = infer_matmul(x, w)
    if bias is not None:
        _require_within("bias", bias, y.shape)
    depth = x.shape[-1]
    if deepest is not None and isinstance(depth, int) and depth > deepest:
        raise InferenceError(
            "sums of so many products may overflow i32",
            expected=f"a contracted axis of at most {deepest}",
            found=depth,
        )
    return y


def _centred(qvalues: Array, zero: Array | None) -> Array:
    """qvalues - zero, in i64."""
    wide = qvalues.astype(np.int64)
    return wide if zero is None else wide - zero.astype(np.int64)


def _integer_matmul(
    x: Array,
    w: Array,
    x_zero: Array | None,
    w_zero: Array | None,
    bias: Array | None,
    deepest: int | None,
) -> Array:
    y = multiply(_centred(x, x_zero), _centred(w, w_zero))
    return y if bias is None else y + bias.astype(np.int64)


def _infer_integer_conv(
    x: TensorType,
    w: TensorType,
    x_zero: TensorType | None,
    w_zero: TensorType | None,
    bias: TensorType | None,
    **attrs: Any,
) -> TensorType:
    _require_int8(x=x, w=w)
    if x_zero is not None:
        expect.element("x_zero", x_zero, x.dtype)
        expect.size("the number of elements of x_zero", x_zero.count, 1)
    if w_zero is not None:
        expect.element("w_zero", w_zero, w.dtype)
        if w_zero.count != 1:
            expect.rank("w_zero", w_zero, 1)
            expect.size("w_zero", w_zero.shape[0], w.shape[0])
    return infer_conv(x, w, bias, **attrs)


def _integer_conv(
    x: Array, w: Array, x_zero: Array | None, w_zero: Array | None, bias: Array | None, **attrs: Any
) -> Array:
    centre = None if x_zero is None else x_zero.reshape(())
    per_filter = None if w_zero is None else w_zero.reshape(-1, *(1,) * (w.ndim - 1))
    y = convolve(_centred(x, centre), _centred(w, per_filter), None, **attrs)
    return add_channel_bias(y, bias)


def _infer_requantize(
    x: TensorType,
    zero_point: TensorType | None,
    highest: TensorType | None,
    to: DType,
    bounded: bool,
) -> TensorType:
    expect.element("x", x, f32)
    if not (to.is_integer and to.bits <= 16):
        raise InferenceError("'to' is not an integer of at most 16 bits", found=to)
    if zero_point is not None:
        expect.element("zero_point", zero_point, to)
        _require_within("zero_point", zero_point, x.shape)
    if highest is not None:
        expect.element("highest", highest, f32)
        _require_within("highest", highest, x.shape)
    return x.with_dtype(to)


def _requantize(
    x: Array, zero_point: Array | None, highest: Array | None, to: DType, bounded: bool
) -> Array:
    if highest is not None:
        x = np.where(highest < x, highest, x)
    offset = 0.0 if zero_point is None else zero_point.astype(np.float64)
    qvalues = np.clip(np.rint(x.astype(np.float64)) + offset, to.min, to.max)
    return np.asarray(np.where(np.isnan(x), to.min, qvalues))


def _u8(*shape: int, seed: int = 0) -> Array:
    return draw(*shape, dtype="u8", seed=seed, low=0, high=255)


def _i8(*shape: int, seed: int = 0) -> Array:
    return draw(*shape, dtype="i8", seed=seed, low=-128, high=127)


def _i32(*shape: int) -> Array:
    return draw(*shape, dtype="i32", seed=7, low=-9999, high=9999)


def _matmul_samples() -> list[Sample]:
    return [
        sample(_u8(3, 5), _i8(5, 4, seed=1)),
        sample(_u8(3, 5), _i8(5, 4, seed=1), np.uint8(130), np.int8(-3), _i32(4)),
        sample(_i8(2, 3, 5), _i8(5, 4, seed=1), _i8(2, 3, 1, seed=2), None, _i32(4)),
        sample(_u8(3, 5), _u8(5, 4, seed=1), _u8(1, seed=2), _u8(4, seed=3)),
        sample(_i8(2, 3, 5), _u8(2, 5, 4, seed=1), np.int8(5), _u8(2, 1, 4, seed=3), _i32(3, 4)),
        sample(_u8(0, 5), _i8(5, 4), np.uint8(1)),
        sample(_u8(3, 0), _i8(0, 4), np.uint8(1), None, _i32(4)),
        sample(_u8(3, 5), _i8(5, 4, seed=1), deepest=5),
    ]


def _conv_samples() -> list[Sample]:
    x, w = _u8(2, 3, 7, 8), _i8(4, 3, 3, 2, seed=1)
    return [
        sample(x, w, np.uint8(120), None, _i32(4)),
        sample(x, w, np.uint8(7), _i8(4, seed=2), strides=(2, 1), pads=(1, 0, 2, 1)),
        sample(_i8(1, 4, 9), _u8(6, 2, 3), np.array([5], np.int8), np.uint8(128), groups=2),
        sample(_u8(1, 4, 5, 6), _i8(4, 1, 3, 3), np.uint8(9), groups=4, pads=(1, 1, 1, 1)),
        sample(_u8(0, 2, 5), _i8(3, 2, 3)),
    ]


def _requantize_samples() -> list[Sample]:
    x = draw(3, 4, low=-300, high=300)
    return [
        sample(x, np.uint8(128), to="u8"),
        sample(x, _i8(4), to="i8"),
        sample(x, to="i16"),
        sample(np.array([0.5, 1.5, 2.5, -0.5, 254.5, 255.5], np.float32), to="u8"),
        sample(np.array([np.inf, -np.inf, np.nan, 3e9, -3e9], np.float32), np.uint8(3), to="u8"),
        sample(draw(2, 3), to="u4"),
        sample(draw(0, 3), to="u8"),
        sample(x, np.uint8(7), draw(3, 1, seed=1, low=-20, high=200), to="u8", bounded=True),
        sample(np.array([np.nan, 9], np.float32), None, np.float32(5), to="i8"),
    ]


OPDEFS = [
    OpDef(
        "integer_matmul",
        Kind.COMPUTE,
        "x, w, x_zero?, w_zero?, bias?",
        infer=_infer_integer_matmul,
        reference=_integer_matmul,
        takes_epilogue=True,
        grad=ROUNDS,
        flops=lambda xs, ys, attrs: 2 * ys[0].count * xs[0].shape[-1],
        samples=_matmul_samples,
        attrs={"deepest": Attr("int", None)},
        doc="(x - x_zero) @ (w - w_zero) + bias of 8-bit integers, in i32. `deepest` is the "
        "largest contracted axis whose sums cannot wrap.",
    ),
    OpDef(
        "integer_conv",
        Kind.COMPUTE,
        "x, w, x_zero?, w_zero?, bias?",
        infer=_infer_integer_conv,
        reference=_integer_conv,
        takes_epilogue=True,
        grad=ROUNDS,
        flops=lambda xs, ys, attrs: 2 * ys[0].count * (xs[1].count // xs[1].shape[0]),
        samples=_conv_samples,
        attrs={**WINDOW_ATTRS, "groups": Attr("int", 1)},
        doc="Convolution of x[N, C, ...] - x_zero with w[M, C/groups, ...] - w_zero, in i32; "
        "padding has the value x_zero.",
    ),
    OpDef(
        "requantize",
        Kind.ELEMENTWISE,
        "x, zero_point?, highest?",
        infer=_infer_requantize,
        reference=_requantize,
        fixed_types=True,
        grad=ROUNDS,
        scalar=lambda e, x, zero_point=None, highest=None, *, to, bounded: e.requantize(
            x, zero_point, highest, to, bool(bounded)
        ),
        samples=_requantize_samples,
        attrs={"to": Attr("dtype"), "bounded": Attr("bool", False)},
        doc="saturate(rne(min(x, highest)) + zero_point); NaN becomes the lowest value of `to`. "
        "`bounded` promises that x is a number between -2**30 and 2**30.",
    ),
]
