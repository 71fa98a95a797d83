"""The order of runs on the device, and what they record for the host.

Runs of one program share its memory, so a run on another stream waits for the one before. A run on
tensors returns before the device has finished. A kernel records a fault in memory of the host
(`FaultRecord`); later runs look there, which costs nothing while there is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from bitwright.backends.gpu.requirements import load_torch
from bitwright.backends.gpu.runtime.device import Device

FAULT_BYTES = 16
"""The number of a fault and an index, as 64-bit integers."""


class FaultRecord:
    """Memory of the host that kernels write a fault to."""

    def __init__(self, device: Device) -> None:
        torch = load_torch()
        with torch.inference_mode(False):
            self.raw = torch.zeros(
                FAULT_BYTES, dtype=torch.uint8, pin_memory=not device.is_interpreted
            )
        self._words = self.raw.numpy().view(np.int64)
        self.bindings: Mapping[str, int] = {}
        """The sizes of the last run that nobody waited for."""

    @property
    def is_set(self) -> bool:
        return bool(self._words[0])

    def clear(self) -> None:
        self._words[:] = 0


class RunQueue:
    """Orders the runs of one program."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._handle: int | None = None
        self._stream: Any = None
        self._done: Any = None

    @property
    def is_current(self) -> bool:
        """Whether the program's device is that of the calling thread."""
        if self._device.is_interpreted:
            return True
        return bool(load_torch()._C._cuda_getDevice() == self._device.torch_device.index)

    def begin(self) -> None:
        """Before a run is put on the current stream; the device is current."""
        if self._device.is_interpreted:
            return
        torch = load_torch()
        handle = torch._C._cuda_getCurrentRawStream(self._device.torch_device.index)
        if self._stream is None or handle != self._handle:
            self._handle, self._stream = handle, torch.cuda.current_stream()
            if self._done is None:
                self._done = torch.cuda.Event()
            else:
                self._stream.wait_event(self._done)

    def end(self) -> None:
        """After a run."""
        if self._done is not None:
            self._done.record(self._stream)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Held while a run is put on the current stream of the device."""
        if self._device.is_interpreted:
            yield
            return
        with load_torch().cuda.device(self._device.torch_device):
            self.begin()
            try:
                yield
            finally:  # what a failed run has begun is waited for, too
                self.end()

    def finish(self) -> None:
        """Wait until the last run has ended."""
        if self._done is not None:
            self._done.synchronize()
