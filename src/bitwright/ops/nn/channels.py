"""Helpers of convolutions and normalizations for channels, axis 1 of x[N, C, ...]."""

from __future__ import annotations

from bitwright.errors import InferenceError
from bitwright.ir.dim import Size
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
