"""The order of runs on the device.

Runs of one program share its memory, so a run on another stream waits for the one before. A run on
tensors returns
before the device has finished; `watch` copies its fault record to the host behind it, and the next
run looks
at the copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from bitwright.backends.gpu.requirements import load_torch
from bitwright.backends.gpu.runtime.device import Device


class RunQueue:
    """Orders the runs of one program."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream: Any = None
        self._done: Any = None
        self._record: tuple[Any, Any, Mapping[str, int]] | None = None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Held while a run is put on the current stream."""
        if self._device.is_interpreted:
            yield
            return
        torch = load_torch()
        with torch.cuda.device(self._device.torch_device):
            stream = torch.cuda.current_stream()
            if self._done is not None and stream != self._stream:
                stream.wait_event(self._done)
            yield
            if self._done is None:
                self._done = torch.cuda.Event()
            self._done.record(stream)
            self._stream = stream

    def watch(self, fault: Any, bindings: Mapping[str, int]) -> None:
        """Copy the fault record to the host when the device gets there."""
        torch = load_torch()
        if self._device.is_interpreted:
            self._record = fault.clone(), None, bindings
            return
        copy = torch.empty(16, dtype=torch.uint8, pin_memory=True)
        copy.copy_(fault, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._record = copy, event, bindings

    def watched(self, must_wait: bool) -> Mapping[str, int] | None:
        """The sizes of an earlier run that recorded a fault, if that is known by now."""
        if self._record is None:
            return None
        copy, event, bindings = self._record
        if event is not None and not event.query():
            if not must_wait:
                return None
            event.synchronize()
        self._record = None
        return bindings if bool(copy[:8].any()) else None
