"""Custom ops: registered by name, run by the user's function.

    register_custom("acme.scale", infer=lambda x, factor: x, reference=lambda x, factor: x * factor)
    y = custom(b, "acme.scale", x, factor=2.0)

`infer(*types, **attributes)` and `reference(*arrays, **attributes)` are as in an `OpDef`, except
that results must have exactly the element types that `infer` returned. Attributes are JSON values.
A graph stores the name and the attributes, not the functions: register the op again before you load
the graph.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.errors import GraphError, RunError
from bitwright.ir.graph import Node, Value, nearest
from bitwright.ir.types import TensorType, ValueType
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.opdef import Attr, Kind, OpDef, Sample, draw, sample


@dataclass(frozen=True)
class CustomOp:
    name: str
    infer: Callable[..., Any]
    reference: Callable[..., Any]
    grad: Callable[..., Any] | None = None
    """As in an `OpDef`: (builder, node, output gradients) to the operands' gradients."""
    lowering: Callable[..., Any] | None = None
    """Called by a backend to make a kernel; without one, the interpreter runs the reference."""


_registered: dict[str, CustomOp] = {}


def register_custom(
    name: str,
    infer: Callable[..., Any],
    reference: Callable[..., Any],
    grad: Callable[..., Any] | None = None,
    lowering: Callable[..., Any] | None = None,
    *,
    replace: bool = False,
) -> CustomOp:
    """Register the functions of a custom op."""
    if name in _registered and not replace:
        raise GraphError(
            f"a custom op is named {name!r} already", hint="Say replace=True to put another there."
        )
    _registered[name] = CustomOp(name, infer, reference, grad, lowering)
    return _registered[name]


def find_custom(name: str) -> CustomOp:
    if name not in _registered:
        raise GraphError(
            f"no custom op is named {name!r}",
            expected=", ".join(map(repr, _registered)) or "one that is registered",
            hint=nearest(name, _registered) or "Call register_custom before the graph is used.",
        )
    return _registered[name]


def custom(b: Builder, name: str, *operands: Value | None, **attributes: Any) -> Any:
    """A node that calls the custom op `name`."""
    try:
        text = json.dumps(attributes, sort_keys=True)
    except TypeError as error:
        raise GraphError(f"attributes of custom op {name!r} are not plain: {error}") from None
    return b.op("custom", *operands, function=name, attributes=text)


def custom_attributes(node: Node) -> dict[str, Any]:
    """The user's attributes of a custom node."""
    return _attributes(node.attrs["attributes"])


def _attributes(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise GraphError("'attributes' is not a JSON object", found=repr(text))
    return found


def _infer(*types: ValueType | None, function: str, attributes: str) -> Any:
    return find_custom(function).infer(*types, **_attributes(attributes))


def _reference(*arrays: Any, function: str, attributes: str) -> Any:
    return find_custom(function).reference(*arrays, **_attributes(attributes))


def check_custom(node: Node, results: tuple[Any, ...], where: str) -> None:
    """Raise a `RunError` unless the results have the types that the op's `infer` declared.

    The interpreter rounds results of built-in references, which compute in wider types. It does not
    convert results of custom ops.
    """
    name = node.attrs["function"]
    if len(results) != len(node.outputs):
        raise RunError(
            f"custom op {name!r} gave another number of results than it declared",
            where=where,
            expected=len(node.outputs),
            found=len(results),
        )
    for value, result in zip(node.outputs, results, strict=True):
        type_ = value.type
        if not isinstance(type_, TensorType):
            continue
        found = np.asarray(result).dtype
        if found != type_.dtype.numpy:
            raise RunError(
                f"custom op {name!r} gave a result of another element type than it declared",
                where=where,
                expected=f"{type_.dtype} for {value}",
                found=str(found),
                hint="Convert the result with .astype, or declare another type in `infer`.",
            )


def _grad(b: Builder, node: Node, dys: list[Value]) -> Any:
    op = find_custom(node.attrs["function"])
    if op.grad is None:
        raise GraphError(
            f"custom op {op.name!r} has no gradient", hint="register_custom takes one."
        )
    return op.grad(b, node, dys)


def _samples() -> list[Sample]:
    def scale_grad(b: Builder, node: Node, dys: list[Value]) -> list[Value]:
        return [b.mul(dys[0], custom_attributes(node)["factor"])]

    def swap(x: Any, y: Any) -> tuple[Any, Any]:
        return y, x

    register_custom(
        "example.scale",
        infer=lambda x, factor: x,
        reference=lambda x, factor: x * factor,
        grad=scale_grad,
        replace=True,
    )
    register_custom(
        "example.swap",
        infer=swap,
        reference=swap,
        grad=lambda b, node, dys: [dys[1], dys[0]],
        replace=True,
    )
    factor: Mapping[str, Any] = {"factor": 2.5}
    return [
        sample(draw(3, 4), function="example.scale", attributes=json.dumps(factor)),
        sample(draw(3), draw(2, 4, seed=1), function="example.swap"),
    ]


OPDEFS = [
    OpDef(
        "custom",
        Kind.COMPUTE,
        "xs*",
        infer=_infer,
        reference=_reference,
        grad=_grad,
        samples=_samples,
        is_foldable=False,
        attrs={"function": Attr("str"), "attributes": Attr("str", "{}")},
        doc="An op registered by register_custom under the name `function`.",
    )
]
