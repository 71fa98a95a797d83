"""Chooses among the candidates of a kernel by their time on this device, and remembers the choice.

A candidate is timed on copies of the run's own data that rotate through more memory than the L2
cache holds, so
that operands come from device memory as they do in a model. What was fastest for a kernel and its
sizes is kept
in the cache folder, per device. A process spends at most BITWRIGHT_GPU_TUNE seconds on it; after
that, and for what
does not compile, the static choice stands.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from bitwright import knobs
from bitwright.backends.cpu.cache.objects import default_cache
from bitwright.backends.gpu.codegen.source import Config, KernelSource
from bitwright.backends.gpu.lowering.context import Machine
from bitwright.backends.gpu.requirements import load_torch, load_triton
from bitwright.backends.gpu.runtime.capture import captured
from bitwright.backends.gpu.runtime.launch import Kernel

Measure = Callable[[Kernel, Mapping[str, Any], Mapping[str, int]], float]
MAX_SETS = 12
"""Sets of buffers that a measurement rotates through."""
REPEATS = 24


class Tuner:
    """The choices of one device."""

    def __init__(self, machine: Machine, measure: Measure | None = None) -> None:
        self.machine = machine
        self._measure = measure or (None if machine.interpreted else self.cold_seconds)
        self._spent = 0.0
        self._chosen: dict[str, str] | None = None
        self._changed = False
        self._lock = threading.Lock()

    def choose(
        self,
        source: KernelSource,
        tensors: Mapping[str, Any],
        sizes: Mapping[str, int],
        load: Callable[[KernelSource, Config], Kernel],
    ) -> Config:
        """The remembered or measured candidate, else the first."""
        if len(source.configs) == 1 or knobs.TUNED.get() == "off":
            return source.configs[0]
        with self._lock:
            point = self._point(source, sizes)
            if self._chosen is None:
                self._chosen = self._remembered()
            name = self._chosen.get(point)
            found = next((config for config in source.configs if config.name == name), None)
            if found is not None:
                return found
            if self._measure is None or self._spent >= knobs.GPU_TUNE.number():
                return source.configs[0]
            begin = time.perf_counter()
            best = self._fastest(source, tensors, sizes, load)
            self._spent += time.perf_counter() - begin
            self._chosen[point] = best.name
            self._changed = True
            return best

    def _fastest(
        self,
        source: KernelSource,
        tensors: Mapping[str, Any],
        sizes: Mapping[str, int],
        load: Callable[[KernelSource, Config], Kernel],
    ) -> Config:
        assert self._measure is not None
        times: dict[int, float] = {}
        for number, config in enumerate(source.configs):
            try:
                times[number] = self._measure(load(source, config), tensors, sizes)
            except Exception:  # a candidate that does not compile or fit is no candidate
                continue
        if not times:
            return source.configs[0]
        return source.configs[min(times, key=times.__getitem__)]

    def cold_seconds(
        self, kernel: Kernel, tensors: Mapping[str, Any], sizes: Mapping[str, int]
    ) -> float:
        """The time of one launch whose operands are not in the L2 cache."""
        torch = load_torch()
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        count = max(2, min(MAX_SETS, 2 * self.machine.l2_bytes // max(size, 1) + 1))
        sets = [{name: t.clone() for name, t in tensors.items()} for _ in range(count)]
        for one in sets[:2]:  # compiles the kernel
            kernel.launch(one, sizes)
        torch.cuda.synchronize()
        with captured() as graph:
            for number in range(REPEATS):
                kernel.launch(sets[number % count], sizes)
        graph.replay()
        times = []
        for _ in range(3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(float(begin.elapsed_time(end)) * 1e-3 / REPEATS)
        return min(times)

    # memory

    def save(self) -> None:
        """Write new choices to the cache folder, beside those of other processes."""
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
