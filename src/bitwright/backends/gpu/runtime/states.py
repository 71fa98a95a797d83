"""States on the device: named, kept across runs, at stable addresses; read and written as
arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np

from bitwright.backends.gpu.lowering.artifact import GpuArtifact
from bitwright.backends.gpu.requirements import load_torch
from bitwright.backends.gpu.runtime.memory import allocate
from bitwright.backends.gpu.runtime.tensors import to_array, to_raw
from bitwright.ir.graph import Graph
from bitwright.lir.buffer import Buffer, Storage

Array = np.ndarray[Any, Any]


class DeviceStates(MutableMapping[str, Array]):
    """States by name. `clear` sets them to their initial values at the next run."""

    def __init__(
        self, graph: Graph, artifact: GpuArtifact, device: Any, finish: Callable[[], None]
    ) -> None:
        """`finish` waits for the runs under way, which may be on any stream."""
        self._graph, self._device, self._finish = graph, device, finish
        self._known = {
            b.name: b
            for b in artifact.schedule.buffers
            if b.storage is Storage.STATE and b is not artifact.fault_buffer
        }
        self.buffers: dict[Buffer, Any] = {}
        """Bytes by buffer, once a run or the caller has set them."""
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._moved = False
        """Whether an address has changed since `prepare`."""

    @property
    def is_settled(self) -> bool:
        """Whether `prepare` has nothing to do."""
        return not self._moved and len(self._shapes) == len(self._known)

    def prepare(self, bindings: Mapping[str, int]) -> bool:
        """Give all states memory and contents; whether an address has changed."""
        changed, self._moved = self._moved, False
        for name in self._known:
            if name in self._shapes:
                continue
            value = self._graph.values[name]
            shape = value.tensor.concrete(dict(bindings))
            array = np.empty(shape, value.dtype.numpy)
            initial = value.node.attrs.get("value")
            array[...] = np.zeros((), array.dtype) if initial is None else initial
            changed |= self._write(name, array)
        return changed

    def _write(self, name: str, array: Array) -> bool:
        buffer = self._known[name]
        held = self.buffers.get(buffer)
        changed = held is None or held.numel() != max(array.nbytes, 16)
        if held is None or changed:
            held = self.buffers[buffer] = allocate(array.nbytes, self._device, f"state {name!r}")
        if array.nbytes:
            held[: array.nbytes].copy_(to_raw(array, self._device))
        self._shapes[name] = array.shape
        return changed

    def __getitem__(self, name: str) -> Array:
        shape, buffer = self._shapes[name], self._known[name]
        self._finish()
        nbytes = int(np.prod(shape, dtype=np.int64)) * buffer.dtype.numpy.itemsize
        return to_array(self.buffers[buffer][:nbytes], buffer.dtype, shape).copy()

    def __setitem__(self, name: str, array: Array) -> None:
        found = np.asarray(array)
        self._finish()
        old = self.buffers.get(self._known[name])
        if old is not None and old.numel() != max(found.nbytes, 16):
            del self.buffers[self._known[name]]
        self._moved |= self._write(name, found)
        if self._device.type == "cuda":  # the next run may be on another stream
            load_torch().cuda.current_stream(self._device).synchronize()

    def __delitem__(self, name: str) -> None:
        del self._shapes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)
