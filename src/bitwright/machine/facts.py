"""`bw.hardware()`: what this machine has, which kernels use it, and what was measured.

    hw = bw.hardware()
    hw.features, hw.parallel_units, hw.gpus
    found = hw.accelerated("int8")     # true if the kernels multiply this type
    found.instruction, found.kernel, found.rate, found.share

The facts are those of the process's target: with `BITWRIGHT_TARGET=avx2`, those of AVX2 code on
this machine. Measurements are remembered on disk (`machine.remembered`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from bitwright import knobs, target
from bitwright.errors import BitwrightError
from bitwright.ir.dtype import DType
from bitwright.ir.quant_types import QuantType
from bitwright.machine import remembered
from bitwright.machine.gpus import Gpu, find_gpus
from bitwright.machine.probes import TYPES, type_name
from bitwright.target import Target

if TYPE_CHECKING:  # the compiler is slow to import, and plain facts do not need it
    from bitwright.backends.cpu.profile.peaks import Peaks
    from bitwright.machine.preferences import Preferences

_FEATURES = {  # the name, and any of LLVM's names
    "sse2": {"sse2"},
    "avx2": {"avx2"},
    "fma": {"fma"},
    "f16c": {"f16c"},
    "avx512f": {"avx512f"},
    "avx512bw": {"avx512bw"},
    "avx512vl": {"avx512vl"},
    "vnni": {"avx512vnni", "avxvnni"},
    "bf16": {"avx512bf16", "bf16"},
    "fp16": {"avx512fp16", "fullfp16"},
    "amx": {"amx-int8", "amx-bf16"},
    "neon": {"neon"},
    "dotprod": {"dotprod"},
    "i8mm": {"i8mm"},
    "rvv": {"v"},
}


@dataclass(frozen=True)
class Acceleration:
    """What runs products of one type. It is true where the kernel multiplies that type."""

    dtype: str
    accelerated: bool
    instruction: str
    """The instruction that multiplies, read from the kernel's assembly."""
    kernel: str
    """The family of the kernel that the compiler selects."""
    available: str
    """The target's fastest instruction for the type; empty if it has none."""
    reason: str
    rate: float | None = None
    """Measured operations per second of the kernel on one thread; None if not measured."""
    peak: float | None = None
    """Measured operations per second of the instruction in registers, likewise."""

    def __bool__(self) -> bool:
        return self.accelerated

    @property
    def share(self) -> float | None:
        """The rate divided by the peak."""
        return None if self.rate is None or not self.peak else self.rate / self.peak

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"share": self.share}

    def __str__(self) -> str:
        measured = "not measured"
        if self.rate is not None:
            measured = f"{self.rate / 1e9:.0f} Gop/s on one thread"
            measured += "" if self.share is None else f", {self.share:.0%} of the peak"
        answer = "accelerated" if self.accelerated else "not accelerated"
        where = f" in {self.kernel}" if self.kernel else ""
        return f"{self.dtype}: {answer}{where}: {self.reason}; {measured}"


@dataclass(frozen=True)
class Hardware:
    """This machine, for the target of this process."""

    name: str
    """LLVM's name of the processor."""
    architecture: str
    target: str
    """The target that code is generated for: `host`, or the one that `BITWRIGHT_TARGET` names."""
    parallel_units: int
    """Cores that this process may use."""
    vector_bytes: int
    features: tuple[str, ...]
    excluded: tuple[str, ...]
    """Features of the machine that the target does not use."""
    caches: tuple[int, int, int]
    """Bytes of L1 and L2 of a core, and of L3."""
    gpus: tuple[Gpu, ...]
    why_no_gpu: str
    threads: int
    """The number of threads of the peaks and the preferences."""
    peaks: Peaks | None
    """None if not measured."""
    single: Mapping[str, float] | None
    """Peaks of products on one thread, by the name of their loop."""
    preferences: Preferences | None
    """None if not measured."""
    may_measure: bool = field(default=False, repr=False)

    def accelerated(self, dtype: str | QuantType | DType) -> Acceleration:
        """Which kernel and instruction multiply a type here, and their measured rate."""
        name, host = type_name(dtype), target.host()
        if host.name != self.target:
            raise BitwrightError(
                "these facts are of another target",
                expected=self.target,
                found=host.name,
                hint=f"Call bw.hardware() again after a change of {knobs.TARGET.name}.",
            )
        from bitwright.machine.measure import measure_rate
        from bitwright.machine.selection import select

        found = select(name, host)
        rates = _table(host, "rates")
        if name not in rates and self.may_measure:
            rate = measure_rate(name)
            rates |= {} if rate is None else {name: rate}
            remembered.write(host, 1, {"rates": rates})
        return Acceleration(
            name,
            found.is_accelerated,
            found.instruction,
            found.kernel,
            found.available,
            found.reason + _excluded(name, found.available),
            rates.get(name),
            (self.single or {}).get(found.loop),
        )

    def accelerations(self) -> list[Acceleration]:
        """`accelerated` of every type with a product."""
        return [self.accelerated(name) for name in TYPES]

    def as_json(self) -> dict[str, Any]:
        peaks = self.peaks
        wanted = self.preferences
        return {
            "name": self.name,
            "architecture": self.architecture,
            "target": self.target,
            "parallel_units": self.parallel_units,
            "vector_bytes": self.vector_bytes,
            "features": self.features,
            "excluded": self.excluded,
            "caches": dict(zip(("l1", "l2", "l3"), self.caches, strict=True)),
            "gpus": [gpu.as_json() for gpu in self.gpus],
            "why_no_gpu": self.why_no_gpu,
            "threads": self.threads,
            "peaks": None
            if peaks is None
            else {
                "products": dict(peaks.products),
                "products_of_one_thread": dict(self.single or {}),
                "bandwidth": {level.name: level.rate for level in peaks.levels},
            },
            "preferences": None
            if wanted is None
            else {
                "batch_size": wanted.batch_size,
                "block_size": wanted.block_size,
                "layout": wanted.layout,
                "schemes": wanted.schemes,
                "threads": wanted.threads,
                "reasons": wanted.reasons(),
                "measured": wanted.as_json(),
            },
            "types": [one.as_json() for one in self.accelerations()],
        }


