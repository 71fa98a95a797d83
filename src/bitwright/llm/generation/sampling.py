"""Choosing a token from logits.

    logits + bias -> penalties -> mask -> / temperature -> top k -> top p -> min p -> draw

The random number of a draw is a hash of the seed and the position, so it is the same for any batch,
any number of threads and any reused prefix.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from typing import Any

import numpy as np

from bitwright.errors import RunError
from bitwright.llm.generation.options import Options

Array = np.ndarray[Any, Any]
_FEW = 1024
_BLOCK = 256
"""Weights that are summed together."""
_GROUP = 16
"""Values of a group whose maximum is looked at first."""


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from 53 bits of a hash of seed and position."""
    key = struct.pack("<QQ", seed & 0xFFFFFFFFFFFFFFFF, position)
    (number,) = struct.unpack("<Q", hashlib.blake2b(key, digest_size=8).digest())
    return float((number >> 11) * 2.0**-53)


class Sampler:
    """Chooses tokens of one sequence; knows which tokens occurred."""

    def __init__(self, options: Options, prompt: Iterable[int], vocabulary: int) -> None:
        self._options = options
        self._seen: dict[int, None] = {}
        self._counts: dict[int, int] = {}
        if options.repetition_penalty != 1:
            self._seen = dict.fromkeys(prompt)
        self._changes = bool(
            options.repetition_penalty != 1
            or options.presence_penalty
            or options.frequency_penalty
            or options.logit_bias
        )
        for token in options.logit_bias:
            if token >= vocabulary:
                raise RunError(f"token {token} is not in the vocabulary", where="logit_bias")
        self._biased: tuple[Array, Array] | None = None
        if bias := options.logit_bias:
            self._biased = (np.array(list(bias)), np.array(list(bias.values()), np.float32))

    def accept(self, token: int) -> None:
        """A token was generated."""
        if self._changes:
            self._seen[token] = None
            self._counts[token] = self._counts.get(token, 0) + 1

    def choose(self, logits: Array, position: int, mask: Array | None = None) -> int:
        """The token at a position. `mask` says which tokens are allowed."""
        options = self._options
        if self._changes:
            logits = self._changed(logits)
        if mask is not None:
            logits = np.where(mask, logits, -np.inf)
        best = int(np.argmax(logits))
        peak = float(logits[best])
        if not np.isfinite(peak):
            raise RunError(
                "no token can be chosen",
                found="a logit that is not finite" if mask is None else "an empty mask",
            )
        if options.temperature == 0:
            return best
        number = uniform(options.seed, position)
        if not (options.top_k or options.top_p < 1 or options.min_p > 0):
            return _drawn(_weights(logits, peak, options.temperature), number)
        tokens, weights = _candidates(logits, peak, options)
        sums = np.cumsum(weights)
        at = np.searchsorted(sums, number * sums[-1], side="right")
        return int(tokens[min(int(at), len(tokens) - 1)])

    def _changed(self, logits: Array) -> Array:
        """A copy with bias and penalties."""
        options = self._options
        logits = logits.copy()
        if self._biased is not None:
            tokens, biases = self._biased
            logits[tokens] += biases
        if options.repetition_penalty != 1 and self._seen:
            seen = np.fromiter(self._seen, np.int64, len(self._seen))
            values = logits[seen]
            penalty = np.float32(options.repetition_penalty)
            logits[seen] = np.where(values > 0, values / penalty, values * penalty)
        for token, count in self._counts.items():
            logits[token] -= options.presence_penalty + options.frequency_penalty * count
        return logits


def _weights(logits: Array, peak: float, temperature: float) -> Array:
    """Probabilities up to a factor, f32; the largest is 1."""
    with np.errstate(over="ignore"):
        scaled = (logits - np.float32(peak)) / np.float32(max(temperature, 1e-30))
    return np.asarray(np.exp(scaled), np.float32)


def _drawn(weights: Array, number: float) -> int:
    """The token at this part of the sum of all weights, in their order."""
    whole = len(weights) // _BLOCK * _BLOCK
    parts = weights[:whole].reshape(-1, _BLOCK).sum(axis=1, dtype=np.float64)
    ends = np.cumsum(np.append(parts, weights[whole:].sum(dtype=np.float64)))
    at = number * ends[-1]
    block = min(int(np.searchsorted(ends, at, side="right")), len(ends) - 1)
    inside = weights[block * _BLOCK : (block + 1) * _BLOCK]
    before = ends[block - 1] if block else 0.0
    sums = before + np.cumsum(inside, dtype=np.float64)
    found = int(np.searchsorted(sums, at, side="right"))
    if found >= len(inside) or not inside[found]:  # sums were rounded: the last one before
        possible = np.flatnonzero(weights[: block * _BLOCK + min(found + 1, len(inside))])
        return int(possible[-1])
    return block * _BLOCK + found


def _candidates(logits: Array, peak: float, options: Options) -> tuple[Array, Array]:
    """Tokens that may be drawn, and their weights (probabilities up to a factor)."""
    size = len(logits)
    count = min(options.top_k or size, size)
    kept = count if options.top_k else min(count, _FEW)
    whole = None
    if options.top_p < 1 and not options.top_k:
        whole = float(_weights(logits, peak, options.temperature).sum(dtype=np.float64))
    while True:
        tokens = largest(logits, kept)
        found = np.exp((logits[tokens].astype(np.float64) - peak) / options.temperature)
        total = found.sum() if whole is None else whole
        # weights fall; the cut is inside if the rest cannot pass either limit
        allowed = len(found)
        if options.top_p < 1:
            before = np.cumsum(found) - found
            allowed = min(allowed, max(1, int(np.sum(before < options.top_p * total))))
        if options.min_p > 0:
            allowed = min(allowed, max(1, int(np.sum(found >= options.min_p))))
        if allowed < kept or kept >= count:
            return tokens[:allowed], found[:allowed]
        kept = min(count, kept * 8)


def largest(values: Array, count: int) -> Array:
    """Indices of the largest values in falling order, equal ones by index.

    The `count`-th of the maxima of groups bounds what can be among them from below.
    """
    size = len(values)
    groups = size // _GROUP
    if count < groups:
        maxima = values[: groups * _GROUP].reshape(_GROUP, groups).max(axis=0)
        least = np.partition(maxima, groups - count)[groups - count]
        places = np.flatnonzero(values >= least)
    else:
        places = np.arange(size)
    if count < len(places):
        some = values[places]
        limit = np.partition(some, len(some) - count)[len(some) - count]
        above = np.flatnonzero(some > limit)
        equal = np.flatnonzero(some == limit)[: count - len(above)]
        places = places[np.concatenate([above, equal])]
    return np.asarray(places[np.lexsort((places, -values[places]))])


def log_probabilities(logits: Array) -> Array:
    """Natural logarithms of softmax(logits)."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    wide -= np.log(np.exp(wide).sum())
    return wide
