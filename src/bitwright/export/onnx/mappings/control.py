"""Control flow and fused regions.

bitwright passes captures to bodies as operands. ONNX bodies read outer values by name, so a
captured input of a body becomes the outer value.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from bitwright.export.onnx.bodies import finish
from bitwright.export.onnx.convert import inline, write_nodes
from bitwright.export.onnx.mapping import Ref, Scope, exports
from bitwright.export.onnx.protos import Body
from bitwright.export.onnx.schemas import spelled
from bitwright.export.onnx.sizes import bind
from bitwright.ir import Graph, TensorType, ValueType
from bitwright.ir.dtype import bool_


def _write_body(
    e: Scope, graph: Graph, captures: Sequence[Ref], own: int, always: bool = False
) -> Body:
    """The body, whose first `own` inputs are not captures; `always` makes its condition true."""
    scope = Scope(e.session, graph, e)
    given: list[Ref] = []
    for position, value in enumerate(graph.inputs):
        if position < own:
            element = value.type.dtype if isinstance(value.type, TensorType) else None
            ref = Ref(element, e.session.unique(value.name), value.type)
            given.append(ref)
        else:
            ref = captures[position - own]
        scope.values[value] = ref
        bind(scope, ref, value.type)
    write_nodes(scope)
    results: list[Ref] = []
    made = {ref for step in scope.steps for ref in step.outputs}
    for position, (name, value) in enumerate(graph.outputs):
        ref = scope.values[value]
        if always and position == 0:
            ref = given[1]
        if ref not in made or ref in results:
            ref = scope.Identity(ref)
            ref.name, ref.type = e.session.unique(name), value.type
        results.append(ref)
    finish(scope, graph.name)
    return Body(scope, graph.name, given, results)


def _check_kinds(e: Scope, pairs: Iterable[tuple[ValueType | None, ValueType | None]]) -> None:
    """Raise if the kinds of values, such as sequence and optional, differ."""
    for one, other in pairs:
        if spelled(one) != spelled(other):
            raise e.reject(
                f"a value is {spelled(one)} in one branch and {spelled(other)} in another"
            )


def _output_types(body: Graph) -> list[ValueType]:
    return [value.type for _, value in body.outputs]


def _dtypes(e: Scope) -> list[Any]:
    assert e.node is not None
    return [t.dtype if isinstance(t, TensorType) else t for t in e.node.types]


@exports("if", widens=False)
def write_if(e: Scope, condition: Ref, *captures: Ref, **bodies: Graph) -> tuple[Ref, ...]:
    assert e.node is not None
    for body in bodies.values():
        _check_kinds(e, zip(e.node.types, _output_types(body), strict=True))
    attrs = {
        "then_branch": _write_body(e, bodies["then"], captures, 0),
        "else_branch": _write_body(e, bodies["else"], captures, 0),
    }
    dtypes = _dtypes(e)
    return e.emit("If", [condition], attrs, results=len(dtypes), dtypes=dtypes)


@exports("loop", widens=False)
def write_loop(
    e: Scope,
    trip_count: Ref | None,
    condition: Ref | None,
    *operands: Ref,
    body: Graph,
    carried: int,
) -> tuple[Ref, ...]:
    """A loop; with a count and no condition, the condition of the body is ignored."""
    values, captures = operands[:carried], operands[carried:]
    results = _output_types(body)[1 : 1 + carried]
    _check_kinds(e, zip((ref.type for ref in values), results, strict=True))
    is_counted = condition is None and trip_count is not None
    if condition is None and trip_count is None:
        condition = e.constant(True, bool_)
    attrs = {"body": _write_body(e, body, captures, 2 + carried, always=is_counted)}
    dtypes = _dtypes(e)
    inputs = [trip_count, condition, *values]
    return e.emit("Loop", inputs, attrs, results=len(dtypes), dtypes=dtypes)


@exports("scan", widens=False)
def write_scan(
    e: Scope,
    *operands: Ref,
    body: Graph,
    carried: int,
    scanned: int,
    input_axes: Any,
    output_axes: Any,
    input_directions: Any,
    output_directions: Any,
) -> tuple[Ref, ...]:
    own = carried + scanned
    attrs = {
        "body": _write_body(e, body, operands[own:], own),
        "num_scan_inputs": scanned,
        "scan_input_axes": input_axes,
        "scan_output_axes": output_axes,
        "scan_input_directions": input_directions,
        "scan_output_directions": output_directions,
    }
    dtypes = _dtypes(e)
    return e.emit("Scan", operands[:own], attrs, results=len(dtypes), dtypes=dtypes)


@exports("fused", widens=False)
def fused(e: Scope, *operands: Ref, body: Graph) -> tuple[Ref, ...]:
    return inline(e, body, operands)
