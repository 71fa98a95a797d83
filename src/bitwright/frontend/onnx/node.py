"""One ONNX node, with its attributes as Python values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onnx import AttributeProto, GraphProto, NodeProto

from bitwright.errors import ImportModelError
from bitwright.frontend.onnx.read import ModelFile
from bitwright.frontend.onnx.tensor import read_sparse, read_tensor
from bitwright.ir.naming import in_module

SCOPES = "pkg.torch.onnx.name_scopes"
_SCOPE = re.compile(r"'([^']*)'")
_REPEATED = {
    AttributeProto.INTS: "ints",
    AttributeProto.FLOATS: "floats",
    AttributeProto.GRAPHS: "graphs",
    AttributeProto.TYPE_PROTOS: "type_protos",
}


def normal_domain(domain: str) -> str:
    """The domain, with one spelling of the default domain."""
    return "" if domain == "ai.onnx" else domain


def require_text(*names: Any) -> None:
    """Raise if a name is bytes: protobuf returns them for strings that are not UTF-8."""
    for name in names:
        if not isinstance(name, str):
            raise ImportModelError("a name in the model is not valid UTF-8", found=repr(name))


def _module(proto: NodeProto) -> str:
    """The PyTorch module in the metadata of a node, or ""."""
    for entry in proto.metadata_props:
        if entry.key == SCOPES and isinstance(entry.value, str):
            found = _SCOPE.findall(entry.value)  # ['', 'layers', 'layers.0', 'linear']
            return str(found[-2]) if len(found) > 1 else ""
    return ""


@dataclass(frozen=True)
class OnnxNode:
    proto: NodeProto
    version: int
    """The opset version of the node's domain."""
    attrs: Mapping[str, Any]

    @property
    def op_type(self) -> str:
        return self.proto.op_type

    @property
    def domain(self) -> str:
        return normal_domain(self.proto.domain)

    @property
    def loc(self) -> str:
        return in_module(f"{self.op_type} {self.proto.name}".strip(), _module(self.proto))

    @property
    def where(self) -> str:
        """The description of the node in error messages."""
        outputs = ", ".join(map(str, self.proto.output))
        name = f" {self.proto.name!r}" if self.proto.name else ""
        return f"{self.domain + '.' if self.domain else ''}{self.op_type}{name} -> {outputs!r}"

    def has_output(self, index: int) -> bool:
        """Whether this output is present."""
        return index < len(self.proto.output) and bool(self.proto.output[index])

    def get(self, name: str, default: Any = None) -> Any:
        value = self.attrs.get(name)
        return default if value is None else value

    def require(self, name: str) -> Any:
        if self.attrs.get(name) is None:
            raise ImportModelError(f"attribute {name!r} is missing", where=self.where)
        return self.attrs[name]

    def _typed(self, name: str, default: Any, kinds: tuple[type, ...], expected: str) -> Any:
        value = self.get(name, default)
        if value is not default and not isinstance(value, kinds):
            raise ImportModelError(
                f"attribute {name!r} has the wrong kind of value",
                where=self.where,
                expected=expected,
                found=type(value).__name__,
            )
        return value

    def integer(self, name: str, default: Any = None) -> Any:
        return self._typed(name, default, (int,), "an integer")

    def number(self, name: str, default: Any = None) -> Any:
        return self._typed(name, default, (float,), "a float")

    def text(self, name: str, default: Any = None) -> Any:
        return self._typed(name, default, (str,), "a string")

    def flag(self, name: str, default: int = 0) -> bool:
        return bool(self.integer(name, default))

    def items(self, name: str, default: Any = None) -> Any:
        return self._typed(name, default, (list,), "a list")

    def graph(self, name: str) -> GraphProto:
        self.require(name)
        graph: GraphProto = self._typed(name, None, (GraphProto,), "a graph")
        return graph


def read_attributes(
    proto: NodeProto, file: ModelFile | None, bound: Mapping[str, AttributeProto]
) -> dict[str, Any]:
    """Attributes by name; references to function attributes take the caller's values."""
    found: dict[str, Any] = {}
    for attribute in proto.attribute:
        source = attribute
        if attribute.ref_attr_name:
            if attribute.ref_attr_name not in bound:
                continue
            source = bound[attribute.ref_attr_name]
        found[attribute.name] = read_attribute(source, file, proto.op_type)
    return found


def read_attribute(attribute: AttributeProto, file: ModelFile | None, op_type: str) -> Any:
    where = f"attribute {attribute.name!r} of {op_type}"
    kind = attribute.type
    if kind == AttributeProto.INT:
        return int(attribute.i)
    if kind == AttributeProto.FLOAT:
        return float(attribute.f)
    if kind == AttributeProto.STRING:
        return _text(attribute.s)
    if kind == AttributeProto.STRINGS:
        return [_text(s) for s in attribute.strings]
    if kind == AttributeProto.TENSOR:
        return read_tensor(attribute.t, file)
    if kind == AttributeProto.TENSORS:
        return [read_tensor(t, file) for t in attribute.tensors]
    if kind == AttributeProto.SPARSE_TENSOR:
        return read_sparse(attribute.sparse_tensor, file)
    if kind == AttributeProto.GRAPH:
        return attribute.g
    if kind == AttributeProto.TYPE_PROTO:
        return attribute.tp
    if kind in _REPEATED:
        return list(getattr(attribute, _REPEATED[kind]))
    raise ImportModelError(f"has the unknown type {kind}", where=where)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
