"""Control flow: ops that run graphs. A body reads only its inputs, so captures are operands.

    if     both bodies take the captures
    loop   body(iteration, condition, carried..., captures...) -> condition, carried..., rows...
    scan   body(carried..., elements..., captures...) -> carried..., rows...

Results are the final carried values, then the stacked rows of all iterations. A size that may
change between iterations is unknown outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bitwright.errors import InferenceError, RunError
from bitwright.ir.dim import UNKNOWN, Size
from bitwright.ir.dtype import bool_, i64
from bitwright.ir.graph import Graph
from bitwright.ir.types import OpaqueType, TensorType, ValueType, normalize_axis
from bitwright.ops.control.control_gradients import if_gradient, iteration_gradient
from bitwright.ops.core import expect
from bitwright.ops.core.bodies import (
    carried_type,
    check_fit,
    either,
    hidden_symbols,
    lasting_sizes,
    outer_type,
    require_condition,
    require_scalar,
    result_types,
)
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample

_SCALAR = TensorType(i64, ())
_FLAG = TensorType(bool_, ())


def _infer_if(condition: ValueType, *captures: ValueType, **bodies: Graph) -> tuple[ValueType, ...]:
    require_condition(condition)
    then, otherwise = bodies["then"], bodies["else"]
    for body in (then, otherwise):
        check_fit(body, captures)
    if len(then.outputs) != len(otherwise.outputs):
        raise InferenceError(
            "the bodies give different numbers of results",
            expected=len(then.outputs),
            found=len(otherwise.outputs),
        )
    pairs = zip(result_types(then, captures), result_types(otherwise, captures), strict=True)
    return tuple(either(f"result {i}", one, other) for i, (one, other) in enumerate(pairs))


def _if(condition: Array, *captures: Any, **bodies: Any) -> tuple[Any, ...]:
    branch = "then" if _item("the condition", condition) else "else"
    return tuple(bodies[branch](*captures))


def _item(what: str, array: Any) -> Any:
    if np.size(array) != 1:
        raise RunError(f"{what} is not one value", found=f"shape {list(np.shape(array))}")
    return np.asarray(array).reshape(()).item()


def _infer_loop(
    trip_count: ValueType | None,
    condition: ValueType | None,
    *operands: ValueType,
    body: Graph,
    carried: int,
) -> tuple[ValueType, ...]:
    if trip_count is not None:
        require_scalar("the trip count", trip_count, i64)
    if condition is not None:
        require_condition(condition)
    _check_counts(body, operands, {"carried": carried}, outputs=1 + carried)
    given = (_SCALAR, _FLAG, *operands)
    check_fit(body, given)
    require_condition(body.outputs[0][1].type)
    pairs = [(2 + i, 1 + i) for i in range(carried)]
    finals, rows = _iterated(body, given, pairs, 1 + carried)
    return (*finals, *(row.with_shape((UNKNOWN, *row.shape)) for row in rows))


def _iterated(
    body: Graph, given: Sequence[ValueType], carried: Sequence[tuple[int, int]], first_row: int
) -> tuple[list[ValueType], list[TensorType]]:
    """The final types of carried values, and the type of one row of each stacked result."""
    hidden = hidden_symbols(body)
    sizes = lasting_sizes(body, given, carried, hidden)
    finals = [carried_type(body, given, i, made, sizes, hidden) for i, made in carried]
    rows = []
    for name, value in body.outputs[first_row:]:
        row = outer_type(value.type, sizes, hidden)
        if isinstance(row, OpaqueType):
            raise InferenceError(f"result {name!r} cannot be stacked", found=row)
        rows.append(row)
    return finals, rows


def _check_counts(
    body: Graph, operands: Sequence[ValueType], counts: dict[str, int], outputs: int
) -> None:
    for name, count in counts.items():
        if count < 0:
            raise InferenceError(f"{name!r} is negative", found=count)
    if sum(counts.values()) > len(operands):
        expected = " + ".join(f"{count} {name}" for name, count in counts.items())
        raise InferenceError("has too few operands", expected=expected, found=len(operands))
    if len(body.outputs) < outputs:
        raise InferenceError(
            f"body {body.name!r} gives too few results",
            expected=f"at least {outputs}",
            found=len(body.outputs),
        )


def _loop(
    trip_count: Array | None, condition: Array | None, *operands: Any, body: Any, carried: int
) -> tuple[Any, ...]:
    """The loop by reference; the body's condition counts if an initial one or no trip count is
    given."""
    limit = None if trip_count is None else _item("the trip count", trip_count)
    going = condition is None or bool(_item("the condition", condition))
    is_checked = condition is not None or trip_count is None
    values, captures = operands[:carried], operands[carried:]
    rows: list[tuple[Any, ...]] = []
    while going and (limit is None or len(rows) < limit):
        step = np.asarray(len(rows), np.int64)
        keep, *results = body(step, np.asarray(going), *values, *captures)
        values, row = tuple(results[:carried]), tuple(results[carried:])
        rows.append(row)
        going = not is_checked or bool(_item("the condition", keep))
    if rows:
        return (*values, *_stack(rows))
    types = body.result_types(np.asarray(0), np.asarray(True), *values, *captures)
    return (*values, *(_empty_stack(type_, 0) for type_ in types[1 + carried :]))


def _stack(rows: Sequence[Sequence[Any]], axes: Sequence[int] | None = None) -> list[Array]:
    """One array for each column of rows, stacked along its axis."""
    stacked = []
    for i, column in enumerate(zip(*rows, strict=True)):
        shapes = {np.shape(part) for part in column}
        if len(shapes) > 1:
            found = " and ".join(str(list(shape)) for shape in sorted(shapes))
            raise RunError(f"stacked result {i} changes its shape between iterations", found=found)
        stacked.append(np.stack(column, axis=axes[i] if axes else 0))
    return stacked


def _empty_stack(row: TensorType, axis: int) -> Array:
    """The result of stacking no rows."""
    shape: list[Any] = list(row.shape)
    shape.insert(normalize_axis(axis, row.rank + 1), 0)
    return np.zeros(shape, row.dtype.numpy)


def _per_item(name: str, given: Sequence[int] | None, count: int) -> tuple[int, ...]:
    """A list with one number for each of `count` items; zeros if it is absent."""
    if given is not None and len(given) != count:
        raise InferenceError(f"{name!r} has the wrong length", expected=count, found=len(given))
    return (0,) * count if given is None else tuple(given)


def _infer_scan(
    *operands: ValueType,
    body: Graph,
    carried: int,
    scanned: int,
    input_axes: Sequence[int] | None,
    output_axes: Sequence[int] | None,
    **directions: Sequence[int] | None,
) -> tuple[ValueType, ...]:
    _check_counts(body, operands, {"carried": carried, "scanned": scanned}, outputs=carried)
    if not scanned:
        raise InferenceError("has nothing to scan", hint="A loop repeats without a sequence.")
    stacked = len(body.outputs) - carried
    axes = _per_item("input_axes", input_axes, scanned)
    targets = _per_item("output_axes", output_axes, stacked)
    for name, count in (("input_directions", scanned), ("output_directions", stacked)):
        if set(_per_item(name, directions[name], count)) - {0, 1}:
            raise InferenceError(f"{name!r} is wrong", expected="0 or 1", found=directions[name])
    given, length = list(operands), None
    for i, axis in enumerate(axes, carried):
        whole = given[i]
        if isinstance(whole, OpaqueType):
            raise InferenceError(f"operand {i} cannot be scanned", found=whole)
        at = normalize_axis(axis, whole.rank)
        length = whole.shape[at] if length is None else length
        expect.size(f"the scanned axis of operand {i}", whole.shape[at], length)
        given[i] = whole.with_shape(size for j, size in enumerate(whole.shape) if j != at)
    check_fit(body, given)
    finals, rows = _iterated(body, given, [(i, i) for i in range(carried)], carried)
    assert length is not None
    return (*finals, *(_with_axis(row, at, length) for row, at in zip(rows, targets, strict=True)))


def _with_axis(row: TensorType, axis: int, size: Size) -> TensorType:
    at = normalize_axis(axis, row.rank + 1)
    return row.with_shape((*row.shape[:at], size, *row.shape[at:]))


def _scan(
    *operands: Any,
    body: Any,
    carried: int,
    scanned: int,
    input_axes: Sequence[int] | None,
    output_axes: Sequence[int] | None,
    input_directions: Sequence[int] | None,
    output_directions: Sequence[int] | None,
) -> tuple[Any, ...]:
    last = carried + scanned
    values, captures = operands[:carried], operands[last:]
    axes = _per_item("input_axes", input_axes, scanned)
    reverses = _per_item("input_directions", input_directions, scanned)
    sequences = []
    for whole, axis, reverse in zip(operands[carried:last], axes, reverses, strict=True):
        sequence = np.moveaxis(whole, axis, 0)
        sequences.append(np.flip(sequence, 0) if reverse else sequence)
    lengths = {len(sequence) for sequence in sequences}
    if len(lengths) > 1:
        raise RunError("the scanned operands have different lengths", found=sorted(lengths))
    rows = []
    for elements in zip(*sequences, strict=True):
        results = body(*values, *map(np.asarray, elements), *captures)
        values = results[:carried]
        rows.append(results[carried:])
    if rows:
        stacked = _stack(rows, output_axes)
    else:
        elements = tuple(np.empty(sequence.shape[1:], sequence.dtype) for sequence in sequences)
        types = body.result_types(*values, *elements, *captures)[carried:]
        targets = _per_item("output_axes", output_axes, len(types))
        stacked = [_empty_stack(type_, axis) for type_, axis in zip(types, targets, strict=True)]
    for i, reverse in enumerate(output_directions or ()):
        if reverse:
            stacked[i] = np.flip(stacked[i], axis=output_axes[i] if output_axes else 0)
    return (*values, *stacked)


def _branch(name: str, op: str) -> Graph:
    b = Builder(name)
    x, y = b.input("x", "f32[3]"), b.input("y", "f32[3]")
    return b.build(result=b.op(op, x, y))


def _counting_body() -> Graph:
    """A body that doubles x and stops when the step reaches a captured limit."""
    b = Builder("body")
    step, _ = b.input("step", "i64[]"), b.input("going", "bool[]")
    x, limit = b.input("x", "f32[3]"), b.input("limit", "i64[]")
    doubled = b.add(x, x)
    return b.build(keep=b.lt(step, limit), x=doubled, row=doubled, step=b.add(step, step))


def _growing_body() -> Graph:
    """A body that appends one row in each iteration."""
    b = Builder("body")
    _, going = b.input("step", "i64[]"), b.input("going", "bool[]")
    rows, row = b.input("rows", "f32[count, 2]"), b.input("row", "f32[1, 2]")
    return b.build(going=going, rows=b.concat(rows, row, axis=0))


def _nested_body() -> Graph:
    """A body that runs an inner loop of three iterations."""
    b = Builder("body")
    _, going = b.input("step", "i64[]"), b.input("going", "bool[]")
    x, limit = b.input("x", "f32[3]"), b.input("limit", "i64[]")
    result, _, _ = b.loop(
        np.asarray(3), None, x, limit, body=_counting_body(), carried=1, outputs=["x2", "r", "s"]
    )
    return b.build(going=going, x=result)


def _running_sum() -> Graph:
    b = Builder("body")
    total, x, factor = b.input("total", "f32[2]"), b.input("x", "f32[2]"), b.input("f", "f32[]")
    added = b.add(total, b.mul(x, factor))
    return b.build(total=added, row=added)


def _if_samples() -> list[Sample]:
    bodies: dict[str, Any] = {"then": _branch("then", "add"), "else": _branch("else", "mul")}
    x, y = draw(3), draw(3, seed=1)
    return [sample(np.array(True), x, y, **bodies), sample(np.array([False]), x, y, **bodies)]


def _loop_samples() -> list[Sample]:
    x, limit, three = draw(3), np.array(2), np.array(3)
    count: dict[str, Any] = {"body": _counting_body(), "carried": 1}
    grow: dict[str, Any] = {"body": _growing_body(), "carried": 1}
    return [
        sample(np.array(5), np.array(True), x, limit, **count),
        sample(np.array([5]), None, x, limit, **count),
        sample(None, np.array(True), x, limit, **count),
        sample(np.array(0), np.array(True), x, limit, **count),
        sample(np.array(4), np.array(False), x, limit, **count),
        sample(three, None, draw(0, 2), draw(1, 2, seed=1), **grow),
        sample(np.array(2), None, x, limit, body=_nested_body(), carried=1),
    ]


def _scan_samples() -> list[Sample]:
    attrs: dict[str, Any] = {"body": _running_sum(), "carried": 1, "scanned": 1}
    total, factor = draw(2), draw(seed=1)
    backwards: dict[str, Any] = {"input_axes": [1], "input_directions": [1], "output_axes": [-1]}
    return [
        sample(total, draw(5, 2), factor, **attrs),
        sample(total, draw(2, 5), factor, **attrs, **backwards, output_directions=[1]),
        sample(total, draw(0, 2), factor, **attrs),
    ]


_INTS = Attr("ints", None)
OPDEFS = [
    OpDef(
        "if",
        Kind.MOVEMENT,
        "condition, captures*",
        infer=_infer_if,
        reference=_if,
        samples=_if_samples,
        grad=if_gradient,
        attrs={"then": Attr("graph"), "else": Attr("graph")},
        doc="The results of one of two bodies.",
    ),
    OpDef(
        "loop",
        Kind.MOVEMENT,
        "trip_count?, condition?, operands*",
        infer=_infer_loop,
        reference=_loop,
        samples=_loop_samples,
        grad=iteration_gradient,
        attrs={"body": Attr("graph"), "carried": Attr("int")},
        doc="Repeats a body up to trip_count times while its condition holds; operands are the "
        "initial carried values, then captures.",
    ),
    OpDef(
        "scan",
        Kind.MOVEMENT,
        "operands*",
        infer=_infer_scan,
        reference=_scan,
        samples=_scan_samples,
        grad=iteration_gradient,
        attrs={
            "body": Attr("graph"),
            "carried": Attr("int"),
            "scanned": Attr("int"),
            "input_axes": _INTS,
            "output_axes": _INTS,
            "input_directions": _INTS,
            "output_directions": _INTS,
        },
        doc="Runs a body over the elements of the scanned operands; operands are the initial "
        "carried values, the scanned ones, then captures.",
    ),
]
