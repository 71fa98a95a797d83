"""bitwright as an ONNX backend, for ONNX's official test runner.

onnx.backend.test.BackendTest(bitwright.onnx_backend.Backend, __name__)
"""

from __future__ import annotations

from typing import Any

from onnx import ModelProto, NodeProto, helper
from onnx.backend.base import Backend as OnnxBackend
from onnx.backend.base import BackendRep, namedtupledict

from bitwright.executable import Executable
from bitwright.frontend.onnx import load
from bitwright.ops.core.interpret import run
from bitwright.pipeline import compile_graph


class Prepared(BackendRep):
    """A compiled model."""

    def __init__(self, executable: Executable) -> None:
        self.executable = executable

    def run(self, inputs: Any, **_: Any) -> tuple[Any, ...]:
        """Outputs in the model's order, from inputs in order or by name."""
        names = self.executable.input_names
        feeds = dict(inputs) if isinstance(inputs, dict) else dict(zip(names, inputs, strict=True))
        results = self.executable.run(feeds)
        return tuple(namedtupledict("Outputs", list(results))(*results.values()))


class Backend(OnnxBackend):
    @classmethod
    def prepare(cls, model: ModelProto, device: str = "CPU", **_: Any) -> Prepared:
        return Prepared(compile_graph(load(model)))

    @classmethod
    def run_model(cls, model: ModelProto, inputs: Any, device: str = "CPU", **_: Any) -> Any:
        return cls.prepare(model, device).run(inputs)

    @classmethod
    def run_node(
        cls,
        node: NodeProto,
        inputs: Any,
        device: str = "CPU",
        outputs_info: Any = None,
        **options: Any,
    ) -> tuple[Any, ...]:
        """Run a single node; its types come from the input arrays."""
        names = [name for name in node.input if name]
        feeds = dict(inputs) if isinstance(inputs, dict) else dict(zip(names, inputs, strict=True))
        infos = [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
            )
            for name, array in feeds.items()
        ]
        results = [helper.make_empty_tensor_value_info(name) for name in node.output if name]
        graph = helper.make_graph([node], "node", infos, results)
        opsets = (
            [helper.make_opsetid(node.domain, options["opset"])] if "opset" in options else None
        )
        model = helper.make_model(graph, opset_imports=opsets)
        return tuple(run(load(model), feeds).values())

    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device.split(":", maxsplit=1)[0] == "CPU"


prepare = Backend.prepare
run_model = Backend.run_model
run_node = Backend.run_node
supports_device = Backend.supports_device
