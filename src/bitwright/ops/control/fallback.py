"""Fallback for ONNX nodes without an op here: onnx's reference implementation runs the node.

The attribute `proto` is the base64 text of the serialized NodeProto. Operands are the inputs of the
node, then the outer values that its bodies read, named in `captures`. Operands and results may be
opaque (sequences, optionals), which only this op and control flow accept.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import GraphProto, NodeProto, ValueInfoProto, defs, helper

from bitwright.errors import InferenceError, RunError
from bitwright.ir.parser import parse_type
from bitwright.ir.types import TensorType, ValueType
from bitwright.ops.core.opdef import Attr, Kind, NonDifferentiable, OpDef, Sample, draw, sample
from bitwright.warn import warn_once

if TYPE_CHECKING:
    from onnx.reference import ReferenceEvaluator


def encode_node(node: NodeProto) -> str:
    """The attribute `proto` of a node."""
    return base64.b64encode(node.SerializeToString()).decode("ascii")


@lru_cache(maxsize=256)
def decode_node(proto: str) -> NodeProto:
    try:
        node = NodeProto()
        node.ParseFromString(base64.b64decode(proto, validate=True))
        return node
    except (binascii.Error, DecodeError) as error:
        raise InferenceError(f"'proto' does not hold an ONNX node: {error}") from None


@lru_cache(maxsize=256)
def evaluator(proto: str, domain: str, version: int) -> ReferenceEvaluator:
    """The evaluator of the node; raises onnx's error if onnx has no implementation of it."""
    from onnx.reference import ReferenceEvaluator  # slow to import, and few models need it

    node = decode_node(proto)
    # with named outputs, onnx decides at run time what depends on operand types
    outputs = [ValueInfoProto(name=name) for name in node.output if name]
    graph = GraphProto(name=node.op_type, node=[node], output=outputs)
    opsets = {"": defs.onnx_opset_version(), domain: version}
    return ReferenceEvaluator(graph, opsets=opsets)


def _name(op_type: str, domain: str) -> str:
    return f"{domain}.{op_type}" if domain else op_type


def _infer(
    *operands: ValueType | None,
    op_type: str,
    domain: str,
    proto: str,
    types: Sequence[str],
    captures: Sequence[str],
    **_: Any,
) -> tuple[ValueType, ...]:
    node = decode_node(proto)
    if node.op_type != op_type:
        raise InferenceError("'proto' holds another op", expected=op_type, found=node.op_type)
    results = sum(bool(name) for name in node.output)
    if len(types) != results:
        raise InferenceError(
            f"{_name(op_type, domain)} has another number of results than types",
            expected=results,
            found=len(types),
        )
    places = len(node.input) + len(captures)
    if len(operands) > places:
        raise InferenceError("has too many operands", expected=places, found=len(operands))
    return tuple(parse_type(text) for text in types)


def _reference(
    *operands: Any,
    op_type: str,
    domain: str,
    version: int,
    proto: str,
    types: Sequence[str],
    captures: Sequence[str],
) -> tuple[Any, ...]:
    name = _name(op_type, domain)
    warn_once(
        f"ONNX op {name}",
        "there is no kernel for it; onnx's reference implementation computes it, which is slow",
    )
    names = [*decode_node(proto).input, *captures]
    feeds = {given: value for given, value in zip(names, operands, strict=False) if given}
    feeds |= {given: None for given in names[len(operands) :] if given}
    try:
        results = evaluator(proto, domain, version).run(None, feeds)
    except Exception as error:  # onnx raises many kinds
        raise RunError(f"onnx's reference implementation of {name} fails: {error}") from error
    return tuple(
        np.asarray(result) if isinstance(parse_type(text), TensorType) else result
        for result, text in zip(results, types, strict=True)
    )


def _step(*operands: Any, node: NodeProto, types: list[str]) -> Sample:
    return sample(
        *operands, op_type=node.op_type, domain="", version=21, proto=encode_node(node), types=types
    )


def _samples() -> list[Sample]:
    words = np.array(["half", "a", ""], object), np.array(["way", "part", "y"], object)
    scale = helper.make_node("Celu", ["x"], ["y"], alpha=0.5)
    top = helper.make_node("TopK", ["x", "k"], ["values", "indices"], axis=1)
    return [
        _step(draw(3, 4), node=scale, types=["f32[3, 4]"]),
        _step(draw(3, 4), np.array([2]), node=top, types=["f32[3, 2]", "i64[3, 2]"]),
        _step(
            *words, node=helper.make_node("StringConcat", ["x", "y"], ["z"]), types=["string[3]"]
        ),
        _step(
            draw(3, 4),
            None,
            draw(seed=1),
            node=helper.make_node("Clip", ["x", "", "high"], ["y"]),
            types=["f32[3, 4]"],
        ),
    ]


OPDEFS = [
    OpDef(
        "fallback",
        Kind.COMPUTE,
        "xs*",
        infer=_infer,
        reference=_reference,
        grad=NonDifferentiable("it is computed outside the compiler"),
        samples=_samples,
        is_foldable=False,
        fixed_types=True,
        attrs={
            "op_type": Attr("str"),
            "domain": Attr("str", ""),
            "version": Attr("int"),
            "proto": Attr("str"),
            "types": Attr("strs"),
            "captures": Attr("strs", ()),
        },
        doc="An ONNX node (proto) of an opset version, run by onnx; types are its result types.",
    )
]
