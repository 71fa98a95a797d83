"""If, Loop and Scan: nested graphs become bodies, and what they read from outside operands.

A carried value may change its shape between iterations. Its body input then needs a size of its
own; which ones do is found by importing the body with the initial types, comparing what comes out,
and trying again with fresh sizes where the two differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

from onnx import GraphProto

from bitwright.errors import ImportModelError, InferenceError, UnsupportedError
from bitwright.frontend.onnx.bodies import captures_of, finished
from bitwright.frontend.onnx.context import Body, Context, Inputs
from bitwright.frontend.onnx.fork import Fork, compared_with_one, may_fork
from bitwright.frontend.onnx.node import OnnxNode
from bitwright.frontend.onnx.registry import Results, UnmappedError, imports
from bitwright.ir import OpaqueType, TensorType, Value, ValueType
from bitwright.ir.dtype import bool_, i64

_STEP, _FLAG = TensorType(i64, ()), TensorType(bool_, ())
_MAX_ROUNDS = 8
Types = list[ValueType]


@imports("If")
def if_(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    condition = inputs[0]
    then, otherwise = node.graph("then_branch"), node.graph("else_branch")
    known = ctx.all_sizes(condition)
    if known is not None and len(known) == 1 and isinstance(known[0], int):
        return ctx.inline(then if known[0] else otherwise)
    size = compared_with_one(ctx, condition)
    is_one = None if size is None else ctx.frame.is_one(size)
    if is_one is not None:
        return ctx.inline(then if is_one else otherwise)
    bodies = [_branch(ctx, graph) for graph in (then, otherwise)]
    if _may_join(*bodies, open_ranks=not may_fork(ctx)):
        captures = captures_of(bodies)
        graphs = [finished(body, captures) for body in bodies]
        attrs = {"then": graphs[0], "else": graphs[1]}
        return _node(ctx, "if", [ctx.reshape(condition, []), *captures], attrs)
    raise Fork(
        node,
        condition,
        lambda inner: inner.inline(then),
        lambda inner: inner.inline(otherwise),
        checks_itself=_only_squeezes(then),
        size=size,
    )


def _branch(ctx: Context, graph: GraphProto) -> Body | None:
    """The body of a branch, or None if it has no valid types."""
    try:
        return ctx.body(graph, [])
    except UnsupportedError:
        raise
    except ImportModelError:
        return None


def _may_join(*bodies: Body | None, open_ranks: bool) -> TypeGuard[tuple[Body, Body]]:
    """Whether one value can be the result of either branch."""
    then, otherwise = bodies
    if then is None or otherwise is None:
        return False
    return open_ranks or not any(
        isinstance(one, TensorType) and isinstance(other, TensorType) and one.rank != other.rank
        for one, other in zip(then.types, otherwise.types, strict=False)
    )


def _only_squeezes(graph: GraphProto) -> bool:
    """Squeezing an axis fails in a run where its size is not 1."""
    return {node.op_type for node in graph.node} <= {"Squeeze", "Constant"}


@imports("Loop")
def loop(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    trip_count, condition, *carried = inputs
    graph = node.graph("body")
    _require_inputs(node, graph, 2 + len(carried))
    scalars = [None if v is None else ctx.reshape(v, []) for v in (trip_count, condition)]
    body = _loop_body(ctx, graph, carried)
    if _changes_rank(body, carried) and _runs_once(ctx, *scalars):
        return _peeled(ctx, graph, scalars, carried)
    return _loop(ctx, body, scalars, carried)


def _loop_body(ctx: Context, graph: GraphProto, carried: Sequence[Value], first: int = 0) -> Body:
    start = [value.type for value in carried]
    return _stable(ctx, graph, start, lambda types: [_STEP, _FLAG, *types], 1, first)


def _loop(
    ctx: Context, body: Body, scalars: Sequence[Value | None], carried: Sequence[Value]
) -> Results:
    captures = captures_of([body])
    attrs = {"body": finished(body, captures), "carried": len(carried)}
    return _node(ctx, "loop", [*scalars, *carried, *captures], attrs)


def _changes_rank(body: Body, carried: Sequence[Value]) -> bool:
    pairs = zip(body.inputs[2:], carried, strict=True)
    return any(
        isinstance(i.type, OpaqueType) and not isinstance(v.type, OpaqueType) for i, v in pairs
    )


def _runs_once(ctx: Context, trip_count: Value | None, condition: Value | None) -> bool:
    """Whether there is at least one iteration, whatever the inputs are."""
    limit, going = ctx.array(trip_count), ctx.array(condition)
    enough = trip_count is None or (limit is not None and int(limit.reshape(())) > 0)
    return enough and (condition is None or (going is not None and bool(going.reshape(()))))


def _peeled(
    ctx: Context,
    graph: GraphProto,
    scalars: Sequence[Value | None],
    carried: Sequence[Value],
) -> Results:
    """The first iteration put before the loop: what it starts from may have any rank."""
    trip_count, condition = scalars
    yes = ctx.const(True, bool_)
    keep, *made = ctx.inline(graph, [ctx.const(0), yes, *carried])
    values, rows = made[: len(carried)], made[len(carried) :]
    heeded = condition is not None or trip_count is None
    rest = [
        None if trip_count is None else ctx.b.sub(trip_count, ctx.const(1)),
        ctx.reshape(keep, []) if heeded else None,
    ]
    results = _loop(ctx, _loop_body(ctx, graph, values, first=1), rest, values)
    finals, others = results[: len(values)], results[len(values) :]
    stacks = [
        ctx.b.concat(ctx.unsqueeze(row, [0]), stack, axis=0)
        for row, stack in zip(rows, others, strict=True)
    ]
    return [*finals, *stacks]


@imports("Scan")
def scan(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    scanned = node.require("num_scan_inputs")
    if not 0 < scanned <= len(inputs):
        raise ImportModelError(
            "num_scan_inputs does not fit", expected=f"1 to {len(inputs)}", found=scanned
        )
    if node.version < 9:
        return _scan_batch(ctx, node, inputs)
    options = {
        "input_axes": node.items("scan_input_axes", [0] * scanned),
        "output_axes": node.items("scan_output_axes"),
        "input_directions": node.items("scan_input_directions"),
        "output_directions": node.items("scan_output_directions"),
    }
    return _scan(ctx, node, list(inputs), options)


def _scan(ctx: Context, node: OnnxNode, inputs: list[Value], options: dict[str, Any]) -> Results:
    graph, scanned = node.graph("body"), node.require("num_scan_inputs")
    _require_inputs(node, graph, len(inputs))
    states = len(inputs) - scanned
    carried, sequences = inputs[:states], inputs[states:]
    rows = zip(sequences, options["input_axes"], strict=True)
    elements = [_element(x, axis) for x, axis in rows]
    start = [value.type for value in carried]
    body = _stable(ctx, graph, start, lambda types: [*types, *elements], 0)
    captures = captures_of([body])
    attrs = {"body": finished(body, captures), "carried": states, "scanned": scanned, **options}
    return _node(ctx, "scan", [*carried, *sequences, *captures], attrs)


def _scan_batch(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    """Opset 8 runs every sample of a batch on its own: a scan over the batch of scans over time."""
    lengths, *values = inputs
    if lengths is not None:
        raise UnmappedError("sequences of a batch have lengths of their own")
    scope = ctx.importer.nested_scope(ctx.scope, "batch")
    frame = scope.frame
    samples = [frame.add_input(frame.leaf("input", v.name, _element(v, 0))) for v in values]
    scanned = node.require("num_scan_inputs")
    options = {"input_axes": [0] * scanned, "input_directions": node.items("directions")}
    results = _scan(Context(ctx.importer, scope), node, samples, options)
    outputs = [(value.name, value) for value in results]
    body = Body(frame, samples, outputs)
    captures = captures_of([body])
    attrs = {"body": finished(body, captures), "carried": 0, "scanned": len(values)}
    return _node(ctx, "scan", [*values, *captures], attrs)


def _node(ctx: Context, op: str, operands: list[Any], attrs: dict[str, Any]) -> Results:
    try:
        return ctx.b.node(op, operands, attrs, []).outputs
    except InferenceError as error:
        raise UnmappedError(str(error)) from None


def _require_inputs(node: OnnxNode, graph: GraphProto, expected: int) -> None:
    if len(graph.input) != expected:
        raise ImportModelError(
            "the body has the wrong number of inputs",
            where=node.where,
            expected=expected,
            found=len(graph.input),
        )


def _element(x: Value, axis: int) -> ValueType:
    shape = list(x.shape)
    del shape[axis]
    return x.tensor.with_shape(shape)


def _stable(
    ctx: Context,
    graph: GraphProto,
    start: Sequence[ValueType],
    arguments: Callable[[Types], Types],
    first_output: int,
    first_step: int = 0,
) -> Body:
    """The body with carried types that hold before and after every iteration."""
    types = list(start)
    for _ in range(_MAX_ROUNDS):
        body = ctx.body(graph, arguments(types), first_step)
        made = body.types[first_output : first_output + len(types)]
        if len(made) < len(types):
            raise ImportModelError(f"body {graph.name!r} gives too few results")
        general = [_general(ctx, one, other) for one, other in zip(types, made, strict=True)]
        if general == types:
            return body
        types = general
    raise UnmappedError(f"no fixed types were found for what {graph.name!r} carries")


def _general(ctx: Context, before: ValueType, after: ValueType) -> ValueType:
    """A type that both fit; sizes that differ get a symbol of their own."""
    if isinstance(before, OpaqueType):
        return before
    if isinstance(after, OpaqueType) or before.rank != after.rank or before.dtype != after.dtype:
        return OpaqueType(f"tensor({before.dtype})")
    own = ctx.importer.carried_sizes
    sizes = []
    for one, other in zip(before.shape, after.shape, strict=True):
        if one != other and one not in own:
            one = ctx.importer.names.fresh("carried")
            own.add(one)
        sizes.append(one)
    return before.with_shape(sizes)
