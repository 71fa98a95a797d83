"""If, Loop and Scan: nested graphs become bodies, and what they read from outside operands.

A carried value may change its shape between iterations. Its body input then needs a size of its
own; which ones do is found by importing the body with the initial types, comparing what comes out,
and trying again with fresh sizes where the two differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from onnx import GraphProto

from bitwright.errors import ImportModelError, InferenceError
from bitwright.frontend.onnx.context import Body, Context, Inputs
from bitwright.frontend.onnx.frame import live_inputs
from bitwright.frontend.onnx.node import OnnxNode
from bitwright.frontend.onnx.registry import Results, UnmappedError, imports
from bitwright.ir import Graph, HostType, TensorType, Value, ValueType
from bitwright.ir.dtype import bool_, i64

_STEP, _FLAG = TensorType(i64, ()), TensorType(bool_, ())
_MAX_ROUNDS = 8
Types = list[ValueType]


@imports("If")
def if_(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    condition = inputs[0]
    then, otherwise = node.require("then_branch"), node.require("else_branch")
    known = ctx.array(condition)
    if known is not None and known.size == 1:
        return ctx.inline(then if known.reshape(()) else otherwise)
    bodies = [ctx.body(graph, []) for graph in (then, otherwise)]
    captures = _captures(bodies)
    graphs = [_finished(body, captures) for body in bodies]
    attrs = {"then": graphs[0], "else": graphs[1]}
    return _node(ctx, "if", [ctx.reshape(condition, []), *captures], attrs)


@imports("Loop")
def loop(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    trip_count, condition, *carried = inputs
    graph = node.require("body")
    _require_inputs(node, graph, 2 + len(carried))
    start = [value.type for value in carried]
    body = _stable(ctx, graph, start, lambda types: [_STEP, _FLAG, *types], first_output=1)
    captures = _captures([body])
    attrs = {"body": _finished(body, captures), "carried": len(carried)}
    scalars = [None if v is None else ctx.reshape(v, []) for v in (trip_count, condition)]
    return _node(ctx, "loop", [*scalars, *carried, *captures], attrs)


@imports("Scan")
def scan(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    if node.version < 9:
        return _scan_batch(ctx, node, inputs)
    scanned = node.require("num_scan_inputs")
    options = {
        "input_axes": node.items("scan_input_axes", [0] * scanned),
        "output_axes": node.items("scan_output_axes"),
        "input_directions": node.items("scan_input_directions"),
        "output_directions": node.items("scan_output_directions"),
    }
    return _scan(ctx, node, list(inputs), options)


def _scan(ctx: Context, node: OnnxNode, inputs: list[Value], options: dict[str, Any]) -> Results:
    graph, scanned = node.require("body"), node.require("num_scan_inputs")
    _require_inputs(node, graph, len(inputs))
    states = len(inputs) - scanned
    carried, sequences = inputs[:states], inputs[states:]
    rows = zip(sequences, options["input_axes"], strict=True)
    elements = [_element(x, axis) for x, axis in rows]
    start = [value.type for value in carried]
    body = _stable(ctx, graph, start, lambda types: [*types, *elements], first_output=0)
    captures = _captures([body])
    attrs = {"body": _finished(body, captures), "carried": states, "scanned": scanned, **options}
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
    captures = _captures([body])
    attrs = {"body": _finished(body, captures), "carried": 0, "scanned": len(values)}
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
) -> Body:
    """The body with carried types that hold before and after every iteration."""
    types = list(start)
    for _ in range(_MAX_ROUNDS):
        body = ctx.body(graph, arguments(types))
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
    if isinstance(before, HostType):
        return before
    if isinstance(after, HostType) or before.rank != after.rank or before.dtype != after.dtype:
        return HostType(f"tensor({before.dtype})")
    own = ctx.importer.carried_sizes
    sizes = []
    for one, other in zip(before.shape, after.shape, strict=True):
        if one != other and one not in own:
            one = ctx.importer.names.fresh("carried")
            own.add(one)
        sizes.append(one)
    return before.with_shape(sizes)


def _captures(bodies: Sequence[Body]) -> list[Value]:
    """What the bodies need from outside, each value once."""
    found: dict[Value, None] = {}
    for body in bodies:
        live = live_inputs(body.frame, [value for _, value in body.outputs])
        found.update({o: None for o, inner in body.frame.captures.items() if inner in live})
    return list(found)


def _finished(body: Body, captures: Sequence[Value]) -> Graph:
    inputs = [*body.inputs, *(body.frame.capture(outer) for outer in captures)]
    return body.frame.finish(_distinct(body.outputs), inputs)


def _distinct(outputs: Sequence[tuple[str, Value]]) -> list[tuple[str, Value]]:
    names: set[str] = set()
    found = []
    for name, value in outputs:
        while name in names:
            name += "_"
        names.add(name)
        found.append((name, value))
    return found
