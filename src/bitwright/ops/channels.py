"""What convolutions and normalizations share about channels, axis 1 of x[N, C, ...]."""

from __future__ import annotations

from bitwright.errors import InferenceError
from bitwright.ir.dim import Size
from bitwright.ops.numeric import wide
from bitwright.ops.opdef import Array


def require_groups(what: str, channels: Size, groups: int) -> None:
    if groups < 1 or (isinstance(channels, int) and channels % groups):
        raise InferenceError(
            f"{what} cannot be divided into {groups} groups",
            expected="a divisor of the channels",
            found=channels,
        )


def per_channel(values: Array, rank: int) -> Array:
    """One value a channel, so that it broadcasts to a tensor of this rank."""
    return wide(values).reshape(-1, *(1,) * (rank - 2))


def add_channel_bias(y: Array, bias: Array | None) -> Array:
    return y if bias is None else y + per_channel(bias, y.ndim)
