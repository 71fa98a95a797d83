"""Interpreter fallbacks and custom ops, written back as the original nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnx import AttributeProto, GraphProto, NodeProto

from bitwright.export.onnx.mapping import exports
from bitwright.export.onnx.schemas import schema_at
from bitwright.export.onnx.scope import Ref, Scope, Session, Step
from bitwright.ir.parser import parse_type
from bitwright.ir.types import TensorType
from bitwright.ops.control.custom import custom_attributes
from bitwright.ops.control.fallback import decode_node

CUSTOM_DOMAIN = "bitwright.custom"


@exports("host", widens=False)
def host(
    e: Scope,
    *operands: Ref | None,
    op_type: str,
    domain: str,
    version: int,
    proto: str,
    types: Sequence[str],
    captures: Sequence[str],
) -> tuple[Ref, ...]:
    node = NodeProto()
    node.CopyFrom(decode_node(proto))
    _check_version(e, node, version)
    if domain:
        e.session.domains[domain] = max(version, e.session.domains.get(domain, 1))
    places = len(node.input)
    outer = dict(zip(captures, operands[places:], strict=True))
    rename_bodies(node, {name: ref.name for name, ref in outer.items() if ref}, e.session)
    results = []
    for text in types:
        type_ = parse_type(text)
        results.append(Ref(type_.dtype if isinstance(type_, TensorType) else None, type=type_))
    e.steps.append(Step(op_type, list(operands[:places]), results, {}, domain, proto=node))
    return tuple(results)


def _check_version(e: Scope, node: NodeProto, version: int) -> None:
    """Raise if the opset has other versions of the op, or of an op in its bodies."""
    if node.domain in ("", "ai.onnx"):
        written, chosen = schema_at(node.op_type, version), schema_at(node.op_type, e.opset)
        if written is not None and (chosen is None or chosen.since < written.since):
            e.needs(written.since, f"ONNX {node.op_type} is of a later version before")
        if written is not None and chosen is not None and chosen.since > written.since:
            raise e.reject(
                f"the node is {node.op_type} of opset {version}, which opset {chosen.since} changed"
            )
    for attribute in node.attribute:
        for graph in _graphs(attribute):
            for inner in graph.node:
                _check_version(e, inner, version)


def _graphs(attribute: AttributeProto) -> list[GraphProto]:
    own = [attribute.g] if attribute.type == AttributeProto.GRAPH else []
    return [*own, *attribute.graphs]


def rename_bodies(node: NodeProto, names: Mapping[str, str], session: Session) -> None:
    """Rename the values in a node's bodies to be unique; `names` are the outer names."""
    for attribute in node.attribute:
        for graph in _graphs(attribute):
            _rename(graph, dict(names), session)


def _rename(graph: GraphProto, names: dict[str, str], session: Session) -> None:
    def fresh(name: str) -> str:
        if name:
            names[name] = session.unique(name)
        return names.get(name, "")

    for info in graph.input:
        info.name = fresh(info.name)
    for tensor in graph.initializer:
        tensor.name = names[tensor.name] if tensor.name in names else fresh(tensor.name)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        rename_bodies(node, names, session)
        node.output[:] = [fresh(name) for name in node.output]
        node.name = session.unique(node.name or node.op_type)
    for info in (*graph.output, *graph.value_info):
        info.name = names.get(info.name, info.name)


@exports("custom", widens=False)
def custom(e: Scope, *operands: Ref | None, function: str, attributes: str) -> tuple[Ref, ...]:
    """`acme.scale` is the op `scale` of the domain `acme`."""
    assert e.node is not None
    domain, _, op_type = function.rpartition(".")
    domain = domain or CUSTOM_DOMAIN
    attrs = custom_attributes(e.node)
    for name, value in attrs.items():
        if not _is_plain(value):
            raise e.reject(f"attribute {name!r} is {value!r}, which no ONNX attribute holds")
    e.session.domains.setdefault(domain, 1)
    results = [Ref(t.dtype if isinstance(t, TensorType) else None) for t in e.node.types]
    e.steps.append(Step(op_type, list(operands), results, attrs, domain))
    return tuple(results)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return len({type(item) for item in value}) == 1 and all(map(_is_plain, value))
    return isinstance(value, (int, float, str))
