"""Ops without a single standard node: regions of the graph, or model-local functions.

A region is standard nodes in the graph; the metadata records which op they implement. A function
has the same nodes as its body, so that the model runs in any runtime, and the call has the op's
attributes, so that the importer can restore the op from its name. The domain is "bitwright".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from bitwright.export.onnx.scope import Function, Ref, RegionRecord, Scope, Session, Step
from bitwright.frontend.onnx.regions import DOMAIN
from bitwright.ir.dtype import DType


def call(
    e: Scope,
    op: str,
    inputs: Sequence[Ref],
    attrs: dict[str, Any],
    body: Callable[..., tuple[Ref, ...]],
) -> tuple[Ref, ...]:
    """The results of a call of the function for these types and attributes, or of a region."""
    if e.session.options.functions == "inline":
        return region(e, op, inputs, attrs, body)
    key = (op, tuple(ref.dtype for ref in inputs), tuple(sorted(attrs.items(), key=str)))
    functions = e.session.functions
    if key not in functions:
        count = sum(function.op == op for function in functions.values())
        functions[key] = _write(e, op, f"{op}_{count}" if count else op, inputs, attrs, body)
    function = functions[key]
    results = [Ref(ref.dtype) for ref in function.outputs]
    e.steps.append(Step(function.name, list(inputs), results, attrs, DOMAIN))
    return tuple(results)


def region(
    e: Scope,
    op: str,
    inputs: Sequence[Ref | None],
    attrs: dict[str, Any],
    body: Callable[..., tuple[Ref, ...]],
) -> tuple[Ref, ...]:
    """The results of the body in the graph itself, recorded as a region."""
    begin = len(e.steps)
    results = body(e, *inputs)
    record_region(e, op, inputs, attrs, results, begin)
    return results


def record_region(
    e: Scope,
    op: str,
    inputs: Sequence[Ref | None],
    attrs: dict[str, Any],
    results: Sequence[Ref],
    begin: int,
) -> None:
    """Record that the steps from `begin` on implement the op, if JSON can hold its attributes."""
    plain = {name: _plain(value) for name, value in attrs.items() if value is not None}
    steps = e.steps[begin:]
    made = {ref for step in steps for ref in step.outputs}
    if any(value is None for value in plain.values()) or not made.issuperset(results):
        return
    read = {ref: None for step in steps for ref in step.inputs if ref is not None}
    outside = [r for r in read if r not in made and r not in inputs and not e.is_small(r)]
    e.session.regions.append(RegionRecord(op, plain, list(inputs), outside, list(results)))


def _plain(value: Any) -> Any:
    """An attribute as a JSON value, or None."""
    if isinstance(value, DType):
        return value.name
    if isinstance(value, (tuple, list)):
        items = [_plain(item) for item in value]
        return None if None in items else items
    is_plain = isinstance(value, (bool, int, str)) or (
        isinstance(value, float) and math.isfinite(value)
    )
    return value if is_plain else None


def _write(
    e: Scope,
    op: str,
    name: str,
    inputs: Sequence[Ref],
    attrs: dict[str, Any],
    body: Callable[..., tuple[Ref, ...]],
) -> Function:
    scope = Scope(Session(e.opset, e.session.options), e.graph)
    scope.node = e.node
    formals = [Ref(ref.dtype, scope.session.unique(f"in{i}")) for i, ref in enumerate(inputs)]
    results = body(scope, *formals)
    for i, ref in enumerate(results):
        ref.name = scope.session.unique(f"out{i}")
    for ref in scope.initializers:
        ref.name = ref.name or scope.session.unique("const")
    for step in scope.steps:
        for ref in step.outputs:
            ref.name = ref.name or scope.session.unique(step.op_type.lower())
        step.name = step.outputs[0].name
    return Function(op, name, tuple(attrs), formals, list(results), scope)
