"""The memory of one signature: the arena, inputs, outputs, states and constants as raw tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bitwright.backends.gpu.requirements import load_torch
from bitwright.backends.gpu.runtime.capture import empty_cache
from bitwright.backends.gpu.runtime.tensors import to_array, to_raw, typed
from bitwright.errors import RunError
from bitwright.ir.dim import evaluate
from bitwright.ir.dtype import DType
from bitwright.lir.buffer import Buffer, Storage, View
from bitwright.lir.plan import Plan, byte_size

Array = np.ndarray[Any, Any]
ALIGN = 256
"""Bytes; TMA needs 16, whole cache lines are faster."""


class DeviceMemoryError(RunError):
    """Too little memory on the device."""


def allocate(nbytes: int, device: Any, what: str) -> Any:
    """Uninitialized bytes on the device; a clear error if there is no room."""
    torch = load_torch()
    try:
        with torch.inference_mode(False):  # later runs outside of the caller's mode write to it
            return torch.empty(max(nbytes, 16), dtype=torch.uint8, device=device)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        if device.type == "cuda":
            empty_cache()
        raise DeviceMemoryError(
            f"the GPU has not enough memory for {what}", found=f"{nbytes / 2**20:,.1f} MiB wanted"
        ) from None


def is_out_of_memory(error: BaseException) -> bool:
    torch = load_torch()
    return isinstance(error, torch.OutOfMemoryError) or "alloc" in str(error)


class DeviceMemory:
    """Buffers as raw tensors. Without a plan, arena buffers are allocated on first use."""

    def __init__(
        self,
        device: Any,
        bindings: dict[str, int],
        shared: Mapping[Buffer, Any],
        plan: Plan | None,
        arena: Any = None,
    ) -> None:
        self.device, self.bindings = device, bindings
        self._shared, self._plan, self.arena = shared, plan, arena
        self._own: dict[Buffer, Any] = {}
        self.transferred = 0
        """Bytes that fallbacks moved between device and host."""

    def raw(self, buffer: Buffer) -> Any:
        """The bytes of a buffer."""
        if buffer in self._shared:
            return self._shared[buffer]
        found = self._own.get(buffer)
        if found is not None:
            return found
        if self._plan is not None and buffer.storage is Storage.ARENA:
            if buffer not in self._plan.offsets:  # no step uses it
                return allocate(byte_size(buffer, self.bindings), self.device, buffer.name)
            start, size = self._plan.offsets[buffer], self._plan.nbytes[buffer]
            found = self.arena[start : start + max(size, 1)]
        else:
            nbytes = byte_size(buffer, self.bindings)
            found = allocate(nbytes, self.device, f"{buffer.storage.value} {buffer.name!r}")
        self._own[buffer] = found
        return found

    def tensor(self, view: View, dtype: DType | None = None) -> Any:
        """The elements of a view from its first one on, as a flat tensor."""
        dtype = dtype or view.dtype
        offset = evaluate(view.offset, self.bindings) * view.dtype.numpy.itemsize
        raw = self.raw(view.buffer)
        if offset >= raw.numel():
            return typed(raw, 0, dtype)  # an empty view
        return typed(raw, offset, dtype)

    def shape(self, view: View) -> tuple[int, ...]:
        return tuple(evaluate(size, self.bindings) for size in view.shape)

    def download(self, view: View) -> Array:
        """A view as an array on the host."""
        shape = self.shape(view)
        if 0 in shape:
            return np.empty(shape, view.dtype.numpy)
        raw = self.raw(view.buffer)
        self.transferred += raw.numel()
        item = view.dtype.numpy.itemsize
        whole = raw[: raw.numel() // item * item]
        flat = to_array(whole, view.dtype, (whole.numel() // item,))
        start = evaluate(view.offset, self.bindings)
        strides = tuple(evaluate(stride, self.bindings) * item for stride in view.strides)
        # not `as_strided`, which does not know the element types of ml_dtypes
        found: Array = np.ndarray(shape, flat.dtype, flat, start * item, strides)
        return found.copy("C")

    def upload(self, view: View, array: Array) -> None:
        """Write an array to a contiguous view."""
        nbytes = array.nbytes
        if not nbytes:
            return
        start = evaluate(view.offset, self.bindings) * view.dtype.numpy.itemsize
        self.raw(view.buffer)[start : start + nbytes].copy_(to_raw(array, self.device))
        self.transferred += nbytes
