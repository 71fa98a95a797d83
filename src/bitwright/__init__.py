"""bitwright makes a trained model smaller and faster, runs it, and proves what that cost.

    graph = bw.load("model.onnx")
    exe = bw.compile(graph)
    outputs = exe.run({"x": array})

Names are imported when they are first used, so `import bitwright` is quick.
"""

from typing import TYPE_CHECKING

from bitwright.lazy import lazy_names

if TYPE_CHECKING:  # type checkers and editors read these, and nothing is imported
    from bitwright.compiler import compile
    from bitwright.errors import BitwrightError
    from bitwright.executable import Executable
    from bitwright.export.onnx import export_onnx
    from bitwright.frontend.load import load
    from bitwright.frontend.parameters import load_parameters
    from bitwright.frontend.torch import from_torch
    from bitwright.ir import Graph, dtype, parse, to_text
    from bitwright.ops.builder import Builder
    from bitwright.ops.check import verify
    from bitwright.ops.custom import register_custom
    from bitwright.passes.apply_precision import apply_precision
    from bitwright.quant.calibrate import calibrate
    from bitwright.quant.cast_configuration import CastConfiguration
    from bitwright.quant.convert import convert
    from bitwright.quant.facade import QuantizationSystem
    from bitwright.quant.observer import Observer, quantize_tensor
    from bitwright.quant.operations import (
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
    from bitwright.quant.parameters import QuantizationParameters
    from bitwright.quant.quantize import quantize
    from bitwright.quant.tensor import QuantizedTensor
    from bitwright.report.bench import bench

__version__ = "0.1.0"

__all__ = [
    "BitwrightError",
    "Builder",
    "CastConfiguration",
    "Executable",
    "Graph",
    "Observer",
    "QuantizationParameters",
    "QuantizationSystem",
    "QuantizedTensor",
    "__version__",
    "apply_precision",
    "bench",
    "calibrate",
    "compile",
    "convert",
    "dtype",
    "export_onnx",
    "from_torch",
    "load",
    "load_parameters",
    "parse",
    "qadd",
    "qaverage_pool2d",
    "qconcat",
    "qconv2d",
    "qmatmul",
    "qmax_pool2d",
    "qmul",
    "qrelu",
    "quantize",
    "quantize_tensor",
    "register_custom",
    "requantize",
    "to_text",
    "verify",
]

_HOME = {
    "BitwrightError": "bitwright.errors",
    "Builder": "bitwright.ops.builder",
    "CastConfiguration": "bitwright.quant.cast_configuration",
    "Executable": "bitwright.executable",
    "Graph": "bitwright.ir",
    "Observer": "bitwright.quant.observer",
    "QuantizationParameters": "bitwright.quant.parameters",
    "QuantizationSystem": "bitwright.quant.facade",
    "QuantizedTensor": "bitwright.quant.tensor",
    "apply_precision": "bitwright.passes.apply_precision",
    "bench": "bitwright.report.bench",
    "calibrate": "bitwright.quant.calibrate",
    "compile": "bitwright.compiler",
    "convert": "bitwright.quant.convert",
    "dtype": "bitwright.ir",
    "export_onnx": "bitwright.export.onnx",
    "from_torch": "bitwright.frontend.torch",
    "load": "bitwright.frontend.load",
    "load_parameters": "bitwright.frontend.parameters",
    "parse": "bitwright.ir",
    "qadd": "bitwright.quant.operations",
    "qaverage_pool2d": "bitwright.quant.operations",
    "qconcat": "bitwright.quant.operations",
    "qconv2d": "bitwright.quant.operations",
    "qmatmul": "bitwright.quant.operations",
    "qmax_pool2d": "bitwright.quant.operations",
    "qmul": "bitwright.quant.operations",
    "qrelu": "bitwright.quant.operations",
    "quantize": "bitwright.quant.quantize",
    "quantize_tensor": "bitwright.quant.observer",
    "register_custom": "bitwright.ops.custom",
    "requantize": "bitwright.quant.operations",
    "to_text": "bitwright.ir",
    "verify": "bitwright.ops.check",
}

if not TYPE_CHECKING:  # else every name would do
    __getattr__, __dir__ = lazy_names(__name__, _HOME)
