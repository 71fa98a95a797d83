"""Ops that bring values into a graph: inputs, parameters, constants and state."""

from __future__ import annotations

from typing import Any

from bitwright.errors import GraphError
from bitwright.ops.core.opdef import Attr, Kind, NonDifferentiable, OpDef, Sample


def _refuse_inference(**_: Any) -> Any:
    raise GraphError("a boundary value has a declared type")


def _given(**attrs: Any) -> Any:
    return attrs["value"]


def _boundary(name: str, doc: str, **attrs: Attr) -> OpDef:
    infer, samples = _refuse_inference, list[Sample]
    return OpDef(name, Kind.BOUNDARY, "", infer, _given, samples, _LEAF, attrs, doc=doc)


_LEAF = NonDifferentiable("a leaf of the graph; gradients end here")
_VALUE = Attr("array", None)
OPDEFS = [
    _boundary("input", "A value given at run time."),
    _boundary("parameter", "A named, trainable array.", value=_VALUE, trainable=Attr("bool", True)),
    _boundary("constant", "An array known at compile time.", value=Attr("array")),
    _boundary("state", "A named array that lives across runs.", value=_VALUE),
]
