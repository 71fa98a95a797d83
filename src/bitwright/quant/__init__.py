"""Quantization: types, statistics, parameters, tensors, calibration and recipes.

    statistics  one streaming pass over data          types       what a code can be
    methods     statistics -> a range -> parameters   parameters  scale, zero point, granularity

Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from bitwright.lazy import lazy_names

if TYPE_CHECKING:  # type checkers and editors read these, and nothing is imported
    from bitwright.ir.calibration import CalibrationEntry, CalibrationRecord
    from bitwright.passes.insert_q_dq import insert_q_dq
    from bitwright.quant.calibrate import Calibrator
    from bitwright.quant.data import Batches
    from bitwright.quant.facade import QuantizationSystem
    from bitwright.quant.measure import Quality, quality
    from bitwright.quant.methods import Percentile, choose
    from bitwright.quant.observer import Observer, quantize_tensor
    from bitwright.quant.parameters import QuantizationParameters
    from bitwright.quant.quantize import Quantized, quantize
    from bitwright.quant.ranges import Ranges
    from bitwright.quant.recipe import Recipe
    from bitwright.quant.statistics import Statistics
    from bitwright.quant.taps import Taps
    from bitwright.quant.tensor import QuantizedTensor
    from bitwright.quant.types import Granularity, Scheme

__all__ = [
    "Batches",
    "CalibrationEntry",
    "CalibrationRecord",
    "Calibrator",
    "Granularity",
    "Observer",
    "Percentile",
    "Quality",
    "QuantizationParameters",
    "QuantizationSystem",
    "Quantized",
    "QuantizedTensor",
    "Ranges",
    "Recipe",
    "Scheme",
    "Statistics",
    "Taps",
    "choose",
    "insert_q_dq",
    "quality",
    "quantize",
    "quantize_tensor",
]

_HOME = {
    "Batches": "bitwright.quant.data",
    "CalibrationEntry": "bitwright.ir.calibration",
    "CalibrationRecord": "bitwright.ir.calibration",
    "Calibrator": "bitwright.quant.calibrate",
    "Granularity": "bitwright.quant.types",
    "Observer": "bitwright.quant.observer",
    "Percentile": "bitwright.quant.methods",
    "Quality": "bitwright.quant.measure",
    "QuantizationParameters": "bitwright.quant.parameters",
    "QuantizationSystem": "bitwright.quant.facade",
    "QuantizedTensor": "bitwright.quant.tensor",
    "Quantized": "bitwright.quant.quantize",
    "Ranges": "bitwright.quant.ranges",
    "Recipe": "bitwright.quant.recipe",
    "Scheme": "bitwright.quant.types",
    "Statistics": "bitwright.quant.statistics",
    "Taps": "bitwright.quant.taps",
    "choose": "bitwright.quant.methods",
    "insert_q_dq": "bitwright.passes.insert_q_dq",
    "quality": "bitwright.quant.measure",
    "quantize": "bitwright.quant.quantize",
    "quantize_tensor": "bitwright.quant.observer",
}

if not TYPE_CHECKING:  # else every name would do
    __getattr__, __dir__ = lazy_names(__name__, _HOME)
