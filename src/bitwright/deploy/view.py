"""An ONNX graph with the lookups that the rules of runtimes need."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper

from bitwright.errors import BitwrightError
from bitwright.frontend.onnx.importer import Importer
from bitwright.frontend.onnx.read import ModelFile, read_model
from bitwright.frontend.onnx.tensor import read_tensor
from bitwright.ir.arrays import Array
from bitwright.ir.types import TensorType

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
U8, I8 = TensorProto.UINT8, TensorProto.INT8
SMALL = 1 << 16
"""Constants are read up to this number of elements, except weights of products."""


@dataclass(frozen=True)
class Verdict:
    """What a target does with one node."""

    node: str
    op: str
    status: str
    """"fused": an integer kernel; "fallback": dequantized, then float; "unsafe": an integer kernel
    that can give wrong results on some processors; "rejected": the target does not load it."""
    kernel: str = ""
    reason: str = ""
    fix: str = ""


class GraphView:
    """The main graph of a model file."""

    def __init__(self, model: str | Path | ModelProto) -> None:
        self.file: ModelFile = read_model(model)
        self.proto, self.graph = self.file.proto, self.file.proto.graph
        self.nodes = list(self.graph.node)
        self._index = {t.name: i for i, t in enumerate(self.graph.initializer)}
        self._made = {name: node for node in self.nodes for name in node.output if name}
        self._read: dict[str, list[NodeProto]] = defaultdict(list)
        for node in self.nodes:
            for name in node.input:
                if name:
                    self._read[name].append(node)
        self.outputs = {info.name for info in self.graph.output}

    def producer(self, name: str) -> NodeProto | None:
        return self._made.get(name)

    def consumers(self, name: str) -> list[NodeProto]:
        """The nodes that read a value, once for each time that they read it."""
        return self._read.get(name, [])

    def is_constant(self, name: str) -> bool:
        node = self._made.get(name)
        return name in self._index or (node is not None and node.op_type == "Constant")

    def tensor(self, name: str) -> TensorProto | None:
        """The initializer or Constant of this name; large raw data may be missing."""
        if name in self._index:
            found: TensorProto = self.graph.initializer[self._index[name]]
            return found
        node = self._made.get(name)
        if node is not None and node.op_type == "Constant":
            return next((a.t for a in node.attribute if a.name == "value"), None)
        return None

    def array(self, name: str) -> Array | None:
        """The values of a constant, or None."""
        tensor = self.tensor(name)
        if tensor is None:
            return None
        weight = self.file.weights.get(self._index[name]) if name in self._index else None
        return read_tensor(tensor, self.file, weight)

    def element(self, name: str) -> int:
        """The ONNX element type of a value; 0 if it is not known."""
        tensor = self.tensor(name)
        if tensor is not None:
            return tensor.data_type
        node = self._made.get(name)
        if node is not None and node.op_type == QUANTIZE:
            given = attribute(node, "output_dtype", 0)
            if len(node.input) > 2 and node.input[2]:
                return self.element(node.input[2])
            return int(given) or U8
        if node is not None and node.op_type == "DynamicQuantizeLinear":
            return U8 if name == node.output[0] or name == node.output[2] else TensorProto.FLOAT
        for info in (*self.graph.input, *self.graph.value_info, *self.graph.output):
            if info.name == name:
                return int(info.type.tensor_type.elem_type)
        return 0

    @cached_property
    def _types(self) -> dict[str, Any]:
        plain = ModelProto()
        plain.CopyFrom(self.proto)
        plain.ClearField("metadata_props")
        try:
            graph = Importer(ModelFile(plain, self.file.folder, self.file.weights)).graph()
        except BitwrightError:
            return {}
        return {n: v.type for n, v in graph.values.items() if isinstance(v.type, TensorType)}

    def shape(self, name: str) -> tuple[Any, ...] | None:
        """Sizes (numbers, or symbolic ones) of a value; None if they are not known."""
        tensor = self.tensor(name)
        if tensor is not None:
            return tuple(tensor.dims)
        found = self._types.get(name)
        return None if found is None else tuple(found.shape)

    def dequantized(self, name: str) -> NodeProto | None:
        """The DequantizeLinear that makes a value."""
        node = self._made.get(name)
        return node if node is not None and node.op_type == DEQUANTIZE else None

    def is_scalar(self, name: str) -> bool:
        tensor = self.tensor(name)
        return tensor is not None and int(np.prod(tensor.dims or [1])) == 1

    def title(self, node: NodeProto) -> str:
        return node.name or (node.output[0] if node.output else node.op_type)


REFUSED = tuple(
    getattr(TensorProto, name)
    for name in ("FLOAT8E8M0", "FLOAT4E2M1")
    if hasattr(TensorProto, name)
)
"""Element types that neither ONNX Runtime 1.31 nor OpenVINO 2026.4 dequantizes."""


def why_type_is_refused(view: GraphView, node: NodeProto) -> str:
    """Why a dequantization is not loaded by either runtime; empty if it is."""
    if node.op_type != DEQUANTIZE:
        return ""
    types = {view.element(name) for name in node.input if name}
    names = [TensorProto.DataType.Name(kind) for kind in sorted(types & set(REFUSED))]
    return f"{names[0]} cannot be dequantized" if names else ""


def attribute(node: NodeProto, name: str, default: Any = None) -> Any:
    """The value of an attribute, or the default."""
    found = next((a for a in node.attribute if a.name == name), None)
    return default if found is None else helper.get_attribute_value(found)
