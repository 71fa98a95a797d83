"""What an installed runtime really does with each node, to compare predictions with.

ONNX Runtime   the optimized model (extended level): the kernel that a node became, by its name,
               by the name of its result or of what follows, or by its weight
OpenVINO       the runtime model: the primitive that computes the node
"""

from __future__ import annotations

import importlib
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
from onnx import NodeProto

from bitwright.deploy.checking import check_file
from bitwright.deploy.onnxruntime_rules import INTEGER
from bitwright.deploy.view import GraphView, Verdict
from bitwright.proof.runtimes import require_runtime

PACKAGES = {"onnxruntime-cpu": "onnxruntime", "openvino": "openvino"}
FOLLOWED = 5
"""Nodes after a product whose results are looked up."""
UNKNOWN = "not found"
OPERATORS = ("", "ai.onnx", "com.microsoft")


@dataclass
class Agreement:
    """Predictions that a runtime confirms, and those that it does not."""

    target: str
    nodes: int = 0
    agreed: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[Verdict, str]] = field(default_factory=list)
    """The prediction, and what the runtime does."""

    def __str__(self) -> str:
        share = f"{self.agreed / self.nodes:.1%}" if self.nodes else "nothing to compare"
        return f"{self.target}: {self.agreed} of {self.nodes} nodes as predicted ({share})"


def compare_with_runtime(path: str | Path, target: str) -> Agreement:
    """Compare the prediction for each node with what the installed runtime does."""
    require_runtime(PACKAGES.get(target, target))
    view = GraphView(path)
    (found,) = check_file(path, target)
    kernels = (OnnxRuntimeKernels if target == "onnxruntime-cpu" else OpenVinoKernels)(path)
    nodes = {view.title(node): node for node in view.nodes}
    result = Agreement(target)
    for verdict in found.verdicts:
        if kernels.refusal:
            actual, agrees = "rejected", not found.is_ok and "rejected" in found.counts
        else:
            actual = kernels.kernel(view, nodes[verdict.node])
            is_integer = kernels.is_integer(actual)
            agrees = verdict.status != "rejected" and is_integer == (verdict.status != "fallback")
        result.nodes += 1
        result.agreed += agrees
        result.statuses[verdict.status] += 1
        if not agrees:
            result.wrong.append((verdict, actual))
    return result


class OnnxRuntimeKernels:
    """The nodes of the model that ONNX Runtime optimized."""

    def __init__(self, path: str | Path) -> None:
        runtime: Any = importlib.import_module("onnxruntime")
        self.refusal = ""
        self._by_name: dict[str, str] = {}
        self._by_output: dict[str, str] = {}
        self._by_constant: dict[str, set[str]] = {}
        options = runtime.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "optimized.onnx"
            options.optimized_model_filepath = str(file)
            try:
                runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            except Exception as error:  # whatever the package raises
                self.refusal = str(error)
                return
            graph = onnx.load(file, load_external_data=False).graph
        for node in graph.node:
            self._by_name[node.name] = node.op_type
            self._by_output.update(dict.fromkeys(node.output, node.op_type))
            for name in node.input:
                self._by_constant.setdefault(name, set()).add(node.op_type)

    def kernel(self, view: GraphView, node: NodeProto) -> str:
        if node.domain not in OPERATORS:  # a function, which was inlined
            return self._reader(node)
        if node.name and node.name in self._by_name:
            return self._by_name[node.name]
        merged = (op for name, op in self._by_name.items() if name.startswith(f"{node.name}/"))
        if node.name and (found := next(merged, "")):
            return found
        for name in results_after(view, node):
            if name in self._by_output:
                return self._by_output[name]
        return self._reader(node)

    def _reader(self, node: NodeProto) -> str:
        """The integer kernel that reads an operand of a node."""
        readers = {op for name in node.input for op in self._by_constant.get(name, ())}
        return next((op for op in sorted(readers) if op in INTEGER), UNKNOWN)

    def is_integer(self, kernel: str) -> bool:
        return kernel in INTEGER


class OpenVinoKernels:
    """The primitives of the model that OpenVINO compiled for the CPU."""

    def __init__(self, path: str | Path) -> None:
        runtime: Any = importlib.import_module("openvino")
        self.refusal = ""
        self._by_layer: dict[str, str] = {}
        core = runtime.Core()
        try:
            compiled = core.compile_model(core.read_model(str(path)), "CPU")
        except Exception as error:  # whatever the package raises
            self.refusal = str(error)
            return
        for op in compiled.get_runtime_model().get_ordered_ops():
            facts = op.get_rt_info()
            names, primitive = (
                facts[key].astype(str) if key in facts else ""
                for key in ("originalLayersNames", "primitiveType")
            )
            for name in names.split(","):
                self._by_layer.setdefault(name, primitive)

    def kernel(self, view: GraphView, node: NodeProto) -> str:
        first, *rest = results_after(view, node)
        for name in (first, node.name, *rest):
            for layer in (name, f"{name}/WithoutBiases"):
                if layer in self._by_layer:
                    return self._by_layer[layer]
        return UNKNOWN

    def is_integer(self, kernel: str) -> bool:
        return "i8" in kernel.lower()


def results_after(view: GraphView, node: NodeProto) -> list[str]:
    """The names of a node's result and of the results of the nodes that alone read it."""
    names = [node.output[0]]
    for _ in range(FOLLOWED):
        readers = view.consumers(names[-1])
        if len(readers) != 1:
            break
        names.append(readers[0].output[0])
    return names
