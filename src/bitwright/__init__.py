"""bitwright makes a trained model smaller and faster, runs it, and proves what that cost.

    graph = bw.load("model.onnx")
    exe = bw.compile(graph)
    outputs = exe.run({"x": array})

Names are imported when they are first used, so `import bitwright` is quick.
"""

from bitwright.lazy import lazy_names

__version__ = "0.1.0"

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

__getattr__, __dir__ = lazy_names(__name__, _HOME)
