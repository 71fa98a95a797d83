"""The GPUs of this machine, from the driver's own libraries: NVML, else libcuda.

No other package is needed. A machine without a driver has no GPUs; a driver that fails has none
either, and `why_none` says why. NVML comes first, because it leaves no state in the process.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bitwright.backends.gpu.profile.peaks import GpuPeaks, remembered

_NVML = ("nvml.dll",) if sys.platform == "win32" else ("libnvidia-ml.so.1", "libnvidia-ml.so")
_CUDA = ("nvcuda.dll",) if sys.platform == "win32" else ("libcuda.so.1", "libcuda.so")
_NAME_BYTES = 96
_MAJOR, _MINOR, _UNITS = 75, 76, 16
"""CUdevice_attribute: compute capability and multiprocessors."""
_FORMATS: tuple[tuple[tuple[int, int], tuple[str, ...]], ...] = (
    ((7, 0), ("f16",)),
    ((7, 5), ("f16", "int8", "int4", "binary")),
    ((8, 0), ("f64", "tf32", "bf16", "f16", "int8", "int4", "binary")),
    ((8, 9), ("f64", "tf32", "bf16", "f16", "f8e4m3fn", "f8e5m2", "int8", "int4", "binary")),
    ((9, 0), ("f64", "tf32", "bf16", "f16", "f8e4m3fn", "f8e5m2", "int8", "binary")),
    (
        (10, 0),
        ("f64", "tf32", "bf16", "f16", "f8e4m3fn", "f8e5m2", "f6e3m2", "f6e2m3", "f4e2m1", "int8"),
    ),
)
"""Element types of tensor-core products, by the lowest compute capability that has them."""


@dataclass(frozen=True)
class Gpu:
    """One GPU; unknown figures are None."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int | None = None
    multiprocessors: int | None = None

    @property
    def formats(self) -> tuple[str, ...]:
        """The element types that tensor cores multiply."""
        return tensor_core_formats(self.capability)

    @property
    def has_dp4a(self) -> bool:
        """Whether there is a dot product of four 8-bit values outside of tensor cores."""
        return self.capability >= (6, 1)

    def measured(self) -> GpuPeaks | None:
        """The rates remembered from a measurement on such a device: copies, products, accumulation.

        `bitwright explain --target cuda --profile` measures them once.
        """
        return remembered(self.name)

    def as_json(self) -> dict[str, Any]:
        found = self.measured()
        rates = {"measured": None if found is None else asdict(found)}
        return asdict(self) | rates | {"tensor_core_formats": self.formats, "dp4a": self.has_dp4a}

    def __str__(self) -> str:
        major, minor = self.capability
        facts = [f"compute capability {major}.{minor}"]
        if self.memory_bytes is not None:
            facts.append(f"{self.memory_bytes / 2**30:.0f} GiB")
        if self.multiprocessors is not None:
            facts.append(f"{self.multiprocessors} multiprocessors")
        facts.append(f"tensor cores: {', '.join(self.formats) or 'none'}")
        return f"{self.name} ({', '.join(facts)})"


def tensor_core_formats(capability: tuple[int, int]) -> tuple[str, ...]:
    """The element types of tensor-core products of a compute capability."""
    known = [formats for lowest, formats in _FORMATS if capability >= lowest]
    return known[-1] if known else ()


class _DriverError(Exception):
    """A call of the driver returned an error."""


def find_gpus(load: Callable[[str], Any] = ctypes.CDLL) -> tuple[tuple[Gpu, ...], str]:
    """The GPUs, and the reason if there are none."""
    reasons: list[str] = []
    for names, read in ((_NVML, _read_nvml), (_CUDA, _read_cuda)):
        library = _load(names, load)
        if library is None:
            continue
        try:
            if found := tuple(read(library)):
                return found, ""
            reasons.append("the driver lists no device")
        except (_DriverError, AttributeError, OSError, ValueError, ctypes.ArgumentError) as error:
            reasons.append(f"{names[0]}: {error}")
    return (), "; ".join(dict.fromkeys(reasons)) or "no driver is installed"


def _load(names: Sequence[str], load: Callable[[str], Any]) -> Any:
    for name in names:
        try:
            return load(name)
        except OSError:
            continue
    return None


def _call(library: Any, name: str, *arguments: Any) -> None:
    status = getattr(library, name)(*arguments)
    if status:
        raise _DriverError(f"{name} returned {status}")


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def _read_nvml(nvml: Any) -> Iterator[Gpu]:
    _call(nvml, "nvmlInit_v2")
    try:
        count = ctypes.c_uint()
        _call(nvml, "nvmlDeviceGetCount_v2", ctypes.byref(count))
        for index in range(count.value):
            device = ctypes.c_void_p()
            _call(nvml, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))
            name = ctypes.create_string_buffer(_NAME_BYTES)
            _call(nvml, "nvmlDeviceGetName", device, name, ctypes.c_uint(_NAME_BYTES))
            major, minor, memory = ctypes.c_int(), ctypes.c_int(), _Memory()
            _call(
                nvml,
                "nvmlDeviceGetCudaComputeCapability",
                device,
                ctypes.byref(major),
                ctypes.byref(minor),
            )
            _call(nvml, "nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
            yield Gpu(_text(name), (major.value, minor.value), memory.total)
    finally:
        nvml.nvmlShutdown()


def _read_cuda(cuda: Any) -> Iterator[Gpu]:
    _call(cuda, "cuInit", ctypes.c_uint(0))
    count = ctypes.c_int()
    _call(cuda, "cuDeviceGetCount", ctypes.byref(count))
    for index in range(count.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(_NAME_BYTES)
        _call(cuda, "cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
        _call(cuda, "cuDeviceGetName", name, ctypes.c_int(_NAME_BYTES), device)
        memory, facts = ctypes.c_size_t(), []
        _call(cuda, "cuDeviceTotalMem_v2", ctypes.byref(memory), device)
        for attribute in (_MAJOR, _MINOR, _UNITS):
            value = ctypes.c_int()
            _call(
                cuda, "cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(attribute), device
            )
            facts.append(value.value)
        major, minor, units = facts
        yield Gpu(_text(name), (major, minor), memory.value, units)


def _text(name: Any) -> str:
    return bytes(name.value).decode("utf-8", "replace")
