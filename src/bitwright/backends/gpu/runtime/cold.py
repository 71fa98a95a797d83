"""Times a kernel whose operands are not in the L2 cache.

A launch works on copies of the run's own data that rotate through more memory than the cache holds,
so operands come from device memory as they do in a model. A candidate that one replay shows to be
far slower than the best one so far is not timed again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bitwright.backends.gpu.lowering.context import Machine
from bitwright.backends.gpu.requirements import load_torch
from bitwright.backends.gpu.runtime.capture import captured
from bitwright.backends.gpu.runtime.launch import Kernel

MAX_SETS = 12
"""Sets of buffers that a measurement rotates through."""
REPEATS = 24
"""Launches of a replay, at most."""
REPLAY_SECONDS = 3e-3
"""About how long a replay of a slow kernel takes."""
ROUNDS = 3
FAR = 1.25
"""How much slower than the best a candidate is that is not timed again."""
ALIGN = 16


class ColdTimer:
    """Times the candidates of one kernel call."""

    def __init__(self, machine: Machine, tensors: Mapping[str, Any]) -> None:
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        count = max(2, min(MAX_SETS, 2 * machine.l2_bytes // max(size, 1) + 1))
        self._sets = [{name: _copy(t) for name, t in tensors.items()} for _ in range(count)]
        self._best = float("inf")

    def __call__(self, kernel: Kernel, _: object, sizes: Mapping[str, int]) -> float:
        """The seconds of one launch."""
        for one in self._sets[:2]:  # loads the kernel
            kernel.launch(one, sizes)
        once = self._seconds(lambda: kernel.launch(self._sets[0], sizes))
        repeats = max(2, min(REPEATS, int(REPLAY_SECONDS / max(once, 1e-7)) + 1))
        with captured() as graph:
            for number in range(repeats):
                kernel.launch(self._sets[number % len(self._sets)], sizes)
        graph.replay()
        found = float("inf")
        for _round in range(ROUNDS):
            found = min(found, self._seconds(graph.replay) / repeats)
            if found > FAR * self._best:
                break
        self._best = min(self._best, found)
        return found

    @staticmethod
    def _seconds(call: Callable[[], None]) -> float:
        begin, end = (load_torch().cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3


def _copy(tensor: Any) -> Any:
    """A copy whose address is a multiple of 16 if the tensor's is: kernels are compiled for it."""
    if tensor.device.type == "cpu":  # memory of the host that the device writes to
        return tensor.clone().pin_memory()
    if tensor.data_ptr() % ALIGN == 0:
        return tensor.clone()
    room = tensor.new_empty(tensor.numel() + 1)[1:]
    return room.copy_(tensor)
