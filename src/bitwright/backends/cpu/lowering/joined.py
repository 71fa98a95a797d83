"""Results that are written where a concat wants them, so that it copies nothing."""

from __future__ import annotations

from collections.abc import Sequence

from bitwright.backends.cpu.lowering.context import Lowering
from bitwright.ir.dim import Size
from bitwright.ir.graph import Node, Value
from bitwright.ir.types import normalize_axis
from bitwright.lir.buffer import View
from bitwright.ops.shape.movement import inverse

MAX_STEPS = 4
"""The most reshapes and transposes between a result and the concat."""


def place_in_concat(ctx: Lowering, values: Sequence[Value]) -> dict[Value, View]:
    """The parts of concats' results that values become, by way of reshapes and transposes.

    The views are registered as those of the values. Values with other readers are left out, and so
    are those whose reshapes need a copy.
    """
    readers: dict[Value, list[Node]] = {}
    for node in ctx.graph.nodes:
        for operand in node.operands:
            readers.setdefault(operand, []).append(node)
    results = set(ctx.graph.results)
    found = {}
    for value in values:
        steps: list[Node] = []
        at = value
        while at not in results and len(readers.get(at, ())) == 1 and len(steps) < MAX_STEPS:
            (reader,) = readers[at]
            if reader.op == "concat":
                view = _placed(ctx, at, reader, steps)
                if view is not None:
                    ctx.alias(value, view)
                    found[value] = view
                break
            if reader.op not in ("reshape", "transpose") or len(reader.inputs) != 1:
                break
            steps.append(reader)
            at = reader.outputs[0]
    return found


def _placed(ctx: Lowering, part: Value, concat: Node, steps: Sequence[Node]) -> View | None:
    """The memory of `part` in the result of a concat, in the shape before the steps to it."""
    view: View | None = part_of(ctx, concat, part)
    for step in reversed(steps):
        assert view is not None
        (source,) = step.operands
        if step.op == "transpose":
            view = view.transpose(inverse(step.attrs["perm"]))
        else:
            view = view.reshape(source.shape)
        if view is None:
            return None
    return view


def part_of(ctx: Lowering, concat: Node, part: Value) -> View:
    """The slice of a concat's result that an operand becomes; allocates the result if needed."""
    result = concat.outputs[0]
    whole = ctx.view(result) if ctx.is_placed(result) else ctx.output(result)
    axis = normalize_axis(concat.attrs["axis"], result.rank)
    start: Size = 0
    for value in concat.operands:
        if value is part:
            break
        start = start + value.shape[axis]
    return whole.slice(axis, start, part.shape[axis], 1)
