"""If, Loop and Scan: nested graphs become bodies, and their captures become operands.

The shape of a carried value may change between iterations. Its body input then needs fresh
symbols. To find them, the body is imported with the initial types; where the types of its results
differ, it is imported again with fresh symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from onnx import GraphProto

from bitwright.errors import ImportModelError, InferenceError, UnsupportedError
from bitwright.frontend.onnx.api import OnnxNode, Results, UnmappedError, imports
from bitwright.frontend.onnx.bodies import captures_of, finish_body
from bitwright.frontend.onnx.context import Body, Context, Inputs
from bitwright.frontend.onnx.fork import Fork, compared_with_one, may_fork
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
    yes, no = _branch(ctx, then), _branch(ctx, otherwise)
    if yes is not None and no is not None and (not may_fork(ctx) or _have_equal_ranks(yes, no)):
        captures = captures_of([yes, no])
        attrs = {"then": finish_body(yes, captures), "else": finish_body(no, captures)}
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
    """The body of a branch, or None if its types are invalid."""
    try:
        return ctx.body(graph, [])
    except UnsupportedError:
        raise
    except ImportModelError:
        return None


def _have_equal_ranks(then: Body, otherwise: Body) -> bool:
    """Whether the tensor results of both branches have the same ranks."""
    return not any(
        isinstance(one, TensorType) and isinstance(other, TensorType) and one.rank != other.rank
        for one, other in zip(then.types, otherwise.types, strict=False)
    )


def _only_squeezes(graph: GraphProto) -> bool:
    """Whether the branch only squeezes, which fails by itself where a size is not 1."""
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
    return _body_with_fixed_types(ctx, graph, start, lambda types: [_STEP, _FLAG, *types], 1, first)


def _loop(
    ctx: Context, body: Body, scalars: Sequence[Value | None], carried: Sequence[Value]
) -> tuple[Value, ...]:
    captures = captures_of([body])
    attrs = {"body": finish_body(body, captures), "carried": len(carried)}
    return _node(ctx, "loop", [*scalars, *carried, *captures], attrs)


def _changes_rank(body: Body, carried: Sequence[Value]) -> bool:
    pairs = zip(body.inputs[2:], carried, strict=True)
    return any(
        isinstance(i.type, OpaqueType) and not isinstance(v.type, OpaqueType) for i, v in pairs
    )


def _runs_once(ctx: Context, trip_count: Value | None, condition: Value | None) -> bool:
    """Whether there is at least one iteration for all inputs."""
    limit, going = ctx.array(trip_count), ctx.array(condition)
    enough = trip_count is None or (limit is not None and int(limit.reshape(())) > 0)
    return enough and (condition is None or (going is not None and bool(going.reshape(()))))


def _peeled(
    ctx: Context, graph: GraphProto, scalars: Sequence[Value | None], carried: Sequence[Value]
) -> Results:
    """The loop with its first iteration peeled, so that initial values may have another rank."""
    trip_count, condition = scalars
    yes = ctx.const(True, bool_)
    keep, *made = ctx.inline(graph, [ctx.const(0), yes, *carried])
    values, rows = made[: len(carried)], made[len(carried) :]
    has_condition = condition is not None or trip_count is None
    rest = [
        None if trip_count is None else ctx.b.sub(trip_count, ctx.const(1)),
        ctx.reshape(keep, []) if has_condition else None,
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


def _scan(
    ctx: Context, node: OnnxNode, inputs: list[Value], options: dict[str, Any]
) -> tuple[Value, ...]:
    graph, scanned = node.graph("body"), node.require("num_scan_inputs")
    _require_inputs(node, graph, len(inputs))
    states = len(inputs) - scanned
    carried, sequences = inputs[:states], inputs[states:]
    rows = zip(sequences, options["input_axes"], strict=True)
    elements = [_element(x, axis) for x, axis in rows]
    start = [value.type for value in carried]
    body = _body_with_fixed_types(ctx, graph, start, lambda types: [*types, *elements], 0)
    captures = captures_of([body])
    attrs = {"body": finish_body(body, captures), "carried": states, "scanned": scanned, **options}
    return _node(ctx, "scan", [*carried, *sequences, *captures], attrs)


def _scan_batch(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    """Scan of opset 8: a scan over the batch whose body is a scan over time."""
    lengths, *values = inputs
    if lengths is not None:
        raise UnmappedError("the sequences of a batch have different lengths")
    scope = ctx.importer.nested_scope(ctx.scope, "batch")
    frame = scope.frame
    samples = [frame.add_input(frame.leaf("input", v.name, _element(v, 0))) for v in values]
    scanned = node.require("num_scan_inputs")
    options = {"input_axes": [0] * scanned, "input_directions": node.items("directions")}
    results = _scan(Context(ctx.importer, scope), node, samples, options)
    outputs = [(value.name, value) for value in results]
    body = Body(frame, samples, outputs)
    captures = captures_of([body])
    attrs = {"body": finish_body(body, captures), "carried": 0, "scanned": len(values)}
    return _node(ctx, "scan", [*values, *captures], attrs)


def _node(ctx: Context, op: str, operands: list[Any], attrs: dict[str, Any]) -> tuple[Value, ...]:
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


def _body_with_fixed_types(
    ctx: Context,
    graph: GraphProto,
    start: Sequence[ValueType],
    arguments: Callable[[Types], Types],
    first_output: int,
    first_step: int = 0,
) -> Body:
    """The body with carried types that are the same before and after each iteration."""
    types = list(start)
    for _ in range(_MAX_ROUNDS):
        body = ctx.body(graph, arguments(types), first_step)
        made = body.types[first_output : first_output + len(types)]
        if len(made) < len(types):
            raise ImportModelError(f"body {graph.name!r} has too few results")
        general = [_common_type(ctx, one, other) for one, other in zip(types, made, strict=True)]
        if general == types:
            return body
        types = general
    raise UnmappedError(f"the types of the carried values of {graph.name!r} do not converge")


def _common_type(ctx: Context, before: ValueType, after: ValueType) -> ValueType:
    """A type that fits both; sizes that differ become fresh symbols."""
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
