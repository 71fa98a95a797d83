"""ONNX schemas: the types, operands and attributes of ops in each opset.

Every node is checked against the schema of the target opset before it is emitted. If only a later
opset allows it, that opset is the lowest for the model.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from onnx import defs

from bitwright.ir.dtype import DTYPES, DType
from bitwright.ir.types import OpaqueType, TensorType, ValueType

LEAST_OPSET = 13
NEWEST_OPSET = defs.onnx_opset_version()
READ_OPSET = 26
"""The newest opset that current runtimes read. If an op takes an element type only in later opsets,
it is computed in a wider type."""

_WORDS = {"f64": "double", "f32": "float", "f16": "float16", "bf16": "bfloat16", "bool": "bool"}
_WORDS |= {"c64": "complex64", "c128": "complex128", "string": "string"}


def _spelled(element: DType) -> str:
    """The tensor type in schemas: `tensor(float8e4m3fn)`."""
    if element.name in _WORDS:
        word = _WORDS[element.name]
    elif element.is_integer:
        word = f"{'int' if element.is_signed else 'uint'}{element.bits}"
    else:
        word = f"float{element.name[1:]}"
    return f"tensor({word})"


SPELLED = {element: _spelled(element) for element in DTYPES.values()}
_ELEMENTS = {text: element for element, text in SPELLED.items()}

# The opset of the IR version that introduced the element type.
_LEAST_FOR_TYPE = {
    "f8e4m3fn": 19, "f8e5m2": 19, "f8e4m3fnuz": 19, "f8e5m2fnuz": 19, "i4": 21, "u4": 21,
    "f4e2m1": 23, "f8e8m0": 24, "i2": 25, "u2": 25,
}  # fmt: skip


def spelled(type_: ValueType | DType | None) -> str:
    """The type in schemas; "" if it is not known."""
    if isinstance(type_, DType):
        return SPELLED[type_]
    if isinstance(type_, TensorType):
        return SPELLED[type_.dtype]
    if not isinstance(type_, OpaqueType):
        return ""
    text = re.sub(r"(\w+)\[[^]]*\]", r"tensor(\1)", type_.kind)
    return re.sub(r"tensor\((\w+)\)", lambda match: SPELLED[DTYPES[match[1]]], text)


def least_opset_for_type(element: DType) -> int:
    return _LEAST_FOR_TYPE.get(element.name, LEAST_OPSET)


@dataclass(frozen=True)
class Parameter:
    """A declared operand or result of an op."""

    name: str
    variable: str
    """The type variable, or the only type."""
    types: frozenset[str]
    binds: bool
    """Whether all operands of the variable have the same type; those of Loop and If need not."""


@dataclass(frozen=True)
class Schema:
    """One version of an ONNX op."""

    since: int
    deprecated: bool
    inputs: tuple[Parameter, ...]
    outputs: tuple[Parameter, ...]
    variadic: bool
    attributes: Mapping[str, int]
    """The `AttributeProto.AttributeType` of each attribute."""

    def operand(self, position: int) -> Parameter | None:
        if position < len(self.inputs):
            return self.inputs[position]
        return self.inputs[-1] if self.variadic else None

    def misfit(
        self, inputs: Sequence[str], attrs: Iterable[str], outputs: Sequence[str] = ()
    ) -> str:
        """The reason why a node does not fit, or ""; an empty type is not checked."""
        for name in attrs:
            if name not in self.attributes:
                return f"has no attribute {name!r}"
        bound: dict[str, str] = {}
        for position, found in enumerate(inputs):
            declared = self.operand(position)
            if declared is None:
                return f"takes at most {len(self.inputs)} operands"
            if not found:
                continue
            together = bound.setdefault(declared.variable, found) if declared.binds else found
            if found not in declared.types:
                return f"takes no {found} as {declared.name!r}"
            if together != found:
                return f"takes no {found} as {declared.name!r} with {together}"
        for position, found in enumerate(outputs):
            declared = self.outputs[min(position, len(self.outputs) - 1)]
            if found and found not in declared.types:
                return f"takes no {found} as its result"
        return ""

    def result(self, inputs: Sequence[DType | None], index: int) -> DType | None:
        """The element type of a result if the operands determine it, else None."""
        declared_result = self.outputs[min(index, len(self.outputs) - 1)]
        if len(declared_result.types) == 1:
            return _ELEMENTS.get(next(iter(declared_result.types)))
        variable = declared_result.variable
        for position, element in enumerate(inputs):
            declared = self.operand(position)
            if element is not None and declared and declared.variable == variable:
                return element
        return None


def _read(schema: Any) -> Schema:  # a defs.OpSchema, whose stub is incomplete
    def read(parameters: Sequence[Any]) -> tuple[Parameter, ...]:
        return tuple(
            Parameter(p.name, p.type_str, frozenset(p.types), p.is_homogeneous) for p in parameters
        )

    variadic = defs.OpSchema.FormalParameterOption.Variadic
    return Schema(
        schema.since_version,
        schema.deprecated,
        read(schema.inputs),
        read(schema.outputs),
        bool(schema.inputs) and schema.inputs[-1].option == variadic,
        {name: attribute.type.value for name, attribute in schema.attributes.items()},
    )


@cache
def _names() -> Mapping[tuple[str, str], list[defs.OpSchema]]:
    found: dict[tuple[str, str], list[defs.OpSchema]] = defaultdict(list)
    for schema in defs.get_all_schemas_with_history():
        found[schema.domain, schema.name].append(schema)
    return found


@cache
def versions_of(op_type: str, domain: str = "") -> tuple[Schema, ...]:
    """Every version of an op, oldest first."""
    found = map(_read, _names().get((domain, op_type), []))
    return tuple(sorted(found, key=lambda schema: schema.since))


@cache
def schema_at(op_type: str, opset: int, domain: str = "") -> Schema | None:
    """The version of an op in an opset."""
    in_force = [schema for schema in versions_of(op_type, domain) if schema.since <= opset]
    return in_force[-1] if in_force and not in_force[-1].deprecated else None
