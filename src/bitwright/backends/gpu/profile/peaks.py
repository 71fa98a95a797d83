"""The rates of a device: copy bandwidth, the library's products per element type, accumulation
precision.

Measured once with PyTorch on random data and remembered in the cache folder, per device. Shares of
the roof in
`profile` refer to these figures.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bitwright.backends.cpu.cache.objects import default_cache
from bitwright.backends.gpu.requirements import load_torch
from bitwright.backends.gpu.runtime.capture import empty_cache
from bitwright.backends.gpu.runtime.device import Device, current_device

_SIDE = 8192
_COPY_BYTES = 1 << 30
_ROUNDS = 8
_VERSION = 1


@dataclass(frozen=True)
class GpuPeaks:
    """Measured rates; `operations` by element type, in operations per second."""

    device: str
    bytes_per_second: float
    """Of a large copy: bytes read plus bytes written."""
    operations: Mapping[str, float]
    accumulation_bits: Mapping[str, int]
    """The largest m such that the matrix units find 1 + 2**-m in a sum, by element type."""

    def roof_seconds(self, nbytes: float, operations: float, unit: str) -> float:
        """The larger of the time of the bytes and of the operations."""
        rate = self.operations.get(unit) or max(self.operations.values(), default=0.0)
        return max(nbytes / self.bytes_per_second, operations / rate if rate else 0.0)


def peaks(device: Device | None = None) -> GpuPeaks | None:
    """The rates of a device, measured if they are not remembered; None for the interpreter."""
    device = device or current_device()
    if device.is_interpreted:
        return None
    found = remembered(device.machine.name)
    if found is None:
        found = measure(device)
        default_cache().write_entry(_entry(found.device), json.dumps(asdict(found)).encode())
    return found


def remembered(name: str) -> GpuPeaks | None:
    """What was measured on a device of this name."""
    data = default_cache().read_entry(_entry(name))
    try:
        return GpuPeaks(**json.loads(data)) if data else None
    except (ValueError, TypeError):
        return None


def measure(device: Device) -> GpuPeaks:
    """Measure all rates; takes about a second."""
    torch = load_torch()
    with torch.cuda.device(device.torch_device):
        seconds = _copy_seconds(torch)
        rates: dict[str, float] = {}
        for unit, call in _products(torch, device.machine.has_f8):
            try:
                rates[unit] = 2.0 * _SIDE**3 / _median(call)
            except RuntimeError:  # the library has no such product here
                continue
        bits = {"f8e4m3fn": f8_accumulation_bits(torch)} if device.machine.has_f8 else {}
        empty_cache()
    return GpuPeaks(device.machine.name, 2.0 * _COPY_BYTES / seconds, rates, bits)


def _copy_seconds(torch: Any) -> float:
    source = torch.randint(0, 255, (_COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return _median(lambda: target.copy_(source))


def _products(torch: Any, has_f8: bool) -> list[tuple[str, Callable[[], Any]]]:
    """The library's product of square matrices, by element type."""
    a, b = (torch.randn(_SIDE, _SIDE, device="cuda") for _ in range(2))
    found: list[tuple[str, Callable[[], Any]]] = [("f32", lambda: a @ b)]
    for unit, kind in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        x, y = a.to(kind), b.to(kind)
        found.append((unit, lambda x=x, y=y: x @ y))  # type: ignore[misc]
    i, j = ((t * 40).round().clamp(-127, 127).to(torch.int8) for t in (a, b))
    found.append(("int8", lambda: torch._int_mm(i, j.t())))
    if has_f8:
        p, q = (t.to(torch.float8_e4m3fn) for t in (a, b))
        one = torch.ones((), device="cuda")
        kind = torch.bfloat16
        found.append(
            (
                "f8e4m3fn",
                lambda: torch._scaled_mm(p, q.t(), scale_a=one, scale_b=one, out_dtype=kind),
            )
        )
    return found


def f8_accumulation_bits(torch: Any) -> int:
    """The largest m such that a sum of 8-bit float products holds 1 + 2**-m."""
    one = torch.ones((), device="cuda")
    bits = 0
    for m in range(1, 19):
        a, b = torch.zeros(16, 64, device="cuda"), torch.zeros(16, 64, device="cuda")
        a[:, 0] = b[:, 0] = 1.0
        a[:, 1], b[:, 1] = 2.0 ** -(m - m // 2), 2.0 ** -(m // 2)
        kind = torch.float8_e4m3fn
        total = torch._scaled_mm(
            a.to(kind),
            b.to(kind).t(),
            scale_a=one,
            scale_b=one,
            out_dtype=torch.float32,
            use_fast_accum=True,
        )
        if float(total[0, 0]) != 1.0 + 2.0**-m:
            break
        bits = m
    return bits


def _median(call: Callable[[], Any]) -> float:
    """The median seconds of a call on the device."""
    torch = load_torch()
    for _ in range(2):
        call()
    times = []
    for _ in range(_ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1e-3)
    return sorted(times)[len(times) // 2]


def _entry(name: str) -> str:
    return hashlib.sha256(f"gpu peaks {_VERSION} {name}".encode()).hexdigest()
