"""The functions that nodes call: those of the model, and those that ONNX schemas define."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from onnx import FunctionProto, ModelProto, NodeProto, TypeProto, defs, helper
from onnx.defs import OpSchema, SchemaError

from bitwright.errors import ImportModelError
from bitwright.frontend.onnx.frame import Scope
from bitwright.frontend.onnx.node import OnnxNode, normal_domain
from bitwright.frontend.onnx.valuetypes import type_proto

Key = tuple[str, str, str]


def functions_by_name(model: ModelProto) -> dict[Key, FunctionProto]:
    found: dict[Key, FunctionProto] = {}
    for function in model.functions:
        key = (normal_domain(function.domain), function.name, function.overload)
        if key in found:
            raise ImportModelError(f"function {function.name!r} is defined twice")
        found[key] = function
    return found


@lru_cache(4096)
def schema_of(op_type: str, version: int, domain: str) -> OpSchema | None:
    """The ONNX schema of an op at this opset version, if there is one."""
    try:
        return defs.get_schema(op_type, version, domain)
    except (SchemaError, TypeError):
        return None


def check_arity(node: OnnxNode) -> None:
    """Raise if required operands of an ONNX op are missing or there are too many."""
    newest = defs.onnx_opset_version()
    schema = schema_of(node.op_type, node.version, node.domain)
    schema = schema or schema_of(node.op_type, newest, node.domain)
    if schema is None:
        return
    names = node.proto.input
    if not schema.min_input <= len(names) <= schema.max_input:
        raise ImportModelError(
            "has the wrong number of inputs",
            where=node.where,
            expected=f"{schema.min_input} to {schema.max_input}",
            found=len(names),
        )
    for index, name in enumerate(names):
        formal = schema.inputs[min(index, len(schema.inputs) - 1)]
        if not name and formal.option != OpSchema.FormalParameterOption.Optional:
            raise ImportModelError(f"input {formal.name!r} is missing", where=node.where)


def from_schema(node: OnnxNode, inputs: list[Any], scope: Scope) -> FunctionProto | None:
    """The function body in the ONNX schema of the op, if there is one."""
    schema: Any = schema_of(node.op_type, node.version, node.domain)  # its stub is incomplete
    if schema is None or not (schema.has_function or schema.has_context_dependent_function):
        return None
    version = scope.opsets.get("", node.version)
    if schema.has_function:
        fitting = [v for v in schema.function_opset_versions if v <= version]
        if fitting:
            body = schema.get_function_with_opset_version(max(fitting))
            return _complete(body, schema, version)
    fitting = [v for v in schema.context_dependent_function_opset_versions if v <= version]
    if not fitting:
        return None
    types = [TypeProto() if v is None else type_proto(v.type) for v in inputs]
    body = schema.get_context_dependent_function_with_opset_version(
        max(fitting),
        resolved(node, scope).SerializeToString(),
        [t.SerializeToString() for t in types],
    )
    return _complete(body, schema, version) if body else None


def _complete(body: bytes, schema: OpSchema, version: int) -> FunctionProto:
    """The function with an opset import and the schema's attribute defaults."""
    function = FunctionProto()
    function.ParseFromString(body)
    if not any(not normal_domain(entry.domain) for entry in function.opset_import):
        function.opset_import.append(helper.make_opsetid("", version))
    given = {attribute.name for attribute in function.attribute_proto}
    for name, attribute in schema.attributes.items():
        if attribute.default_value.name and name not in given:
            function.attribute_proto.append(attribute.default_value)
    return function


def resolved(node: OnnxNode, scope: Scope) -> NodeProto:
    """The node with references to attributes of the enclosing function resolved."""
    copy = NodeProto()
    copy.CopyFrom(node.proto)
    del copy.attribute[:]
    for attribute in node.proto.attribute:
        if not attribute.ref_attr_name:
            copy.attribute.append(attribute)
        elif attribute.ref_attr_name in scope.bound:
            bound = copy.attribute.add()
            bound.CopyFrom(scope.bound[attribute.ref_attr_name])
            bound.name = attribute.name
    return copy
