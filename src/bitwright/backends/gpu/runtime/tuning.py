"""Chooses among the candidates of a kernel by their time on this device, and remembers the choice.

What was fastest for a kernel and its sizes (`runtime.cold`) is kept in the cache folder, per
device. A process spends at most BITWRIGHT_GPU_TUNE seconds on it, compilation of candidates
included; after that, and for what does not compile, the static choice stands.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from bitwright import knobs
from bitwright.backends.cpu.cache.objects import default_cache
from bitwright.backends.gpu.codegen.source import Config, KernelSource
from bitwright.backends.gpu.lowering.context import Machine
from bitwright.backends.gpu.requirements import load_triton
from bitwright.backends.gpu.runtime.cold import ColdTimer
from bitwright.backends.gpu.runtime.launch import Kernel
from bitwright.backends.gpu.runtime.memory import is_out_of_memory

Measure = Callable[[Kernel, Mapping[str, Any], Mapping[str, int]], float]
MOST_CANDIDATES = 12
"""Of a kernel; the first ones are those that the kernel's author expects to be fast."""


class Tuner:
    """The choices of one device."""

    def __init__(self, machine: Machine, measure: Measure | None = None) -> None:
        self.machine, self._measure = machine, measure
        self._measures = measure is not None or not machine.interpreted
        self.seconds_spent = 0.0
        self._chosen: dict[str, str] | None = None
        self._changed = False
        self._lock = threading.RLock()

    @property
    def seconds_left(self) -> float:
        """What tuning may still take in this process."""
        return max(0.0, knobs.GPU_TUNE.number() - self.seconds_spent) if self._measures else 0.0

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Counts what happens inside as time of tuning."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds_spent += time.perf_counter() - begin

    def candidates(self, source: KernelSource, sizes: Mapping[str, int]) -> Sequence[Config]:
        """What `choose` chooses from: one, or those that it will measure."""
        if len(source.configs) == 1 or knobs.TUNED.get() == "off":
            return source.configs[:1]
        with self._lock:
            if self._chosen is None:
                self._chosen = self._remembered()
            name = self._chosen.get(self._point(source, sizes))
            found = next((config for config in source.configs if config.name == name), None)
            if found is not None:
                return (found,)
            return source.configs[: MOST_CANDIDATES if self.seconds_left else 1]

    def choose(
        self,
        source: KernelSource,
        tensors: Mapping[str, Any],
        sizes: Mapping[str, int],
        load: Callable[[KernelSource, Config], Kernel],
        ready: Collection[str] | None = None,
    ) -> Config:
        """The remembered or measured candidate, else the first. Only the candidates whose names
        are in `ready` are measured, if it is given."""
        with self._lock:
            configs = self.candidates(source, sizes)
            if len(configs) > 1 and ready is not None:
                configs = [config for config in configs if config.name in ready]
            if len(configs) < 2:
                return configs[0] if configs else source.configs[0]
            with self.spending():
                best = self._fastest(source, configs, tensors, sizes, load)
            if best is None:
                return configs[0]
            assert self._chosen is not None
            self._chosen[self._point(source, sizes)] = best.name
            self._changed = True
            return best

    def _fastest(
        self,
        source: KernelSource,
        configs: Sequence[Config],
        tensors: Mapping[str, Any],
        sizes: Mapping[str, int],
        load: Callable[[KernelSource, Config], Kernel],
    ) -> Config | None:
        """None if none can be measured."""
        try:
            measure = self._measure or ColdTimer(self.machine, tensors)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return None  # there is no room for copies of the operands
        times: dict[int, float] = {}
        for number, config in enumerate(configs):
            try:
                times[number] = measure(load(source, config), tensors, sizes)
            except Exception:  # a candidate that does not compile or fit is no candidate
                continue
        return configs[min(times, key=times.__getitem__)] if times else None

    # memory

    def save(self) -> None:
        """Write new choices to the cache folder, beside those of other processes."""
        if not self._changed:
            return
        with self._lock:
            if not self._changed or self._chosen is None:
                return
            self._chosen = {**self._remembered(), **self._chosen}
            data = json.dumps(dict(sorted(self._chosen.items())))
            default_cache().write_entry(self._entry(), data.encode())
            self._changed = False

    def _remembered(self) -> dict[str, str]:
        data = default_cache().read_entry(self._entry())
        try:
            found = json.loads(data or b"{}")
        except ValueError:
            return {}
        if not isinstance(found, dict):
            return {}
        return {k: v for k, v in found.items() if isinstance(v, str)}

    def _entry(self) -> str:
        facts = f"gpu kernels {self.machine.name} {self.machine.capability}"
        text = f"{facts} triton {load_triton().__version__}"
        return hashlib.sha256(text.encode()).hexdigest()

    def _point(self, source: KernelSource, sizes: Mapping[str, int]) -> str:
        shape = " ".join(f"{name}={size}" for name, size in sizes.items())
        return f"{source.name} {shape}"


_TUNERS: dict[Machine, Tuner] = {}


def tuner_of(machine: Machine) -> Tuner:
    """The tuner that all programs of a device share."""
    return _TUNERS.setdefault(machine, Tuner(machine))
