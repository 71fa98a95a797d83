"""QuantizationSystem: a facade for quantizing tensors without a graph.

It calls `choose` and `quantize_tensor` for parameters, `Observer` for samples, `operations` for
arithmetic and `measure` for errors. It adds hardware facts and a preference: "speed" is symmetric
(asymmetric for unsigned types), "accuracy" compares schemes on data.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright import target
from bitwright.errors import QuantizationError
from bitwright.ir import quant_types
from bitwright.ir.arrays import Array
from bitwright.ir.quant_params import QuantParams
from bitwright.ir.quant_types import QuantType, Scheme
from bitwright.quant.calibration.methods import Method, choose, expected_error
from bitwright.quant.calibration.statistics import Statistics
from bitwright.quant.core.measure import Quality, quality
from bitwright.quant.tensor.arithmetic import Result
from bitwright.quant.tensor.observer import Observer, quantize_tensor
from bitwright.quant.tensor.operations import qmatmul
from bitwright.quant.tensor.tensor import QuantizedTensor
from bitwright.warn import BitwrightWarning

_FEATURES = [
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "vnni",
    "bf16",
    "amx",
    "neon",
    "dotprod",
]
_LLVM_NAMES = {  # any of them, where LLVM's name differs
    "vnni": {"avx512vnni", "avxvnni"},
    "bf16": {"avx512bf16", "bf16"},
    "amx": {"amx-int8", "amx-bf16"},
}
PREFERENCES = ("accuracy", "speed")


@dataclass(frozen=True)
class Hardware:
    """Properties of a device that matter for quantized arithmetic."""

    name: str
    architecture: str
    parallel_units: int
    vector_bytes: int
    features: tuple[str, ...]
    caches: tuple[int, int, int]

    @staticmethod
    def of_host() -> Hardware:
        host = target.host()
        found = [name for name in _FEATURES if host.features & _LLVM_NAMES.get(name, {name})]
        return Hardware(
            host.cpu,
            host.architecture,
            host.cores,
            host.vector_bytes,
            tuple(found),
            (host.l1_bytes, host.l2_bytes, host.l3_bytes),
        )


class QuantizationSystem:
    """Quantization on a device; only "cpu" is supported."""

    def __init__(self, device: str = "cpu") -> None:
        if device != "cpu":
            raise QuantizationError("unknown device", expected="cpu", found=device)
        self.device = device
        self.hardware = Hardware.of_host()

    def __repr__(self) -> str:
        return f"QuantizationSystem({self.device}: {self.hardware.name})"

    def parameters(
        self,
        dtype: str | QuantType,
        prefer: str = "accuracy",
        statistics: Statistics | Observer | None = None,
        *,
        x: Any = None,
    ) -> QuantParams:
        """Parameters for a type, for the values of `x` or for observed statistics.

        Without either, the range is -1..1 and a warning is issued. "speed" uses the full range,
        symmetric unless the type is unsigned. "accuracy" uses the scheme whose best range has the
        lower expected error.
        """
        kind = quant_types.get(dtype)
        if prefer not in PREFERENCES:
            raise QuantizationError(
                "unknown preference", expected=" or ".join(PREFERENCES), found=prefer
            )
        usual = quant_types.scheme(None, kind)
        if x is not None:
            if statistics is not None:
                raise QuantizationError("x and statistics are both given")
            statistics = Observer().add(x)
        if statistics is None:
            warnings.warn(
                f"parameters({str(kind)!r}) without data clip values to -1..1: pass x= or "
                "statistics=",
                BitwrightWarning,
                stacklevel=2,
            )
            return _of_unit_range(kind)
        if isinstance(statistics, Observer):
            statistics = statistics.statistics
        if prefer == "speed":
            return choose(statistics, kind, usual, "minmax")
        schemes = [usual]
        if kind.is_integer and kind.is_signed and usual is Scheme.symmetric:
            schemes.append(Scheme.asymmetric)
        found = [choose(statistics, kind, scheme, "adaptive") for scheme in schemes]
        return min(found, key=lambda one: float(expected_error(statistics, one).sum()))

    def calibrate(
        self,
        samples: Iterable[Any],
        dtype: str | QuantType,
        method: Method = "minmax",
        scheme: str | Scheme | None = None,
        axis: int | None = None,
    ) -> QuantParams:
        """Parameters for the values of the samples."""
        observer = Observer(axis)
        for sample in samples:
            observer.add(sample)
        return observer.calibrate(dtype, method, scheme)

    def quantize(
        self, x: Any, dtype: str | QuantType | QuantParams = "int8", **options: Any
    ) -> QuantizedTensor:
        """Quantize x with these parameters, or with chosen ones (see `quantize_tensor`)."""
        if isinstance(dtype, QuantParams):
            return QuantizedTensor.quantize(x, dtype, **options)
        return quantize_tensor(x, dtype, **options)

    def dequantize(self, tensor: QuantizedTensor) -> Array:
        return tensor.dequantize()

    def matmul(
        self,
        x: QuantizedTensor,
        w: QuantizedTensor,
        bias: Array | None = None,
        output: QuantParams | None = None,
    ) -> Result:
        return qmatmul(x, w, bias, output)

    def create_tensor(
        self,
        shape: Sequence[int],
        dtype: str | QuantType = "int8",
        parameters: QuantParams | None = None,
    ) -> QuantizedTensor:
        """A tensor of zeros."""
        parameters = parameters or _of_unit_range(quant_types.get(dtype))
        return QuantizedTensor.quantize(np.zeros(tuple(shape), np.float32), parameters)

    def measure(self, x: Any, tensor: QuantizedTensor) -> Quality:
        return quality(x, tensor)


def _of_unit_range(kind: QuantType) -> QuantParams:
    return QuantParams.from_range(kind, -1.0, 1.0, quant_types.scheme(None, kind))
