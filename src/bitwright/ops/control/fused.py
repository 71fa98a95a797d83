"""A region of nodes that one kernel computes: `fused(xs*) {body}`.

The body is a graph of ordinary ops whose inputs are the operands. The reference runs the body, so
fusion does not change results.
"""

from __future__ import annotations

import numpy as np

from bitwright.errors import InferenceError
from bitwright.ir.edit import replace_inputs
from bitwright.ir.graph import Graph, Value
from bitwright.ir.types import ValueType
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.opdef import Attr, Kind, OpDef, Sample, sample
from bitwright.ops.core.reverse import composed


def _infer(*types: ValueType, body: Graph) -> tuple[ValueType, ...]:
    inputs = [value.type for value in body.inputs]
    if list(types) != inputs:
        raise InferenceError(
            "the operands are not what the body takes", expected=inputs, found=list(types)
        )
    return tuple(value.type for _, value in body.outputs)


def _inline(b: Builder, *operands: Value, body: Graph) -> tuple[Value, ...]:
    """The nodes of the body on the operands."""
    replaced = dict(zip(body.inputs, operands, strict=True))
    for node in body.nodes:
        if node.op != "input":
            names = tuple(b.fresh_name(name) for name in node.names)
            made = b.append(replace_inputs(node, replaced).with_(names=names))
            replaced.update(zip(node.outputs, made.outputs, strict=True))
    return tuple(replaced[value] for _, value in body.outputs)


def _samples() -> list[Sample]:
    b = Builder("body")
    x, y = b.input("x", "f32[2, 3]"), b.input("y", "f32[3]")
    body = b.build(b.mul(b.sub(x, y), 2.0))
    return [sample(np.ones((2, 3), np.float32), np.arange(3, dtype=np.float32), body=body)]


OPDEFS = [
    OpDef(
        "fused",
        Kind.COMPUTE,
        "xs*",
        infer=_infer,
        reference=lambda *xs, body: body(*xs),
        grad=composed(_inline),
        samples=_samples,
        fixed_types=True,
        attrs={"body": Attr("graph")},
        doc="The nodes of `body`, computed by one kernel.",
    )
]
