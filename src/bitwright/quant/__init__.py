"""Quantization: types, statistics, parameters, tensors, calibration and recipes.

    statistics  one streaming pass over data          types       what a code can be
    methods     statistics -> a range -> parameters   parameters  scale, zero point, granularity

Names are imported when they are first used.
"""

from bitwright.lazy import lazy_names

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

__getattr__, __dir__ = lazy_names(__name__, _HOME)
