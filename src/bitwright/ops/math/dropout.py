"""Dropout by a key: whether an element stays depends on the key and its position only.

    y[i] = x[i] / (1 - rate)   if hash(key, i) / 2 ** 32 >= rate,   else 0

The hash is a sequence of multiplications and shifts in 32 bits (`kept`), so that every backend and
every number of threads drops the same elements. The gradient is the same op on dy: no mask is
stored.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.errors import InferenceError
from bitwright.ir.dtype import i64
from bitwright.ir.graph import Node, Value
from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.numeric import Array, wide
from bitwright.ops.core.opdef import Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.reverse import Gradients

SPREAD = 0x9E3779B1  # 2 ** 32 / golden ratio
FIRST, SECOND = 0x85EBCA6B, 0xC2B2AE35
BITS = 24
"""Bits of the hash that are compared with the rate."""


def threshold(rate: float) -> int:
    """The smallest `BITS`-bit hash that stays."""
    return round(rate * (1 << BITS))


def scale(rate: float) -> float:
    """The factor of elements that stay."""
    return 1 / (1 - rate) if rate < 1 else 0.0


def kept(key: int, count: int, rate: float) -> Array:
    """Whether each of `count` elements stays."""
    low, high = np.uint32(key & 0xFFFFFFFF), np.uint32((key >> 32) & 0xFFFFFFFF)
    h = np.arange(count, dtype=np.uint32) * np.uint32(SPREAD) + low
    h = ((h ^ (h >> np.uint32(16))) * np.uint32(FIRST)) ^ high
    h = (h ^ (h >> np.uint32(13))) * np.uint32(SECOND)
    h ^= h >> np.uint32(16)
    return np.asarray(h >> np.uint32(32 - BITS) >= threshold(rate))


def _infer(x: TensorType, key: TensorType, rate: float) -> TensorType:
    expect.floating("x", x)
    expect.rank("key", key, 0)
    expect.dtype("key", key, lambda d: d == i64, "i64")
    if not 0 <= rate <= 1:
        raise InferenceError("the rate is out of range", expected="0 to 1", found=rate)
    return x


def _dropout(x: Array, key: Array, rate: float) -> Array:
    mask = kept(int(key), x.size, rate).reshape(x.shape)
    return np.where(mask, wide(x) * scale(rate), 0)


def _grad(b: Builder, node: Node, dys: list[Value | None]) -> Gradients:
    return [b.dropout(dys[0], node.inputs[1], **node.attrs), None]


def _samples() -> list[Sample]:
    keys = [np.int64(k) for k in (0, 1, -5, 2**62 + 12345)]
    return [
        sample(draw(3, 5), keys[1], rate=0.5),
        sample(draw(127), keys[3], rate=0.1),
        sample(draw(2, 17, 3), keys[2], rate=0.9),
        sample(draw(), keys[0], rate=0.25),
        sample(draw(0, 4), keys[0], rate=0.25),
        sample(draw(33, dtype="f64"), keys[3], rate=0.5),
        sample(draw(4, 9, dtype="f16"), keys[2], rate=0.25, tolerance=1e-3),
        sample(draw(4, 9, dtype="bf16"), keys[2], rate=0.25, tolerance=1e-2),
        sample(draw(7), keys[1], rate=0.0),
        sample(draw(7), keys[1], rate=1.0),
    ]


_RATE: dict[str, Any] = {"rate": Attr("float", 0.5)}
OPDEFS = [
    OpDef(
        "dropout",
        Kind.REDUCTION,  # its elements depend on their positions
        "x, key",
        infer=_infer,
        reference=_dropout,
        grad=_grad,
        samples=_samples,
        attrs=_RATE,
        doc="x / (1 - rate) where a hash of the key and the position is at least the rate, else 0.",
    )
]