def hardware(measure: bool | None = None, threads: int | None = None) -> Hardware:
    """The facts of this machine, with measurements for a number of threads (None: all cores).

    By default, measurements are read from the cache folder, and taken once (a few seconds) if it
    has none. `measure=True` takes them again; `measure=False` only reads them.
    """
    host = target.host()
    count = host.cores if threads is None else threads
    if count < 1:
        raise BitwrightError("threads must be at least 1", found=threads)
    peaks, wanted, single = _read(host, count)
    if measure or (measure is None and not (peaks and wanted and single)):
        peaks, wanted, single = _measure(host, count, peaks, single)
    gpus, why = _gpus()
    return Hardware(
        target.machine().cpu,
        host.architecture,
        host.name,
        host.cores,
        host.vector_bytes,
        _features(host),
        tuple(name for name in _features(target.machine()) if name not in _features(host)),
        (host.l1_bytes, host.l2_bytes, host.l3_bytes),
        gpus,
        why,
        count,
        peaks,
        single or None,
        wanted,
        measure is not False,
    )


def _read(host: Target, threads: int) -> tuple[Peaks | None, Preferences | None, dict[str, float]]:
    """The remembered measurements."""
    known = remembered.read(host, threads)
    if not known:
        return None, None, {}
    from bitwright.machine.measure import peaks_from_json
    from bitwright.machine.preferences import Preferences

    peaks, wanted = known.get("peaks"), known.get("prefer")
    return peaks_from_json(peaks), Preferences.from_json(wanted), _table(host, "products")


def _measure(
    host: Target, threads: int, peaks: Peaks | None, single: Mapping[str, float]
) -> tuple[Peaks, Preferences, dict[str, float]]:
    """Measure everything and remember it."""
    from bitwright.backends.cpu.profile.peaks import measure_products
    from bitwright.machine.measure import (
        RATED,
        larger,
        measure_peaks,
        measure_rate,
        peaks_to_json,
    )
    from bitwright.machine.preferences import measure_preferences

    single = larger(measure_products(1), single)
    peaks, wanted = measure_peaks(threads, single, peaks), measure_preferences(threads)
    found = {name: measure_rate(name) for name in RATED}
    rates = {name: rate for name, rate in found.items() if rate is not None}
    entries = {"peaks": peaks_to_json(peaks), "prefer": wanted.as_json()}
    remembered.write(host, threads, entries)
    remembered.write(host, 1, {"products": single, "rates": _table(host, "rates") | rates})
    return peaks, wanted, single


def _table(host: Target, name: str) -> dict[str, float]:
    """Remembered rates on one thread, by name."""
    found = remembered.read(host, 1).get(name)
    return dict(found) if isinstance(found, dict) else {}


def _excluded(dtype: str, available: str) -> str:
    """What the machine has for a type and the target does not."""
    from bitwright.machine.selection import select

    machine = target.machine()
    if target.host() is machine:
        return ""
    own = select(dtype, machine)
    if not own.available or own.available == available:
        return ""
    return f"; {knobs.TARGET.name} excludes this machine's {own.available}"


def _features(of: Target) -> tuple[str, ...]:
    return tuple(name for name, any_of in _FEATURES.items() if of.features & any_of)


@cache
def _gpus() -> tuple[tuple[Gpu, ...], str]:
    return find_gpus()
