"""Quantization: `QuantParams`, tensors, calibration and model quantization.

    core         formats, packing, quantize and dequantize arrays
    data         data sources -> batches by input name
    calibration  batches -> statistics -> ranges -> QuantParams
    model        quantize a graph: recipe, points, search, weights, report
    tensor       QuantizedTensor and operations on it

Names are imported on first use.
"""

from typing import TYPE_CHECKING

from bitwright.lazy import lazy_names

if TYPE_CHECKING:  # for type checkers and editors only
    from bitwright.ir.calibration import CalibrationEntry, CalibrationRecord
    from bitwright.ir.quant_params import QuantParams
    from bitwright.ir.quant_types import Granularity, PerAxis, PerGroup, PerTensor, PerToken, Scheme
    from bitwright.passes.insert_q_dq import insert_q_dq
    from bitwright.quant.calibration.calibrate import Calibrator
    from bitwright.quant.calibration.intermediate_outputs import IntermediateOutputs
    from bitwright.quant.calibration.methods import Percentile, choose
    from bitwright.quant.calibration.ranges import Ranges
    from bitwright.quant.calibration.statistics import Statistics
    from bitwright.quant.core.measure import Quality, quality
    from bitwright.quant.data.batches import Batches
    from bitwright.quant.model.config import QuantConfig
    from bitwright.quant.model.quantize import Quantized, quantize
    from bitwright.quant.model.recipe import Recipe
    from bitwright.quant.tensor.observer import Observer, quantize_tensor
    from bitwright.quant.tensor.operations import (
        qadd,
        qaverage_pool2d,
        qconcat,
        qconv2d,
        qmatmul,
        qmax_pool2d,
        qmul,
        qrelu,
        requantize,
    )
    from bitwright.quant.tensor.system import QuantizationSystem
    from bitwright.quant.tensor.tensor import QuantizedTensor

__all__ = [
    "Batches",
    "CalibrationEntry",
    "CalibrationRecord",
    "Calibrator",
    "Granularity",
    "IntermediateOutputs",
    "Observer",
    "PerAxis",
    "PerGroup",
    "PerTensor",
    "PerToken",
    "Percentile",
    "Quality",
    "QuantConfig",
    "QuantParams",
    "QuantizationSystem",
    "Quantized",
    "QuantizedTensor",
    "Ranges",
    "Recipe",
    "Scheme",
    "Statistics",
    "choose",
    "insert_q_dq",
    "qadd",
    "qaverage_pool2d",
    "qconcat",
    "qconv2d",
    "qmatmul",
    "qmax_pool2d",
    "qmul",
    "qrelu",
    "quality",
    "quantize",
    "quantize_tensor",
    "requantize",
]

_HOME = {
    "Batches": "bitwright.quant.data.batches",
    "CalibrationEntry": "bitwright.ir.calibration",
    "CalibrationRecord": "bitwright.ir.calibration",
    "Calibrator": "bitwright.quant.calibration.calibrate",
    "Granularity": "bitwright.ir.quant_types",
    "IntermediateOutputs": "bitwright.quant.calibration.intermediate_outputs",
    "Observer": "bitwright.quant.tensor.observer",
    "PerAxis": "bitwright.ir.quant_types",
    "PerGroup": "bitwright.ir.quant_types",
    "PerTensor": "bitwright.ir.quant_types",
    "PerToken": "bitwright.ir.quant_types",
    "Percentile": "bitwright.quant.calibration.methods",
    "Quality": "bitwright.quant.core.measure",
    "QuantConfig": "bitwright.quant.model.config",
    "QuantParams": "bitwright.ir.quant_params",
    "QuantizationSystem": "bitwright.quant.tensor.system",
    "Quantized": "bitwright.quant.model.quantize",
    "QuantizedTensor": "bitwright.quant.tensor.tensor",
    "Ranges": "bitwright.quant.calibration.ranges",
    "Recipe": "bitwright.quant.model.recipe",
    "Scheme": "bitwright.ir.quant_types",
    "Statistics": "bitwright.quant.calibration.statistics",
    "choose": "bitwright.quant.calibration.methods",
    "insert_q_dq": "bitwright.passes.insert_q_dq",
    "qadd": "bitwright.quant.tensor.operations",
    "qaverage_pool2d": "bitwright.quant.tensor.operations",
    "qconcat": "bitwright.quant.tensor.operations",
    "qconv2d": "bitwright.quant.tensor.operations",
    "qmatmul": "bitwright.quant.tensor.operations",
    "qmax_pool2d": "bitwright.quant.tensor.operations",
    "qmul": "bitwright.quant.tensor.operations",
    "qrelu": "bitwright.quant.tensor.operations",
    "quality": "bitwright.quant.core.measure",
    "quantize": "bitwright.quant.model.quantize",
    "quantize_tensor": "bitwright.quant.tensor.observer",
    "requantize": "bitwright.quant.tensor.operations",
}

if not TYPE_CHECKING:  # a type checker would accept any name
    __getattr__, __dir__ = lazy_names(__name__, _HOME)
