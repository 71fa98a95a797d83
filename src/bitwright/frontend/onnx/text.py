"""Checks that all names in a model are valid UTF-8.

Protobuf returns other strings as bytes. One check after parsing lets all other modules assume str.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

from bitwright.errors import ImportModelError


def check_text(model: ModelProto, where: str) -> None:
    """Raise unless every name in the model is a str."""
    for owner, names in _named(model):
        try:
            "".join(names)
        except TypeError:
            raise ImportModelError(
                f"a name in {owner} is not valid UTF-8", where=where, hint="The file is damaged."
            ) from None


def _named(model: ModelProto) -> Iterator[tuple[str, Iterable[str]]]:
    yield "the model", (model.producer_name, model.producer_version, model.domain, model.doc_string)
    for entry in model.opset_import:
        yield "the opsets", (entry.domain,)
    for prop in model.metadata_props:
        yield "the metadata", (prop.key, prop.value)
    for function in model.functions:
        yield from _in_function(function)
    yield from _in_graph(model.graph)


def _in_function(function: FunctionProto) -> Iterator[tuple[str, Iterable[str]]]:
    names = (function.name, function.domain, function.overload)
    yield "a function", (*names, *function.input, *function.output, *function.attribute)
    for entry in function.opset_import:
        yield "a function", (entry.domain,)
    for node in function.node:
        yield from _in_node(node)


def _in_graph(graph: GraphProto) -> Iterator[tuple[str, Iterable[str]]]:
    yield "a graph", (graph.name, graph.doc_string)
    for info in (*graph.input, *graph.output, *graph.value_info):
        yield from _in_value(info)
    for tensor in graph.initializer:
        yield from _in_tensor(tensor)
    for sparse in graph.sparse_initializer:
        yield from _in_tensor(sparse.values)
        yield from _in_tensor(sparse.indices)
    for node in graph.node:
        yield from _in_node(node)


def _in_value(info: ValueInfoProto) -> Iterator[tuple[str, Iterable[str]]]:
    yield "a value", (info.name, *(dim.dim_param for dim in info.type.tensor_type.shape.dim))


def _in_tensor(tensor: TensorProto) -> Iterator[tuple[str, Iterable[str]]]:
    yield "a tensor", (tensor.name,)
    for entry in tensor.external_data:
        yield "external data", (entry.key, entry.value)


def _in_node(node: NodeProto) -> Iterator[tuple[str, Iterable[str]]]:
    yield "a node", (node.name, node.op_type, node.domain, node.overload)
    yield "a node", (*node.input, *node.output)
    for attribute in node.attribute:
        yield "an attribute", (attribute.name, attribute.ref_attr_name)
        if attribute.HasField("t"):
            yield from _in_tensor(attribute.t)
        if attribute.HasField("g"):
            yield from _in_graph(attribute.g)
        for graph in attribute.graphs:
            yield from _in_graph(graph)
