"""Converts scopes to protos: nodes, initializers and types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, ValueInfoProto, helper

from bitwright.export.onnx.schemas import schema_at
from bitwright.export.onnx.scope import Array, Function, Ref, Scope, Session, Step
from bitwright.export.onnx.tensors import complete
from bitwright.frontend.onnx.regions import DOMAIN
from bitwright.frontend.onnx.tensor import DATA_TYPES
from bitwright.frontend.onnx.valuetypes import type_proto
from bitwright.ir import DType, TensorType


class Body:
    """A scope with its inputs and outputs: the model's graph, or a graph attribute."""

    def __init__(self, scope: Scope, name: str, inputs: list[Ref], outputs: list[Ref]) -> None:
        self.scope, self.name, self.inputs, self.outputs = scope, name, inputs, outputs


def graph_proto(body: Body, initializers: bool = True) -> GraphProto:
    """The graph; without `initializers` the caller adds them."""
    proto = GraphProto(name=body.name or "graph")
    proto.input.extend(value_info(ref) for ref in body.inputs)
    proto.output.extend(value_info(ref) for ref in body.outputs)
    proto.node.extend(node_proto(step, body.scope.opset) for step in body.scope.steps)
    if initializers:
        proto.initializer.extend(
            complete(ref.name, array) for ref, array in body.scope.initializers.items()
        )
    ends = {ref.name for ref in (*body.inputs, *body.outputs)}
    for step in body.scope.steps:
        typed = [r for r in step.outputs if isinstance(r.type, TensorType) and r.name not in ends]
        proto.value_info.extend(value_info(ref) for ref in typed)
    return proto


def model_proto(
    graph: GraphProto, session: Session, metadata: Mapping[str, str], version: str
) -> ModelProto:
    """The model of a graph, with the lowest IR version of its opset."""
    model = ModelProto(graph=graph, producer_name="bitwright", producer_version=version)
    domains = {"": session.opset, **session.domains}
    if session.functions:
        domains[DOMAIN] = 1
    for domain, number in domains.items():
        model.opset_import.append(helper.make_opsetid(domain, number))
    standard = helper.make_opsetid("", session.opset)
    model.ir_version = max(
        helper.find_min_ir_version_for([standard]), 8 if session.functions else 0
    )
    model.functions.extend(function_proto(f, session.opset) for f in session.functions.values())
    for key, text in metadata.items():
        model.metadata_props.append(onnx.StringStringEntryProto(key=key, value=text))
    return model


def function_proto(function: Function, opset: int) -> onnx.FunctionProto:
    body = function.body
    nodes = [
        helper.make_node("Constant", [], [ref.name], value=complete("", array))
        for ref, array in body.initializers.items()
    ]
    nodes += [node_proto(step, opset) for step in body.steps]
    return helper.make_function(
        DOMAIN,
        function.name,
        [ref.name for ref in function.inputs],
        [ref.name for ref in function.outputs],
        nodes,
        [helper.make_opsetid("", opset)],
        list(function.attributes),
    )


def node_proto(step: Step, opset: int) -> NodeProto:
    proto = NodeProto(op_type=step.op_type, domain=step.domain, name=step.name)
    named = iter(step.outputs)
    if step.proto is None:
        proto.output.extend(ref.name for ref in named)
    else:  # absent outputs of the original node stay absent
        proto.CopyFrom(step.proto)
        proto.name = step.name
        del proto.input[:]
        proto.output[:] = [next(named).name if name else "" for name in proto.output]
    proto.input.extend("" if ref is None else ref.name for ref in step.inputs)
    schema = schema_at(step.op_type, opset) if not step.domain else None
    for name, value in step.attrs.items():
        declared = schema.attributes[name] if schema else None
        proto.attribute.append(attribute_proto(name, value, declared))
    return proto


def attribute_proto(name: str, value: Any, declared: int | None) -> AttributeProto:
    if isinstance(value, Body):
        return AttributeProto(name=name, type=AttributeProto.GRAPH, g=graph_proto(value))
    if isinstance(value, DType):
        value = DATA_TYPES[value.name] if declared == AttributeProto.INT else value.name
    elif isinstance(value, bool):
        value = int(value)
    elif isinstance(value, tuple):
        value = list(value)
    elif hasattr(value, "ndim"):
        value = complete("", value)
    return helper.make_attribute(name, value, attr_type=declared)


def value_info(ref: Ref) -> ValueInfoProto:
    assert ref.type is not None
    return ValueInfoProto(name=ref.name, type=type_proto(ref.type))


def initializer_items(body: Body) -> list[tuple[str, Array]]:
    return [(ref.name, array) for ref, array in body.scope.initializers.items()]
