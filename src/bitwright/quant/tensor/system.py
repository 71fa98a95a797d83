"""QuantizationSystem: one object for quantizing without a graph on a device.

Everything it does is a function elsewhere: `choose` and `quantize_tensor` pick parameters,
`Observer` reads samples, `operations` compute, `measure` measures. It adds the machine's facts and
a preference: speed is symmetric, asymmetric only for unsigned types; accuracy is measured where
there is data.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright import target
from bitwright.errors import QuantizationError
from bitwright.quant.calibration.methods import Method, choose, expected_error
from bitwright.quant.calibration.statistics import Statistics
from bitwright.quant.core import types
from bitwright.quant.core.measure import Quality, quality
from bitwright.quant.core.parameters import QuantizationParameters
from bitwright.quant.core.types import QuantType, Scheme
from bitwright.quant.tensor.arithmetic import Result
from bitwright.quant.tensor.observer import Observer, quantize_tensor
from bitwright.quant.tensor.operations import qmatmul
from bitwright.quant.tensor.tensor import QuantizedTensor
from bitwright.warn import BitwrightWarning

Array = np.ndarray[Any, Any]

_FEATURES = {  # what each name is called by LLVM; any of them will do
    "avx2": ("avx2",),
    "fma": ("fma",),
    "f16c": ("f16c",),
    "avx512f": ("avx512f",),
    "avx512bw": ("avx512bw",),
    "avx512vl": ("avx512vl",),
    "vnni": ("avx512vnni", "avxvnni"),
    "bf16": ("avx512bf16", "bf16"),
    "amx": ("amx-int8", "amx-bf16"),
    "neon": ("neon",),
    "dotprod": ("dotprod",),
}
PREFERENCES = ("accuracy", "speed")


@dataclass(frozen=True)
class Hardware:
    """Facts about a device that matter to quantized arithmetic."""

    name: str
    architecture: str
    parallel_units: int
    vector_bytes: int
    features: tuple[str, ...]
    caches: tuple[int, int, int]

    @staticmethod
    def of_fallback() -> Hardware:
        host = target.host()
        found = [name for name, any_of in _FEATURES.items() if host.features & set(any_of)]
        return Hardware(
            host.cpu,
            host.architecture,
            host.cores,
            host.vector_bytes,
            tuple(found),
            (host.l1_bytes, host.l2_bytes, host.l3_bytes),
        )


class QuantizationSystem:
    """Quantization on a device; only "cpu" holds quantized tensors."""

    def __init__(self, device: str = "cpu") -> None:
        if device != "cpu":
            raise QuantizationError("the device is not known", expected="cpu", found=device)
        self.device = device
        self.hardware = Hardware.of_fallback()

    def __repr__(self) -> str:
        return f"QuantizationSystem({self.device}: {self.hardware.name})"

    def parameters(
        self,
        dtype: str | QuantType,
        prefer: str = "accuracy",
        statistics: Statistics | Observer | None = None,
        *,
        x: Any = None,
    ) -> QuantizationParameters:
        """Parameters for a type: for the values of `x`, or for those observed.

        Without either they are for values within -1..1, and a warning says so. Speed takes the
        whole range, symmetric unless the type is unsigned. Accuracy takes, of both schemes, the one
        whose best range has the lower expected error.
        """
        kind = types.get(dtype)
        if prefer not in PREFERENCES:
            raise QuantizationError(
                "the preference is not known", expected=" or ".join(PREFERENCES), found=prefer
            )
        usual = types.scheme(None, kind)
        if x is not None:
            if statistics is not None:
                raise QuantizationError("x and statistics both say what the values are")
            statistics = Observer().add(x)
        if statistics is None:
            warnings.warn(
                f"parameters({str(kind)!r}) without data are for values within -1..1, and clip all "
                "others: give x= or statistics=",
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
    ) -> QuantizationParameters:
        """Parameters for values like those of the samples."""
        observer = Observer(axis)
        for sample in samples:
            observer.add(sample)
        return observer.calibrate(dtype, method, scheme)

    def quantize(
        self, x: Any, dtype: str | QuantType | QuantizationParameters = "int8", **options: Any
    ) -> QuantizedTensor:
        """Codes of x, by these parameters, or by ones chosen for it as `quantize_tensor` does."""
        if isinstance(dtype, QuantizationParameters):
            return QuantizedTensor.quantize(x, dtype, **options)
        return quantize_tensor(x, dtype, **options)

    def dequantize(self, tensor: QuantizedTensor) -> Array:
        return tensor.dequantize()

    def matmul(
        self,
        x: QuantizedTensor,
        w: QuantizedTensor,
        bias: Array | None = None,
        output: QuantizationParameters | None = None,
    ) -> Result:
        return qmatmul(x, w, bias, output)

    def create_tensor(
        self,
        shape: Sequence[int],
        dtype: str | QuantType = "int8",
        parameters: QuantizationParameters | None = None,
    ) -> QuantizedTensor:
        """A tensor of zeros."""
        parameters = parameters or _of_unit_range(types.get(dtype))
        return QuantizedTensor.quantize(np.zeros(tuple(shape), np.float32), parameters)

    def measure(self, x: Any, tensor: QuantizedTensor) -> Quality:
        """What the tensor lost of x, measured."""
        return quality(x, tensor)


def _of_unit_range(kind: QuantType) -> QuantizationParameters:
    return QuantizationParameters.from_range(kind, -1.0, 1.0, types.scheme(None, kind))
