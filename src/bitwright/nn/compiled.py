"""Programs of single ops and their gradients, compiled once per signature.

A signature is the op, its attributes, and the types of the arrays. The gradient comes from the op's
rule, so a function runs the same kernel as a training step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from bitwright.errors import BitwrightError, GraphError
from bitwright.executable import Executable
from bitwright.ir.dtype import dtype
from bitwright.ir.edit import prune
from bitwright.ir.graph import Value
from bitwright.ir.types import TensorType
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.check import verify
from bitwright.ops.core.gradients import full_like
from bitwright.ops.core.reverse import backpropagate
from bitwright.pipeline import compile_graph

Array = np.ndarray[Any, Any]
Signature = tuple[tuple[str, TensorType | None], ...]
PROGRAMS = 256
"""How many programs are kept."""


def gradients(
    op: str,
    operands: Mapping[str, Any],
    dy: Any,
    wrt: Sequence[str],
    **attrs: Any,
) -> tuple[Array, ...]:
    """The gradients of the operands named in `wrt`, given that of the op's (first) result."""
    arrays = {name: None if x is None else np.asarray(x) for name, x in operands.items()}
    gradient = np.asarray(dy)
    types = tuple((name, None if x is None else type_of(x)) for name, x in arrays.items())
    program = _backward(op, types, type_of(gradient), tuple(wrt), _frozen(attrs))
    return _run(program, {**arrays, "dy": gradient})


def results(op: str, operands: Mapping[str, Any], **attrs: Any) -> tuple[Array, ...]:
    """The results of an op."""
    arrays = {name: None if x is None else np.asarray(x) for name, x in operands.items()}
    types = tuple((name, None if x is None else type_of(x)) for name, x in arrays.items())
    return _run(_forward(op, types, _frozen(attrs)), arrays)


def type_of(array: Array) -> TensorType:
    return TensorType(dtype(array.dtype), array.shape)


def require(condition: bool, message: str, **facts: Any) -> None:
    """Raise a `BitwrightError` unless the condition holds."""
    if not condition:
        raise BitwrightError(message, **facts)


def require_same(**arrays: Any) -> None:
    """Raise a `BitwrightError` unless all arrays have one shape and one element type."""
    (first, given), *others = ((name, np.asarray(x)) for name, x in arrays.items())
    for name, array in others:
        require(
            array.shape == given.shape and array.dtype == given.dtype,
            f"{name} has another type than {first}",
            expected=str(type_of(given)),
            found=str(type_of(array)),
        )


def _frozen(attrs: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (name, tuple(value) if isinstance(value, list) else value)
        for name, value in sorted(attrs.items())
        if value is not None
    )


def _run(program: Executable, arrays: Mapping[str, Array | None]) -> tuple[Array, ...]:
    feeds = {name: arrays[name] for name in program.input_names}
    return tuple(program.run(feeds).values())


def _node(b: Builder, op: str, operands: Signature, attrs: Any) -> tuple[list[Value | None], Any]:
    values = [None if type_ is None else b.input(name, type_) for name, type_ in operands]
    return values, b.node(op, values, dict(attrs), [])


@lru_cache(maxsize=PROGRAMS)
def _forward(op: str, operands: Signature, attrs: tuple[tuple[str, Any], ...]) -> Executable:
    b = Builder(op)
    _, node = _node(b, op, operands, attrs)
    return compile_graph(b.build(**{f"y{i}": y for i, y in enumerate(node.outputs)}))


@lru_cache(maxsize=PROGRAMS)
def _backward(
    op: str,
    operands: Signature,
    dy: TensorType,
    wrt: tuple[str, ...],
    attrs: tuple[tuple[str, Any], ...],
) -> Executable:
    b = Builder(f"{op}_backward")
    values, node = _node(b, op, operands, attrs)
    named = {name: v for (name, _), v in zip(operands, values, strict=True) if v is not None}
    y = node.outputs[0]
    if y.type != dy:
        raise GraphError(
            f"dy is not a gradient of the result of {op}",
            where=", ".join(f"{name} {type_}" for name, type_ in operands if type_ is not None),
            expected=str(y.type),
            found=str(dy),
        )
    found = backpropagate(b, list(b.nodes), {y: b.input("dy", dy)}, [named[n] for n in wrt])
    for name in wrt:
        b.output(f"d{name}", found.get(named[name]) or full_like(b, 0.0, named[name]))
    graph = prune(b.build())
    used = {v.node for n in graph.nodes for v in n.operands}
    # an operand that the gradient does not read is not passed
    kept = tuple(n for n in graph.nodes if n.op != "input" or n in used)
    return compile_graph(verify(graph.with_(nodes=kept)))
