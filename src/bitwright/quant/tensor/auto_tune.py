"""`QuantizationSystem.auto_tune`: parameters for a tensor, searched on its own values.

    found = system.auto_tune(w, TuneLimits(seconds=5, min_sqnr_db=30))
    found.best.parameters, found.stopped

Candidates are tried from the smallest to the largest. With `min_sqnr_db`, the first one that
reaches it is the result, because it is the smallest; otherwise the result is the one with the
highest SQNR. Every limit is checked before each candidate; the first candidate always runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.errors import QuantizationError
from bitwright.ir import quant_types
from bitwright.ir.arrays import Array
from bitwright.ir.quant_params import QuantParams
from bitwright.quant.calibration.statistics import real_array
from bitwright.quant.core.measure import Quality, quality
from bitwright.quant.tensor.observer import Observer, parameters_for
from bitwright.quant.tensor.tensor import QuantizedTensor

_TYPES = ("int2", "int4", "f4e2m1", "int8", "f8e4m3fn", "int16")
_BLOCKS = (128, 32)
_METHODS = ("minmax", "mse")


@dataclass(frozen=True)
class TuneLimits:
    """When a search ends."""

    seconds: float = 10.0
    iterations: int = 64
    min_sqnr_db: float | None = None
    """The accuracy that is enough."""
    max_bytes: int | None = None
    """Larger candidates are not tried."""

    def __post_init__(self) -> None:
        if self.iterations < 1 or not self.seconds >= 0:
            raise QuantizationError(
                "limits of a search are too low",
                expected="at least 1 iteration and 0 seconds",
                found=f"{self.iterations} iterations, {self.seconds} seconds",
            )


@dataclass(frozen=True)
class Trial:
    """One candidate as measured."""

    parameters: QuantParams
    method: str
    quality: Quality
    nbytes: int

    def __str__(self) -> str:
        one = self.parameters
        kind = f"{one.dtype} {one.scheme} {one.granularity}"
        return f"{kind} by {self.method}: {self.nbytes} bytes, {self.quality}"


@dataclass(frozen=True)
class AutoTuned:
    best: Trial
    trials: tuple[Trial, ...]
    stopped: str
    """accuracy, time, iterations, or all candidates."""
    seconds: float

    @property
    def parameters(self) -> QuantParams:
        return self.best.parameters

    def __str__(self) -> str:
        return (
            f"{self.best}; {len(self.trials)} trials in {self.seconds:.2f} s, "
            f"stopped by {self.stopped}"
        )


@dataclass(frozen=True)
class _Candidate:
    dtype: str
    scheme: str | None
    axis: int | None
    block: int
    method: str

    def nbytes(self, shape: Sequence[int]) -> int:
        """About the bytes of a tensor, for the order of trials."""
        count = int(np.prod(shape))
        scales = 1
        if self.axis is not None:
            along = shape[self.axis]
            scales = count // max(along, 1) * -(-along // self.block) if self.block else along
        return quant_types.get(self.dtype).nbytes(count) + 4 * scales


def auto_tune(data: Any, limits: TuneLimits | None = None, axis: int | None = None) -> AutoTuned:
    """Parameters for an array, or for a list of samples of a value.

    Parameters for samples come from all but the last one, whose error is measured. `axis` is the
    axis of channels (default: the last of an array with several axes).
    """
    limits, begin = limits or TuneLimits(), time.perf_counter()
    samples = [real_array(x) for x in data] if isinstance(data, (list, tuple)) else None
    held_out = real_array(data) if samples is None else (samples or [np.empty(0)])[-1]
    if not held_out.size:
        raise QuantizationError("there is no data to tune with")
    trials: list[Trial] = []
    stopped = "all candidates"
    for candidate in _candidates(held_out, samples is not None, axis, limits):
        if trials and time.perf_counter() - begin >= limits.seconds:
            stopped = "time"
            break
        if len(trials) >= limits.iterations:
            stopped = "iterations"
            break
        trials.append(_trial(candidate, held_out, samples))
        if limits.min_sqnr_db is not None and trials[-1].quality.sqnr >= limits.min_sqnr_db:
            stopped = "accuracy"
            break
    if not trials:
        raise QuantizationError(
            "no candidate is small enough", expected=f"at most {limits.max_bytes} bytes"
        )
    best = trials[-1] if stopped == "accuracy" else max(trials, key=lambda one: one.quality.sqnr)
    return AutoTuned(best, tuple(trials), stopped, time.perf_counter() - begin)


def _candidates(
    x: Array, has_samples: bool, axis: int | None, limits: TuneLimits
) -> Iterator[_Candidate]:
    """All candidates, the smallest first."""
    places: list[tuple[int | None, int]] = [(None, 0)]
    if axis is not None or x.ndim > 1:
        at = x.ndim - 1 if axis is None else axis % x.ndim
        places.append((at, 0))
        # values of a channel are along another axis
        along = at if x.ndim == 1 else (at - 1) % x.ndim
        places += [(along, block) for block in _BLOCKS if block < x.shape[along]]
    found = []
    for name in _TYPES:
        kind = quant_types.get(name)
        schemes: tuple[str | None, ...] = (None,)
        if kind.is_integer and kind.is_signed:
            schemes = ("symmetric", "asymmetric")
        for scheme in schemes:
            for place, block in places:
                if has_samples and block:
                    continue  # blocks of activations would need scales for every row
                found += [_Candidate(name, scheme, place, block, method) for method in _METHODS]
    ordered = sorted(found, key=lambda one: one.nbytes(x.shape))
    limit = limits.max_bytes
    return (one for one in ordered if limit is None or one.nbytes(x.shape) <= limit)


def _trial(candidate: _Candidate, x: Array, samples: Sequence[Array] | None) -> Trial:
    if samples is None:
        parameters = parameters_for(
            x,
            candidate.dtype,
            candidate.method,
            scheme=candidate.scheme,
            axis=candidate.axis,
            block=candidate.block,
        )
    else:
        observer = Observer(candidate.axis)
        for sample in samples[:-1] or samples:
            observer.add(sample)
        parameters = observer.calibrate(candidate.dtype, candidate.method, candidate.scheme)
    tensor = QuantizedTensor.quantize(x, parameters)
    return Trial(parameters, candidate.method, quality(x, tensor), tensor.nbytes)
