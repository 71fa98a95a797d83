"""Steps that Python runs: interpreter fallbacks, control flow and data-dependent sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from bitwright.backends.cpu.runtime.plans import PreparedRun, SizeMismatchError
from bitwright.errors import BitwrightError, RunError
from bitwright.ir.feeds import solve
from bitwright.ir.graph import Value
from bitwright.lir.buffer import Storage
from bitwright.lir.schedule import NodeStep, SizeStep

if TYPE_CHECKING:
    from bitwright.ops.core.interpret import Observer, Runner


def run_node_step(
    step: NodeStep,
    run: PreparedRun,
    objects: dict[Value, Any],
    is_planned: bool,
    observe: Observer | None,
    runners: Mapping[str, Runner],
) -> None:
    """Run a node in the interpreter. `objects` holds values that have no buffer.

    `runners` run the compiled bodies of a control step.
    """
    from bitwright.ops.core.interpret import run_node  # most programs need no interpreter

    memory, arrays = run.memory, list[Any]()
    for value, view in zip(step.op.inputs, step.inputs, strict=True):
        if view is not None:
            arrays.append(memory.array(view))
        else:
            arrays.append(None if value is None else object_of(value, objects))
    if None in step.outputs:  # the items of a sequence outlive this use of the arena
        arrays = [a.copy() if isinstance(a, np.ndarray) else a for a in arrays]
    results = run_node(step.op, arrays, memory.bindings, observe, runners)
    for value, view, result in zip(step.op.outputs, step.outputs, results, strict=True):
        if view is None:
            objects[value] = result
            continue
        for size, actual in zip(view.shape, result.shape, strict=True):
            fits = solve(size, actual, memory.bindings)
            if run.is_speculative and not fits:
                raise SizeMismatchError
        if view.buffer.storage is Storage.OUTPUT and not (is_planned or run.is_speculative):
            memory.give(view.buffer, np.array(result))
        else:
            memory.array(view)[...] = result


def read_sizes(step: SizeStep, run: PreparedRun) -> None:
    """Bind the sizes that a step reads from small tensors."""
    memory, where = run.memory, step.where
    try:
        found = step.read([memory.array(view) for view in step.inputs], memory.bindings)
    except BitwrightError as error:
        raise RunError(str(error), where=where) from None
    except (ValueError, ArithmeticError) as error:  # a size that is not a number, or infinite
        raise RunError(f"its sizes cannot be computed: {error}", where=where) from error
    for size, actual in zip(step.sizes, found, strict=True):
        if not solve(size, actual, memory.bindings):
            if run.is_speculative:
                raise SizeMismatchError
            raise RunError("has another size", where=where, expected=size, found=actual)


def object_of(value: Value, objects: Mapping[Value, Any]) -> Any:
    """A value that has no buffer: a sequence, strings or a constant."""
    if value in objects:
        return objects[value]
    return value.node.attrs["value"]
