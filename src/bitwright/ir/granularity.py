"""Granularities of quantization: which values share one scale."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PerTensor:
    """One scale for the tensor."""


@dataclass(frozen=True)
class PerAxis:
    """One scale per index of an axis; axis 0 of a weight is its output channels."""

    axis: int = 0


@dataclass(frozen=True)
class PerGroup:
    """One scale per group of `size` values along the contraction axis."""

    size: int


@dataclass(frozen=True)
class PerToken:
    """One scale per row of the last axis, computed at run time."""


Granularity = PerTensor | PerAxis | PerGroup | PerToken
