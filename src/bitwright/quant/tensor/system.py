"""QuantizationSystem: a facade for quantizing tensors without a graph.

It calls `choose` and `quantize_tensor` for parameters, `Observer` for samples, `operations` for
arithmetic and `measure` for errors; `bw.hardware` has the facts of the machine. It adds a
preference: "speed" is symmetric (asymmetric for unsigned types), "accuracy" compares schemes on
data.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from bitwright.errors import QuantizationError
from bitwright.ir import quant_types
from bitwright.ir.arrays import Array
from bitwright.ir.quant_params import QuantParams
from bitwright.ir.quant_types import QuantType, Scheme
from bitwright.machine.facts import Hardware, hardware
from bitwright.quant.calibration.methods import Method, choose, expected_error
from bitwright.quant.calibration.statistics import Statistics
from bitwright.quant.core.measure import Quality, quality
from bitwright.quant.tensor.arithmetic import Result
from bitwright.quant.tensor.observer import Observer, quantize_tensor
from bitwright.quant.tensor.operations import qmatmul
from bitwright.quant.tensor.tensor import QuantizedTensor
from bitwright.warn import BitwrightWarning

if TYPE_CHECKING:  # they import the compiler
    from bitwright.quant.tensor.auto_tune import AutoTuned, TuneLimits
    from bitwright.quant.tensor.benchmark import BenchmarkSummary
    from bitwright.quant.tensor.workload import Recommendation, Workload

PREFERENCES = ("accuracy", "speed")


@dataclass(frozen=True)
class Hints:
    """What is preferred on this machine, by measurement; `reasons` has the figures."""

    dtypes: tuple[str, ...]
    """Accelerated types, the fastest first."""
    schemes: tuple[str, ...]
    """Schemes of 8-bit weights, the fastest first."""
    block_sizes: dict[str, int]
    """Preferred sizes of blocks of weights by type."""
    batch_size: int
    layout: str
    """Of images: channels_first or channels_last."""
    parallelism: int
    """Threads."""
    reasons: dict[str, str]


class QuantizationSystem:
    """Quantization on a device; only "cpu" is supported."""

    def __init__(self, device: str = "cpu") -> None:
        if device != "cpu":
            raise QuantizationError("unknown device", expected="cpu", found=device)
        self.device = device

    @cached_property
    def hardware(self) -> Hardware:
        """The facts of this machine, with remembered measurements."""
        return hardware(measure=False)

    def __repr__(self) -> str:
        return f"QuantizationSystem({self.device}: {self.hardware.name})"

    def has_acceleration(self, dtype: str | QuantType) -> bool:
        """Whether the compiler's kernels multiply this type without converting it to f32."""
        return bool(self.hardware.accelerated(dtype))

    def hints(self) -> Hints:
        """Preferences of this machine; measured in a few seconds if none are remembered."""
        from bitwright.machine.measure import RATED

        here = hardware()
        assert here.preferences is not None
        wanted = here.preferences
        found = [here.accelerated(name) for name in RATED]
        fast = sorted((one for one in found if one), key=lambda one: -(one.rate or 0.0))
        reasons = wanted.reasons() | {"dtypes": "; ".join(map(str, fast))}
        return Hints(
            tuple(one.dtype for one in fast) or ("f32",),
            wanted.schemes,
            {"int4": wanted.block_size},
            wanted.batch_size,
            wanted.layout,
            wanted.threads,
            reasons,
        )

    def optimal_block_size(
        self,
        dtype: str | QuantType = "int4",
        shape: Sequence[int] = (512, 512),
        x: Any = None,
        min_sqnr_db: float | None = None,
    ) -> int:
        """The block size of weights [k, n], measured: the smallest at most 5% slower than the best.

        With `min_sqnr_db`, only blocks whose error on the weights `x` is small enough count; if
        there are none, the result is the block with the smallest error.
        """
        from bitwright.machine.preferences import measure_blocks, smallest_within
        from bitwright.machine.probes import WEIGHTS, type_name

        name = type_name(dtype)
        if name not in WEIGHTS:
            raise QuantizationError(
                "weights of this type have no blocks", expected=", ".join(WEIGHTS), found=name
            )
        if x is not None:
            shape = np.shape(x)
        if len(shape) != 2 or min(shape) < 1:
            raise QuantizationError("weights have two axes", expected="[k, n]", found=list(shape))
        seconds = measure_blocks(name, shape[0], shape[1], self.hardware.threads)
        if x is None or min_sqnr_db is None:
            return smallest_within(seconds)
        sqnr = {
            block: quality(x, quantize_tensor(x, name, "minmax", axis=0, block=block)).sqnr
            for block in seconds
        }
        good = {block: seconds[block] for block in seconds if sqnr[block] >= min_sqnr_db}
        return smallest_within(good) if good else max(sqnr, key=lambda block: sqnr[block])

    def recommend(self, workload: Workload) -> Recommendation:
        """The fastest precision that meets a workload's requirements, measured here."""
        from bitwright.quant.tensor.workload import recommend

        return recommend(workload)

    def auto_tune(
        self, data: Any, limits: TuneLimits | None = None, axis: int | None = None
    ) -> AutoTuned:
        """Parameters for an array or a list of samples, searched within limits."""
        from bitwright.quant.tensor.auto_tune import auto_tune

        return auto_tune(data, limits, axis)

    def benchmark(self, **options: Any) -> BenchmarkSummary:
        """Times of quantize, dequantize and matmul; the options are those of `run_benchmark`."""
        from bitwright.quant.tensor.benchmark import run_benchmark

        return run_benchmark(self.hardware.parallel_units, **options)

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
