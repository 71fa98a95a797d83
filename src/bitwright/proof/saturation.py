"""Products of u8 and s8 that saturate on x86 processors without VNNI.

`vpmaddubsw` adds two neighbouring products in 16 bits: x0*w0 + x1*w1, with x up to 255. The sum
leaves [-32768, 32767] only if the positive or the negative part of a pair of weights is too large:

    255 * (max(w0, 0) + max(w1, 0)) > 32767    or    255 * (max(-w0, 0) + max(-w1, 0)) > 32768
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bitwright.ir.arrays import Array

LARGEST_U8 = 255


@dataclass(frozen=True)
class PairBound:
    """Pairs of neighbouring weights, and those that can saturate."""

    pairs: int
    saturating: int
    channels: int
    """Output channels with at least one such pair."""

    def __str__(self) -> str:
        return (
            f"{self.saturating:,} of {self.pairs:,} neighbouring pairs of weights exceed 16 bits "
            f"({self.channels} output channels)"
        )


def pair_bound(weight: Array, largest: int = LARGEST_U8) -> PairBound:
    """The pairs of an int8 matrix [terms, channels] that can saturate with inputs to `largest`."""
    w = weight.astype(np.int32)
    if w.shape[0] % 2:
        w = np.concatenate([w, np.zeros((1, w.shape[1]), np.int32)])
    first, second = w[0::2], w[1::2]
    above = largest * (np.maximum(first, 0) + np.maximum(second, 0)) > 32767
    below = largest * (np.maximum(-first, 0) + np.maximum(-second, 0)) > 32768
    wrong = above | below
    return PairBound(wrong.size, int(wrong.sum()), int(wrong.any(0).sum()))


def as_matrix(weight: Array, op: str, is_transposed: bool = False) -> Array:
    """The weight of a MatMul, Gemm or Conv as [terms, channels]."""
    if "Conv" in op and weight.ndim > 2:  # runtimes order the terms by position, then channel
        return np.moveaxis(weight, 1, -1).reshape(weight.shape[0], -1).T
    if weight.ndim == 1:
        return weight[:, None]
    matrix: Array = np.swapaxes(weight, -1, -2) if is_transposed else weight
    return np.moveaxis(matrix, -2, 0).reshape(matrix.shape[-2], -1)
