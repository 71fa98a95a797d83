"""Converts TypeProto to value types and back; ONNX's named sizes become symbols.

Sequences, optionals, maps and tensors of unknown rank are `OpaqueType`s, whose kind is the type as
text: `seq(f32[2,_])`, `optional(tensor(i64))`, `map(string,f32[])`. An underscore is an open size.
"""

from __future__ import annotations

import re

from onnx import TypeProto

from bitwright.errors import BitwrightError, ImportModelError
from bitwright.frontend.onnx.tensor import DATA_TYPES, MAX_RANK, element_type
from bitwright.ir import Dim, OpaqueType, Size, TensorType, ValueType, parse_size, symbol
from bitwright.ir.dim import FUNCTIONS, RESERVED, UNKNOWN
from bitwright.ir.dtype import DTYPES

_EXPRESSION = re.compile(r"[A-Za-z0-9_.+\-*/() ]{1,200}\Z")
_MAX_NESTING = 16


class SymbolNames:
    """Assigns one symbol with a valid, unique name to each named size of a model."""

    def __init__(self) -> None:
        self._by_text: dict[str, Size] = {}
        self._taken: set[str] = set()

    @property
    def taken(self) -> frozenset[str]:
        return frozenset(self._taken)

    def named(self, text: str) -> Size:
        """The size that `text` names; it may be an expression of names."""
        if text not in self._by_text:
            size = self._expression(text)
            self._by_text[text] = self.fresh(text) if size is None else size
        return self._by_text[text]

    def _expression(self, text: str) -> Dim | None:
        if not _EXPRESSION.match(text) or re.fullmatch(r"[\w.]+", text):
            return None
        try:
            size = parse_size(text)
        except BitwrightError:
            return None
        if not isinstance(size, Dim) or size is UNKNOWN:
            return None
        self._by_text.update({s.name: symbol(s.name) for s in size.symbols})
        self._taken |= {s.name for s in size.symbols}
        return size

    def fresh(self, hint: str) -> Dim:
        stem = re.sub(r"[^A-Za-z0-9_.]", "_", hint)[:100].strip(".")
        if not re.match(r"[A-Za-z_]", stem) or stem in RESERVED | FUNCTIONS:
            stem = f"_{stem}"
        name, number = stem, 0
        while name in self._taken:
            number += 1
            name = f"{stem}_{number}"
        self._taken.add(name)
        return symbol(name)


def value_type(proto: TypeProto, names: SymbolNames | None, what: str, where: str) -> ValueType:
    """The declared type. Unnamed sizes are named after `what`; without `names` they are unknown."""
    if proto.WhichOneof("value") != "tensor_type":
        return OpaqueType(_kind(proto, where, 0))
    tensor = proto.tensor_type
    element = element_type(tensor.elem_type, where)
    if not tensor.HasField("shape"):
        return OpaqueType(f"tensor({element})")
    if len(tensor.shape.dim) > MAX_RANK:
        raise ImportModelError(f"has rank {len(tensor.shape.dim)}", where=where)
    sizes: list[Size] = []
    for axis, dim in enumerate(tensor.shape.dim):
        if dim.HasField("dim_value") and dim.dim_value >= 0:
            sizes.append(dim.dim_value)
        elif names is None:
            sizes.append(UNKNOWN)
        elif re.search(r"\w", dim.dim_param):
            sizes.append(names.named(dim.dim_param))
        else:
            sizes.append(names.fresh(f"{what}_dim{axis}"))
    return TensorType(element, tuple(sizes))


def _kind(proto: TypeProto, where: str, depth: int) -> str:
    if depth > _MAX_NESTING:
        raise ImportModelError("its type is nested too deeply", where=where)
    which = proto.WhichOneof("value")
    if which == "tensor_type":
        tensor = proto.tensor_type
        element = element_type(tensor.elem_type, where)
        if not tensor.HasField("shape"):
            return f"tensor({element})"
        dims = [str(d.dim_value) if d.HasField("dim_value") else "_" for d in tensor.shape.dim]
        return f"{element}[{','.join(dims)}]"
    if which == "sequence_type":
        return f"seq({_kind(proto.sequence_type.elem_type, where, depth + 1)})"
    if which == "optional_type":
        return f"optional({_kind(proto.optional_type.elem_type, where, depth + 1)})"
    if which == "map_type":
        key = element_type(proto.map_type.key_type, where)
        return f"map({key},{_kind(proto.map_type.value_type, where, depth + 1)})"
    raise ImportModelError("its type is not declared or not known", where=where, found=which)


def type_proto(type_: ValueType) -> TypeProto:
    """The type as a TypeProto."""
    if isinstance(type_, OpaqueType):
        return _kind_proto(type_.kind)
    proto = TypeProto()
    proto.tensor_type.elem_type = DATA_TYPES[type_.dtype.name]
    proto.tensor_type.shape.SetInParent()
    for size in type_.shape:
        dim = proto.tensor_type.shape.dim.add()
        if isinstance(size, Dim):
            dim.dim_param = str(size)
        else:
            dim.dim_value = size
    return proto


def _kind_proto(kind: str) -> TypeProto:
    proto = TypeProto()
    if match := re.fullmatch(r"seq\((.*)\)", kind):
        proto.sequence_type.elem_type.CopyFrom(_kind_proto(match[1]))
    elif match := re.fullmatch(r"optional\((.*)\)", kind):
        proto.optional_type.elem_type.CopyFrom(_kind_proto(match[1]))
    elif match := re.fullmatch(r"map\((\w+),(.*)\)", kind):
        proto.map_type.key_type = DATA_TYPES[DTYPES[match[1]].name]
        proto.map_type.value_type.CopyFrom(_kind_proto(match[2]))
    elif match := re.fullmatch(r"tensor\((\w+)\)", kind):
        proto.tensor_type.elem_type = DATA_TYPES[match[1]]
    elif match := re.fullmatch(r"(\w+)\[(.*)\]", kind):
        proto.tensor_type.elem_type = DATA_TYPES[match[1]]
        proto.tensor_type.shape.SetInParent()
        for text in filter(None, match[2].split(",")):
            dim = proto.tensor_type.shape.dim.add()
            if text.isdigit():
                dim.dim_value = int(text)
    return proto


def inferred_type(proto: TypeProto | None, where: str) -> ValueType:
    """A type that ONNX's inference returned; names of symbols are parsed."""
    if proto is None or proto.WhichOneof("value") is None:
        return OpaqueType("unknown")
    type_ = value_type(proto, None, "", where)
    if not isinstance(type_, TensorType):
        return type_
    sizes: list[Size] = []
    for size, dim in zip(type_.shape, proto.tensor_type.shape.dim, strict=True):
        sizes.append(_parse_symbol(dim.dim_param) if size is UNKNOWN else size)
    return type_.with_shape(sizes)


def _parse_symbol(text: str) -> Size:
    if not text or text.startswith("unk__"):
        return UNKNOWN
    try:
        return parse_size(text)
    except BitwrightError:
        return UNKNOWN
