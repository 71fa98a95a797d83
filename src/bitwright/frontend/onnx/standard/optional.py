"""Optional values: a present one is the value itself; others use the interpreter fallback."""

from __future__ import annotations

from bitwright.frontend.onnx.api import Context, Inputs, OnnxNode, Results, UnmappedError, imports
from bitwright.ir import OpaqueType, Value


def _may_be_absent(value: Value) -> bool:
    return isinstance(value.type, OpaqueType) and value.type.kind.startswith("optional")


@imports("Optional")
def optional(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    if inputs[0] is None:
        raise UnmappedError("the optional has no value")
    return [inputs[0]]


@imports("OptionalGetElement")
def optional_get_element(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    if _may_be_absent(inputs[0]):
        raise UnmappedError("whether the optional has a value is not known")
    return [inputs[0]]


@imports("OptionalHasElement")
def optional_has_element(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x = inputs[0]
    if x is not None and _may_be_absent(x):
        raise UnmappedError("whether the optional has a value is not known")
    return ctx.const(x is not None, "bool")
