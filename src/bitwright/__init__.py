"""bitwright makes a trained model smaller and faster, runs it, and proves what that cost.

    graph = bw.load("model.onnx")
    exe = bw.compile(graph)
    outputs = exe.run({"x": array})

Names are imported on first use, so `import bitwright` is fast.
"""

from typing import TYPE_CHECKING

from bitwright.lazy import lazy_names

if TYPE_CHECKING:  # for type checkers and editors
    from bitwright import nn, quant, train
    from bitwright.autodiff.forward import hvp, jvp
    from bitwright.autodiff.grad import grad
    from bitwright.compiler import compile
    from bitwright.deploy.checking import check_file
    from bitwright.drift.recalibration import recalibrate
    from bitwright.errors import BitwrightError
    from bitwright.executable import Executable
    from bitwright.export.onnx import export_onnx
    from bitwright.frontend.load import load
    from bitwright.frontend.parameters import load_parameters
    from bitwright.frontend.torch import from_torch
    from bitwright.ir import Graph, dtype, parse, to_text
    from bitwright.ir.quant_params import QuantParams
    from bitwright.llm.generation.generate import generate
    from bitwright.llm.language_model import LanguageModel
    from bitwright.machine.facts import Hardware, hardware
    from bitwright.ops.control.custom import register_custom
    from bitwright.ops.core.builder import Builder
    from bitwright.ops.core.check import verify
    from bitwright.passes.precision.apply import apply_precision
    from bitwright.proof.verification import verify_file
    from bitwright.quant.calibration.calibrate import calibrate
    from bitwright.quant.model.config import QuantConfig
    from bitwright.quant.model.convert import convert
    from bitwright.quant.model.quantize import quantize
    from bitwright.quant.tensor.cast_configuration import CastConfiguration
    from bitwright.quant.tensor.observer import Observer, quantize_tensor
    from bitwright.quant.tensor.system import QuantizationSystem
    from bitwright.quant.tensor.tensor import QuantizedTensor
    from bitwright.quant.tensor.workload import Workload
    from bitwright.report.advice import advise
    from bitwright.report.bench import bench
    from bitwright.report.compare import compare
    from bitwright.report.differences import diff
    from bitwright.report.html.assemble import write_report
    from bitwright.report.html.data import ReportData
    from bitwright.report.profile import profile
    from bitwright.report.suite.run import bench_suite
    from bitwright.train.lora.add import add_lora
    from bitwright.train.lora.file import load_lora, save_lora
    from bitwright.train.lora.merge import merge_lora, remove_lora, unmerge_lora
    from bitwright.train.optimizers import SGD, Adam, AdamW, Lion
    from bitwright.train.qat.config import QatConfig
    from bitwright.train.qat.convert import convert_qat
    from bitwright.train.qat.prepare import prepare_qat
    from bitwright.train.trainer import Trainer
    from bitwright.tuning.error_ledger import ledger
    from bitwright.tuning.kernel_tuning import tune_kernels
    from bitwright.tuning.precision.search import tune

__version__ = "0.1.0"

__all__ = [
    "SGD", "Adam", "AdamW", "BitwrightError", "Builder", "CastConfiguration", "Executable",
    "Graph", "Hardware", "LanguageModel", "Lion", "Observer", "QatConfig", "QuantConfig",
    "QuantParams", "QuantizationSystem", "QuantizedTensor", "ReportData", "Trainer", "Workload",
    "__version__", "add_lora", "advise", "apply_precision", "bench", "bench_suite", "calibrate",
    "check_file",
    "compare", "compile", "convert", "convert_qat", "diff", "dtype", "export_onnx",
    "from_torch", "generate", "grad", "hardware", "hvp", "jvp", "ledger", "load", "load_lora",
    "load_parameters", "merge_lora", "nn", "parse", "prepare_qat", "profile", "quant",
    "quantize", "quantize_tensor", "recalibrate", "register_custom", "remove_lora", "save_lora",
    "to_text", "train", "tune", "tune_kernels", "unmerge_lora", "verify", "verify_file",
    "write_report",
]  # fmt: skip

_HOME = {
    "Adam": "bitwright.train.optimizers",
    "AdamW": "bitwright.train.optimizers",
    "BitwrightError": "bitwright.errors",
    "Builder": "bitwright.ops.core.builder",
    "CastConfiguration": "bitwright.quant.tensor.cast_configuration",
    "Executable": "bitwright.executable",
    "Graph": "bitwright.ir",
    "Hardware": "bitwright.machine.facts",
    "LanguageModel": "bitwright.llm.language_model",
    "Lion": "bitwright.train.optimizers",
    "Observer": "bitwright.quant.tensor.observer",
    "QatConfig": "bitwright.train.qat.config",
    "QuantConfig": "bitwright.quant.model.config",
    "QuantParams": "bitwright.ir.quant_params",
    "QuantizationSystem": "bitwright.quant.tensor.system",
    "QuantizedTensor": "bitwright.quant.tensor.tensor",
    "ReportData": "bitwright.report.html.data",
    "SGD": "bitwright.train.optimizers",
    "Trainer": "bitwright.train.trainer",
    "Workload": "bitwright.quant.tensor.workload",
    "add_lora": "bitwright.train.lora.add",
    "advise": "bitwright.report.advice",
    "apply_precision": "bitwright.passes.precision.apply",
    "bench": "bitwright.report.bench",
    "bench_suite": "bitwright.report.suite.run",
    "calibrate": "bitwright.quant.calibration.calibrate",
    "check_file": "bitwright.deploy.checking",
    "compare": "bitwright.report.compare",
    "compile": "bitwright.compiler",
    "convert": "bitwright.quant.model.convert",
    "convert_qat": "bitwright.train.qat.convert",
    "diff": "bitwright.report.differences",
    "dtype": "bitwright.ir",
    "export_onnx": "bitwright.export.onnx",
    "from_torch": "bitwright.frontend.torch",
    "generate": "bitwright.llm.generation.generate",
    "grad": "bitwright.autodiff.grad",
    "hardware": "bitwright.machine.facts",
    "hvp": "bitwright.autodiff.forward",
    "jvp": "bitwright.autodiff.forward",
    "ledger": "bitwright.tuning.error_ledger",
    "load": "bitwright.frontend.load",
    "load_lora": "bitwright.train.lora.file",
    "load_parameters": "bitwright.frontend.parameters",
    "merge_lora": "bitwright.train.lora.merge",
    "nn": "bitwright",
    "parse": "bitwright.ir",
    "prepare_qat": "bitwright.train.qat.prepare",
    "profile": "bitwright.report.profile",
    "quant": "bitwright",
    "quantize": "bitwright.quant.model.quantize",
    "quantize_tensor": "bitwright.quant.tensor.observer",
    "recalibrate": "bitwright.drift.recalibration",
    "register_custom": "bitwright.ops.control.custom",
    "remove_lora": "bitwright.train.lora.merge",
    "save_lora": "bitwright.train.lora.file",
    "to_text": "bitwright.ir",
    "train": "bitwright",
    "tune": "bitwright.tuning.precision.search",
    "tune_kernels": "bitwright.tuning.kernel_tuning",
    "unmerge_lora": "bitwright.train.lora.merge",
    "verify": "bitwright.ops.core.check",
    "verify_file": "bitwright.proof.verification",
    "write_report": "bitwright.report.html.assemble",
}

if not TYPE_CHECKING:  # otherwise a type checker would accept any name
    __getattr__, __dir__ = lazy_names(__name__, _HOME)
