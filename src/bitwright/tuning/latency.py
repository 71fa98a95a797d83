"""Whole-model latency: several models in turn, in one process, medians over rounds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from bitwright.executable import Executable

SAMPLE_SECONDS = 0.002
"""The least time of one sample; short models run several times in it."""


def interleaved(
    models: Mapping[str, Executable],
    feeds: Mapping[str, Any],
    rounds: int = 15,
    most_seconds: float = 20.0,
) -> dict[str, float]:
    """The median seconds of a run of each model.

    Every round runs each model once to warm caches and threads, then takes one sample of it. The
    order alternates between rounds. At least three rounds run; further ones within `most_seconds`.
    """
    begin = time.perf_counter()
    calls = {name: _calls(exe, feeds) for name, exe in models.items()}
    samples: dict[str, list[float]] = {name: [] for name in models}
    for number in range(rounds):
        names = list(models) if number % 2 == 0 else list(reversed(models))
        for name in names:
            samples[name].append(_sample(models[name], feeds, calls[name]))
        if number >= 2 and time.perf_counter() - begin > most_seconds:
            break
    return {name: float(np.median(found)) for name, found in samples.items()}


def _calls(exe: Executable, feeds: Mapping[str, Any]) -> int:
    """Calls per sample."""
    for _ in range(2):
        exe.run(feeds)
    begin = time.perf_counter()
    exe.run(feeds)
    taken = max(1e-7, time.perf_counter() - begin)
    return max(1, min(1000, int(SAMPLE_SECONDS / taken)))


def _sample(exe: Executable, feeds: Mapping[str, Any], calls: int) -> float:
    exe.run(feeds)
    begin = time.perf_counter()
    for _ in range(calls):
        exe.run(feeds)
    return (time.perf_counter() - begin) / calls


def memory_bytes(exe: Executable) -> int:
    """Bytes of code, packed weights and arena of a compiled model after a run."""
    engine: Any = exe.engine
    return int(engine.memory_bytes)
