"""Imports nodes without a mapping as calls of ONNX's reference implementation.

Result types come from ONNX's shape inference on the node, or from the declarations in the file.
Only these fallbacks and control flow take sequences, optionals and tensors of unknown rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import onnx
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, TypeProto
from onnx.checker import ValidationError
from onnx.shape_inference import InferenceError as OnnxInferenceError

from bitwright.errors import UnsupportedError
from bitwright.frontend.onnx.functions import resolved, schema_of
from bitwright.frontend.onnx.node import OnnxNode
from bitwright.frontend.onnx.tensor import DATA_TYPES
from bitwright.frontend.onnx.valuetypes import inferred_type, type_proto, value_type
from bitwright.ir import UNKNOWN, OpaqueType, TensorType, Value, ValueType
from bitwright.ops.control.fallback import encode_node, evaluator

if TYPE_CHECKING:
    from bitwright.frontend.onnx.context import Context, Inputs

_MAX_CONSTANT = 1 << 12


def fallback_call(ctx: Context, node: OnnxNode, inputs: Inputs, reason: str) -> list[Value | None]:
    """The results of the fallback, in the order of the node's outputs."""
    proto = resolved(node, ctx.scope)
    encoded = encode_node(proto)
    if not _can_run(node, encoded):
        why = reason or "it has no mapping, and onnx has no reference implementation of it"
        raise UnsupportedError(f"is not supported: {why}", where=node.where)
    captured = [(name, ctx.find(name)) for name in outer_names(proto)]
    captures = [(name, value) for name, value in captured if value is not None]
    named = [name for name in proto.output if name]
    types = _result_types(ctx, node, proto, inputs)
    operands = [*inputs, *([None] * (len(proto.input) - len(inputs)))]
    attrs = {
        "op_type": node.op_type,
        "domain": node.domain,
        "version": node.version,
        "proto": encoded,
        "types": [str(_with_names(ctx, types[name])) for name in named],
        "captures": [name for name, _ in captures],
    }
    made = ctx.b.node("fallback", [*operands, *(v for _, v in captures)], attrs, []).outputs
    values = dict(zip(named, made, strict=True))
    return [values.get(name) for name in proto.output]


def _can_run(node: OnnxNode, encoded: str) -> bool:
    if schema_of(node.op_type, node.version, node.domain) is None:
        return False
    try:
        evaluator(encoded, node.domain, node.version)
    except Exception:  # onnx raises exceptions without a common base
        return False
    return True


def outer_names(node: NodeProto) -> list[str]:
    """The names that the node's bodies read and do not define."""
    found: dict[str, None] = {}
    for attribute in node.attribute:
        for graph in _graphs(attribute):
            found.update(dict.fromkeys(_free_names(graph, frozenset())))
    return list(found)


def _graphs(attribute: AttributeProto) -> Iterator[GraphProto]:
    if attribute.type == AttributeProto.GRAPH:
        yield attribute.g
    yield from attribute.graphs


def _free_names(graph: GraphProto, defined: frozenset[str]) -> Iterator[str]:
    inner = set(defined)
    inner.update(info.name for info in graph.input)
    inner.update(tensor.name for tensor in graph.initializer)
    inner.update(sparse.values.name for sparse in graph.sparse_initializer)
    for node in graph.node:
        yield from (name for name in node.input if name and name not in inner)
        for attribute in node.attribute:
            for body in _graphs(attribute):
                yield from _free_names(body, frozenset(inner))
        inner.update(node.output)
    yield from (info.name for info in graph.output if info.name not in inner)


def _result_types(
    ctx: Context, node: OnnxNode, proto: NodeProto, inputs: Inputs
) -> dict[str, ValueType]:
    inferred = _onnx_inference(ctx, node, proto, inputs)
    found: dict[str, ValueType] = {}
    for name in filter(None, proto.output):
        type_ = inferred_type(inferred.get(name), node.where)
        declared = ctx.scope.declared.get(name)
        is_open = not isinstance(type_, TensorType)
        if is_open and declared is not None and declared.WhichOneof("value") is not None:
            type_ = value_type(declared, None, name, node.where)
        found[name] = type_
    return found


def _onnx_inference(
    ctx: Context, node: OnnxNode, proto: NodeProto, inputs: Inputs
) -> dict[str, TypeProto]:
    schema = schema_of(node.op_type, node.version, node.domain)
    assert schema is not None  # `_can_run` has checked
    types: dict[str, TypeProto] = {}
    data: dict[str, TensorProto] = {}
    for name, value in zip(proto.input, inputs, strict=False):
        if value is None:
            continue
        types[name] = type_proto(value.type)
        array = None if isinstance(value.type, OpaqueType) else ctx.array(value)
        if array is not None and array.size <= _MAX_CONSTANT and array.dtype != object:
            data[name] = onnx.helper.make_tensor(
                name, DATA_TYPES[value.dtype.name], array.shape, array.tobytes(), raw=True
            )
    opsets = [onnx.helper.make_opsetid(d, v) for d, v in ctx.scope.opsets.items()]
    try:
        return onnx.shape_inference.infer_node_outputs(
            schema, proto, types, data, opset_imports=opsets
        )
    except (OnnxInferenceError, ValidationError, RuntimeError, TypeError, ValueError):
        return {}


def _with_names(ctx: Context, type_: ValueType) -> ValueType:
    if not isinstance(type_, TensorType):
        return type_
    names = ctx.importer.names
    known = {s.name for s in ctx.frame.known_symbols}
    sizes = []
    for size in type_.shape:
        unknown = size is UNKNOWN or not {s.name for s in getattr(size, "symbols", ())} <= known
        sizes.append(names.fresh("data") if unknown else size)
    return type_.with_shape(sizes)
