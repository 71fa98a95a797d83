"""Helpers of convolutions and normalizations for channels, axis 1 of x[N, C, ...]."""

from __future__ import annotations

from typing import cast

from bitwright.errors import InferenceError
from bitwright.ir.dim import Size
from bitwright.ir.graph import Value
from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array
from bitwright.ops.shape.gather import check_shape


def require_groups(what: str, channels: Size, groups: int) -> None:
    if groups < 1 or (isinstance(channels, int) and channels % groups):
        raise InferenceError(
            f"{what} cannot be divided into {groups} groups",
            expected="a divisor of the channels",
            found=channels,
        )


def per_channel(what: str, values: Array, x: Array) -> Array:
    """One value for each channel of x, shaped to broadcast to x."""
    check_shape(what, values.shape, x.shape[1:2] or (1,))
    return wide(values).reshape(-1, *(1,) * (x.ndim - 2))


def add_channel_bias(y: Array, bias: Array | None) -> Array:
    return y if bias is None else y + per_channel("bias", bias, y)


def outside_channels(rank: int) -> tuple[int, ...]:
    """All axes but that of the channels."""
    return (0, *range(2, rank))


def as_channels(b: Builder, values: Value, x: Value) -> Value:
    """One value for each channel of x, shaped to broadcast to x."""
    if x.rank <= 2:
        return values
    return cast(Value, b.reshape(values, shape=(*values.shape, *(1,) * (x.rank - 2))))


def require_channels(x: TensorType, least: int) -> Size:
    """The number of channels of x, which has at least `least` axes and a floating type."""
    expect.floating("x", x)
    if x.rank < least:
        raise InferenceError("x has the wrong rank", expected=f"rank {least} or more", found=x)
    return x.shape[1] if x.rank > 1 else 1


def require_per_channel(what: str, type_: TensorType | None, channels: Size) -> None:
    if type_ is not None:
        expect.floating(what, type_)
        expect.rank(what, type_, 1)
        expect.size(what, type_.shape[0], channels)
