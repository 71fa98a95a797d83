"""Cuts an ONNX model into layers, each of which is a model of its own.

A layer is one node that computes, the dequantization of its operands and constant nodes before it,
and the activation, rescaling and quantization after it: what a runtime fuses stays together. Nodes
before it are copied into every layer that reads them, so that no layer has to be observed inside.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from bitwright.frontend.onnx import regions
from bitwright.frontend.onnx.importer import Importer
from bitwright.frontend.onnx.read import ModelFile
from bitwright.frontend.onnx.tensor import DATA_TYPES
from bitwright.ir.arrays import Array
from bitwright.ir.dtype import dtype
from bitwright.ir.types import TensorType
from bitwright.proof.digests import tensor_bytes

COPIED = ("DequantizeLinear", "DynamicQuantizeLinear")
"""Nodes that belong to their readers."""
FOLLOWERS = (
    *("QuantizeLinear", "Cast", "Relu", "Clip", "LeakyRelu", "Sigmoid", "HardSigmoid"),
    *("HardSwish", "Mul", "Add", "Sub", "Div", "Round"),
)
"""Nodes that join the layer which computes their input, if nothing else reads it."""
_RANDOM = ("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli")


@dataclass
class CutLayer:
    """Nodes in order, the values that they read and those that others read."""

    name: str
    op: str
    nodes: list[int] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    constants: list[str] = field(default_factory=list)


class LayeredModel:
    """The layers of a model in the order that they run in."""

    def __init__(self, file: ModelFile) -> None:
        self.file, self.graph = file, file.proto.graph
        self._tensors = {t.name: i for i, t in enumerate(self.graph.initializer)}
        self._reads = [list(_reads(node)) for node in self.graph.node]
        self._uses = Counter(name for names in self._reads for name in names)
        self._uses.update(info.name for info in self.graph.output)
        self._producer = {
            name: i for i, node in enumerate(self.graph.node) for name in node.output if name
        }
        self._constant: set[int] = set()
        self._copied: set[int] = set()
        self._home: dict[int, CutLayer] = {}
        self.layers: list[CutLayer] = []
        self._cut()
        self._connect()

    def _cut(self) -> None:
        results = {info.name for info in self.graph.output}
        for index, node in enumerate(self.graph.node):
            makers = [self._producer[name] for name in self._reads[index] if name in self._producer]
            dynamic = [name for name in self._reads[index] if not self._is_constant(name)]
            is_result = bool(results & set(node.output))
            if not dynamic and node.op_type not in _RANDOM and not is_result:
                self._constant.add(index)
            elif self._is_copied(node, makers) and not is_result:
                self._copied.add(index)
            else:
                homes = {id(self._home[m]): self._home[m] for m in makers if m in self._home}
                joined = [name for name in dynamic if self._producer.get(name, -1) in self._home]
                others = [n for n in dynamic if self._producer.get(n, -1) not in self._copied]
                if (
                    node.op_type in FOLLOWERS
                    and len(homes) == 1
                    and len(joined) == len(others)
                    and all(self._uses[name] == 1 and name not in results for name in joined)
                ):
                    layer = next(iter(homes.values()))
                else:
                    layer = CutLayer(node.name or node.output[0], node.op_type)
                    self.layers.append(layer)
                layer.nodes.append(index)
                self._home[index] = layer

    def _is_constant(self, name: str) -> bool:
        return name in self._tensors or self._producer.get(name, -1) in self._constant

    def _is_copied(self, node: NodeProto, makers: list[int]) -> bool:
        """Whether the node belongs to its readers: it dequantizes, or scales a dynamic scale."""
        if node.op_type in COPIED:
            return True
        dynamic = [m for m in makers if m not in self._constant]
        return (
            node.op_type == "Mul"
            and bool(dynamic)
            and len(dynamic) == len([n for n in node.input if not self._is_constant(n)])
            and all(self.graph.node[m].op_type == "DynamicQuantizeLinear" for m in dynamic)
        )

    def _connect(self) -> None:
        """Add the copied nodes, and find the inputs, outputs and constants of every layer."""
        results = [info.name for info in self.graph.output]
        readers: dict[str, set[int]] = {}
        for layer in self.layers:
            layer.nodes = self._with_copies(layer.nodes)
            made = {name for i in layer.nodes for name in self.graph.node[i].output}
            names = list(dict.fromkeys(n for i in layer.nodes for n in self._reads[i]))
            layer.constants = [name for name in names if name in self._tensors]
            layer.inputs = [n for n in names if n not in made and n not in self._tensors]
            for name in layer.inputs:
                readers.setdefault(name, set()).add(id(layer))
        for layer in self.layers:
            own = [i for i in layer.nodes if self._home.get(i) is layer]
            made_here = [n for i in own for n in self.graph.node[i].output if n]
            layer.outputs = [n for n in made_here if n in readers or n in results]
            if not layer.outputs:
                layer.outputs = made_here[-1:]

    def _with_copies(self, indices: Iterable[int]) -> list[int]:
        found: set[int] = set()
        left = list(indices)
        while left:
            index = left.pop()
            if index in found:
                continue
            found.add(index)
            for name in self._reads[index]:
                maker = self._producer.get(name, -1)
                if maker in self._constant or maker in self._copied:
                    left.append(maker)
        return sorted(found)

    def readers(self) -> Counter[str]:
        """How many layers read each value."""
        return Counter(name for layer in self.layers for name in layer.inputs)

    def tensor(self, name: str) -> TensorProto | None:
        """An initializer with its data, or None."""
        index = self._tensors.get(name)
        if index is None:
            return None
        given: TensorProto = self.graph.initializer[index]
        if index not in self.file.weights and given.data_location == TensorProto.DEFAULT:
            return given
        made = TensorProto(name=given.name, data_type=given.data_type, dims=given.dims)
        made.raw_data = bytes(tensor_bytes(self.file, index, given))
        return made

    def tensor_type(self, name: str) -> int:
        """The ONNX element type of an initializer; 0 if there is none of this name."""
        index = self._tensors.get(name)
        return 0 if index is None else self.graph.initializer[index].data_type

    def largest_constant(self, layer: CutLayer) -> str:
        """The name of the largest constant of a layer with more than one axis, or ""."""
        sizes = {
            name: math.prod(self.graph.initializer[self._tensors[name]].dims)
            for name in layer.constants
            if len(self.graph.initializer[self._tensors[name]].dims) > 1
        }
        return max(sizes, key=lambda name: sizes[name], default="")

    @cached_property
    def _types(self) -> dict[str, ValueInfoProto]:
        """The types in the file, and those that the importer infers for other values.

        Symbolic sizes stay symbolic, because runtimes fuse less where a size is unknown.
        """
        declared = [*self.graph.input, *self.graph.value_info, *self.graph.output]
        found = {info.name: info for info in declared if info.type.tensor_type.HasField("shape")}
        plain = ModelProto()
        plain.CopyFrom(self.file.proto)
        plain.ClearField("metadata_props")
        file = replace(self.file, proto=plain)
        for name, value in Importer(file).graph().values.items():
            if name not in found and isinstance(value.type, TensorType):
                sizes = [_size(size) for size in value.shape]
                element = DATA_TYPES[value.dtype.name]
                found[name] = helper.make_tensor_value_info(name, element, sizes)
        return found

    def _declared(self, name: str, array: Array) -> ValueInfoProto:
        info = self._types.get(name)
        element = DATA_TYPES[dtype(array.dtype).name]
        if info is None or info.type.tensor_type.elem_type != element:
            return _info(name, array)
        return info

    def model(
        self,
        layer: CutLayer,
        feeds: Mapping[str, Array],
        results: Mapping[str, Array] | None = None,
    ) -> ModelProto:
        """The layer as a model: with the sizes of these arrays, or, for another runtime that is to
        return results like these, with the sizes that the file declares."""
        if results is None:
            inputs = [_info(name, feeds[name]) for name in layer.inputs]
            outputs = [ValueInfoProto(name=name) for name in layer.outputs]
        else:
            inputs = [self._declared(name, feeds[name]) for name in layer.inputs]
            outputs = [self._declared(name, results[name]) for name in layer.outputs]
        graph = GraphProto(
            name="layer",
            node=[self.graph.node[i] for i in layer.nodes],
            input=inputs,
            output=outputs,
            initializer=[t for t in map(self.tensor, layer.constants) if t is not None],
        )
        source = self.file.proto
        return ModelProto(
            ir_version=source.ir_version,
            opset_import=source.opset_import,
            functions=source.functions,
            producer_name="bitwright",
            graph=graph,
        )


def _size(size: Any) -> int | str | None:
    """A size for ONNX: a number, the name of a free size, or None."""
    if isinstance(size, int):
        return size
    names = [symbol.name for symbol in getattr(size, "symbols", ())]
    return names[0] if names == [str(size)] else None


def _info(name: str, array: Array) -> ValueInfoProto:
    element = DATA_TYPES[dtype(array.dtype).name]
    return helper.make_tensor_value_info(name, element, list(array.shape))


def _reads(node: NodeProto) -> Iterator[str]:
    """The names that a node and its bodies read from the graph around it."""
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        bodies = [attribute.g] if attribute.HasField("g") else list(attribute.graphs)
        for body in bodies:
            for inner in regions.graphs(body):
                made = _made(body)
                yield from (n for item in inner.node for n in item.input if n and n not in made)
                yield from (o.name for o in inner.output if o.name not in made)


def _made(graph: GraphProto) -> set[str]:
    """Every name that a body and the bodies in it define."""
    found: set[str] = set()
    for inner in regions.graphs(graph):
        found.update(name for node in inner.node for name in node.output)
        found.update(info.name for info in inner.input)
        found.update(tensor.name for tensor in inner.initializer)
    return found
