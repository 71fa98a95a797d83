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
        tokens, weights = _candidates(logits, peak, options)
        sums = np.cumsum(weights)
        at = np.searchsorted(sums, uniform(options.seed, position) * sums[-1], side="right")
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


def _candidates(logits: Array, peak: float, options: Options) -> tuple[Array, Array]:
    """Tokens that may be drawn, and their weights (probabilities up to a factor)."""
    weights = np.exp((logits.astype(np.float64) - peak) / options.temperature)
    has_limit = options.top_k or options.top_p < 1 or options.min_p > 0
    if not has_limit:
        return np.arange(len(weights)), weights
    size = len(weights)
    count = min(options.top_k or size, size)
    kept = count if options.top_k else min(count, _FEW)
    while True:
        tokens = _largest(weights, kept)
        found = weights[tokens]
        total = found.sum() if options.top_k else weights.sum()
        # weights[tokens] falls; the cut is inside if the rest cannot pass either limit
        allowed = len(found)
        if options.top_p < 1:
            before = np.cumsum(found) - found
            allowed = min(allowed, max(1, int(np.sum(before < options.top_p * total))))
        if options.min_p > 0:
            allowed = min(allowed, max(1, int(np.sum(found >= options.min_p))))
        if allowed < kept or kept >= count:
            return tokens[:allowed], found[:allowed]
        kept = min(count, kept * 8)


def _largest(weights: Array, count: int) -> Array:
    """Indices of the largest weights in falling order, equal ones by index."""
    if count < len(weights):
        limit = np.partition(weights, len(weights) - count)[len(weights) - count]
        above = np.flatnonzero(weights > limit)
        equal = np.flatnonzero(weights == limit)[: count - len(above)]
        found = np.concatenate([above, equal])
    else:
        found = np.arange(len(weights))
    return found[np.lexsort((found, -weights[found]))]


def log_probabilities(logits: Array) -> Array:
    """Natural logarithms of softmax(logits)."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    wide -= np.log(np.exp(wide).sum())
    return wide
