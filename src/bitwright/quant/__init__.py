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
    from bitwright.quant.calibration.calibrate import Calibrator
    from bitwright.quant.calibration.intermediate_outputs import IntermediateOutputs
    from bitwright.quant.calibration.methods import Percentile, choose
    from bitwright.quant.calibration.ranges import Ranges
    from bitwright.quant.calibration.statistics import Statistics
    from bitwright.quant.core.measure import Quality, quality
    from bitwright.quant.core.parameters import QuantizationParameters
    from bitwright.quant.core.types import Granularity, Scheme
    from bitwright.quant.data.batches import Batches
    from bitwright.quant.model.quantize import Quantized, quantize
    from bitwright.quant.model.recipe import Recipe
    from bitwright.quant.tensor.observer import Observer, quantize_tensor
    from bitwright.quant.tensor.system import QuantizationSystem
    from bitwright.quant.tensor.tensor import QuantizedTensor

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
    "IntermediateOutputs",
    "choose",
    "insert_q_dq",
    "quality",
    "quantize",
    "quantize_tensor",
]

_HOME = {
    "Batches": "bitwright.quant.data.batches",
    "CalibrationEntry": "bitwright.ir.calibration",
    "CalibrationRecord": "bitwright.ir.calibration",
    "Calibrator": "bitwright.quant.calibration.calibrate",
    "Granularity": "bitwright.quant.core.types",
    "Observer": "bitwright.quant.tensor.observer",
    "Percentile": "bitwright.quant.calibration.methods",
    "Quality": "bitwright.quant.core.measure",
    "QuantizationParameters": "bitwright.quant.core.parameters",
    "QuantizationSystem": "bitwright.quant.tensor.system",
    "QuantizedTensor": "bitwright.quant.tensor.tensor",
    "Quantized": "bitwright.quant.model.quantize",
    "Ranges": "bitwright.quant.calibration.ranges",
    "Recipe": "bitwright.quant.model.recipe",
    "Scheme": "bitwright.quant.core.types",
    "Statistics": "bitwright.quant.calibration.statistics",
    "IntermediateOutputs": "bitwright.quant.calibration.intermediate_outputs",
    "choose": "bitwright.quant.calibration.methods",
    "insert_q_dq": "bitwright.passes.insert_q_dq",
    "quality": "bitwright.quant.core.measure",
    "quantize": "bitwright.quant.model.quantize",
    "quantize_tensor": "bitwright.quant.tensor.observer",
}

if not TYPE_CHECKING:  # else every name would do
    __getattr__, __dir__ = lazy_names(__name__, _HOME)
