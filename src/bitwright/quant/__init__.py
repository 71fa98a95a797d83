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
    from bitwright.ir.calibration import CalibrationEntry as CalibrationEntry
    from bitwright.ir.calibration import CalibrationRecord as CalibrationRecord
    from bitwright.ir.quant_params import QuantParams as QuantParams
    from bitwright.ir.quant_types import Granularity as Granularity
    from bitwright.ir.quant_types import PerAxis as PerAxis
    from bitwright.ir.quant_types import PerGroup as PerGroup
    from bitwright.ir.quant_types import PerTensor as PerTensor
    from bitwright.ir.quant_types import PerToken as PerToken
    from bitwright.ir.quant_types import Scheme as Scheme
    from bitwright.passes.insert_q_dq import insert_q_dq as insert_q_dq
    from bitwright.quant.calibration.calibrate import Calibrator as Calibrator
    from bitwright.quant.calibration.intermediate_outputs import (
        IntermediateOutputs as IntermediateOutputs,
    )
    from bitwright.quant.calibration.methods import Percentile as Percentile
    from bitwright.quant.calibration.methods import choose as choose
    from bitwright.quant.calibration.ranges import Ranges as Ranges
    from bitwright.quant.calibration.statistics import Statistics as Statistics
    from bitwright.quant.core.measure import Quality as Quality
    from bitwright.quant.core.measure import quality as quality
    from bitwright.quant.data.batches import Batches as Batches
    from bitwright.quant.model.config import QuantConfig as QuantConfig
    from bitwright.quant.model.quantize import Quantized as Quantized
    from bitwright.quant.model.quantize import quantize as quantize
    from bitwright.quant.model.recipe import Recipe as Recipe
    from bitwright.quant.tensor.auto_tune import TuneLimits as TuneLimits
    from bitwright.quant.tensor.observer import Observer as Observer
    from bitwright.quant.tensor.observer import quantize_tensor as quantize_tensor
    from bitwright.quant.tensor.operations import qadd as qadd
    from bitwright.quant.tensor.operations import qaverage_pool2d as qaverage_pool2d
    from bitwright.quant.tensor.operations import qconcat as qconcat
    from bitwright.quant.tensor.operations import qconv2d as qconv2d
    from bitwright.quant.tensor.operations import qmatmul as qmatmul
    from bitwright.quant.tensor.operations import qmax_pool2d as qmax_pool2d
    from bitwright.quant.tensor.operations import qmul as qmul
    from bitwright.quant.tensor.operations import qrelu as qrelu
    from bitwright.quant.tensor.operations import requantize as requantize
    from bitwright.quant.tensor.system import QuantizationSystem as QuantizationSystem
    from bitwright.quant.tensor.tensor import QuantizedTensor as QuantizedTensor

_NAMES = {
    "bitwright.quant.data.batches": "Batches",
    "bitwright.ir.calibration": "CalibrationEntry CalibrationRecord",
    "bitwright.quant.calibration.calibrate": "Calibrator",
    "bitwright.ir.quant_types": "Granularity PerAxis PerGroup PerTensor PerToken Scheme",
    "bitwright.quant.calibration.intermediate_outputs": "IntermediateOutputs",
    "bitwright.quant.tensor.auto_tune": "TuneLimits",
    "bitwright.quant.tensor.observer": "Observer quantize_tensor",
    "bitwright.quant.calibration.methods": "Percentile choose",
    "bitwright.quant.core.measure": "Quality quality",
    "bitwright.quant.model.config": "QuantConfig",
    "bitwright.ir.quant_params": "QuantParams",
    "bitwright.quant.tensor.system": "QuantizationSystem",
    "bitwright.quant.model.quantize": "Quantized quantize",
    "bitwright.quant.tensor.tensor": "QuantizedTensor",
    "bitwright.quant.calibration.ranges": "Ranges",
    "bitwright.quant.model.recipe": "Recipe",
    "bitwright.quant.calibration.statistics": "Statistics",
    "bitwright.passes.insert_q_dq": "insert_q_dq",
    "bitwright.quant.tensor.operations": "qadd qaverage_pool2d qconcat qconv2d qmatmul qmax_pool2d "
    "qmul qrelu requantize",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = list(_HOME)

if not TYPE_CHECKING:  # a type checker would accept any name
    __getattr__, __dir__ = lazy_names(__name__, _HOME)
