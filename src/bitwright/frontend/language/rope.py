"""Frequencies of rotary embeddings, plain and scaled.

default   theta ** (-2 i / n)
linear    divided by the factor
llama3    long wavelengths divided, short ones kept, a ramp between them
yarn      the same with a ramp over dimensions, cosines and sines scaled
longrope  divided by a list, one for short and one for long contexts
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bitwright.errors import ImportModelError, UnsupportedError
from bitwright.frontend.language.config import Rope

Array = np.ndarray[Any, Any]


def plain_frequencies(theta: float, dim: int) -> Array:
    return np.asarray(float(theta) ** (-np.arange(0, dim, 2, dtype=np.float64) / dim))


def make_rope(
    theta: float, dim: int, scaling: Mapping[str, Any], context: int, where: str = "rope"
) -> Rope:
    """A rope by the words of `config.json` ("rope_type", "factor", …)."""
    if dim < 2 or dim % 2 or not theta > 0:
        raise ImportModelError(
            "rotary embeddings need an even number of features",
            where=where,
            found=f"{dim} features, theta {theta}",
        )
    base = plain_frequencies(theta, dim)
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    original = int(scaling.get("original_max_position_embeddings") or context)
    if kind in ("default", "none", "mrope"):
        return Rope(tuple(base.tolist()), theta)
    if kind == "linear":
        return Rope(tuple((base / _number(scaling, "factor", where)).tolist()), theta)
    if kind == "llama3":
        return Rope(tuple(_llama3(base, scaling, original, where).tolist()), theta)
    if kind == "yarn":
        return _yarn(base, theta, dim, scaling, original, where)
    if kind in ("longrope", "su"):
        return _longrope(base, theta, scaling, original, context, where)
    raise UnsupportedError(
        f"rotary embeddings of the kind {kind!r} are not supported",
        where=where,
        expected="default, linear, llama3, yarn or longrope",
    )


def _number(
    scaling: Mapping[str, Any], key: str, where: str, default: float | None = None
) -> float:
    value = scaling.get(key, default)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ImportModelError(f"{key!r} is not a number", where=where, found=repr(value))
    return float(value)


def _llama3(base: Array, scaling: Mapping[str, Any], original: int, where: str) -> Array:
    factor = _number(scaling, "factor", where)
    low = _number(scaling, "low_freq_factor", where, 1.0)
    high = _number(scaling, "high_freq_factor", where, 4.0)
    wavelength = 2 * math.pi / base
    smooth = (original / wavelength - low) / (high - low)
    ramp = (1 - smooth) * base / factor + smooth * base
    return np.where(
        wavelength > original / low,
        base / factor,
        np.where(wavelength < original / high, base, ramp),
    )


def _yarn(
    base: Array, theta: float, dim: int, scaling: Mapping[str, Any], original: int, where: str
) -> Rope:
    factor = _number(scaling, "factor", where)
    fast, slow = (_number(scaling, f"beta_{k}", where, d) for k, d in (("fast", 32), ("slow", 1)))
    mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")

    def strength(of: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * of * math.log(factor) + 1

    scale = scaling.get("attention_factor")
    if scale is None:
        scale = strength(mscale) / strength(mscale_all) if mscale and mscale_all else strength()

    def dimension(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(fast), dimension(slow)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
    return Rope(tuple((base / factor * ramp + base * (1 - ramp)).tolist()), theta, float(scale))


def _longrope(
    base: Array,
    theta: float,
    scaling: Mapping[str, Any],
    original: int,
    context: int,
    where: str,
) -> Rope:
    factor = scaling.get("factor") or context / original
    scale = scaling.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(max(original, 2)))
    short, long = (
        tuple((base / divisors(scaling.get(f"{kind}_factor"), len(base), where)).tolist())
        for kind in ("short", "long")
    )
    return Rope(short, theta, float(scale), original, (long, float(scale)))


def divisors(values: Sequence[float] | Array | None, count: int, where: str) -> Array:
    """One positive divisor for each pair of features."""
    try:
        found = np.asarray(values, np.float64)
    except (ValueError, TypeError):
        found = np.zeros(0)
    if found.shape != (count,) or not (np.isfinite(found).all() and (found > 0).all()):
        raise ImportModelError(
            "the divisors of rotary frequencies are missing or damaged",
            where=where,
            expected=f"{count} positive numbers",
            found=f"{found.size} values",
        )
    return found


def tables(rope: Rope, context: int) -> tuple[Array, Array]:
    """Cosines and sines [context, pairs] as f32, computed in f64."""
    frequencies, scale = rope.at(context)
    angles = np.arange(context, dtype=np.float64)[:, None] * np.asarray(frequencies)
    return (np.cos(angles) * scale).astype(np.float32), (np.sin(angles) * scale).astype(np.float32)
