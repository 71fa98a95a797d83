"""Symbolic evaluation of shape arithmetic on small integer tensors.

Exporters compute target shapes with tensors (Shape, Gather, Mul, Concat, …). The `SizeEvaluator`
evaluates such chains with each op's `sizes` form, so that the shape of a reshape becomes an
attribute such as `[batch, seq, 12, 32]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bitwright.errors import BitwrightError
from bitwright.ir.dim import UNKNOWN, Size
from bitwright.ir.dtype import bool_
from bitwright.ir.graph import Value
from bitwright.ir.types import TensorType
from bitwright.ops.core.opdef import Array, Kind, OpDef, Sample
from bitwright.ops.core.registry import get

MAX_ELEMENTS = 256
MAX_MAGNITUDE = 1 << 64  # Python integers grow where tensors overflow


def on_elements(function: Callable[..., Any]) -> Callable[..., Any]:
    """A `sizes` form that needs the elements of every operand."""

    def sizes(*operands: Array | TensorType | None, **attrs: Any) -> Any:
        if any(isinstance(operand, TensorType) for operand in operands):
            return None
        return function(*operands, **attrs)

    return sizes


def movement(
    name: str,
    inputs: str,
    infer: Callable[..., Any],
    reference: Callable[..., Any],
    samples: Callable[[], list[Sample]],
    **rest: Any,
) -> OpDef:
    """A movement op whose reference also moves symbolic sizes."""
    functions = (infer, reference, samples)
    return OpDef(name, Kind.MOVEMENT, inputs, *functions, sizes=on_elements(reference), **rest)


class SizeEvaluator:
    """Computes the sizes that integer tensors hold, with a cache."""

    def __init__(self) -> None:
        self._known: dict[Value, Array | None] = {}

    def elements(self, value: Value) -> Array | None:
        """The elements as an object array of sizes, or None if the data decides."""
        stack = [value]
        while stack:
            top = stack[-1]
            if top in self._known:
                stack.pop()
                continue
            if not may_hold_sizes(top):
                self._known[top] = None
                continue
            waiting = [v for v in top.node.operands if v not in self._known]
            if waiting:
                stack.extend(waiting)
            else:
                self._evaluate(top)
        return self._known[value]

    def _evaluate(self, value: Value) -> None:
        node = value.node
        for output in node.outputs:
            self._known[output] = None
        if node.op == "constant":
            self._known[value] = np.asarray(node.attrs["value"]).astype(object)
            return
        opdef = get(node.op)
        if opdef.sizes is None:
            return
        operands = [None if v is None else self._operand(v) for v in node.inputs]
        operands += [None] * (sum(not o.variadic for o in opdef.operands) - len(operands))
        try:
            result = opdef.sizes(*operands, **opdef.call_attrs(node.attrs))
        except (BitwrightError, TypeError, ValueError, IndexError, ArithmeticError):
            return
        results = result if isinstance(result, tuple) else (result,)
        for output, elements in zip(node.outputs, results, strict=False):
            if elements is not None and _fits(elements, output):
                self._known[output] = np.asarray(elements, dtype=object)

    def _operand(self, value: Value) -> Any:
        elements = self._known[value]
        return value.type if elements is None else elements

    def sizes(self, value: Value) -> tuple[Size, ...] | None:
        """The elements of a vector (or scalar) as a tuple of sizes."""
        elements = self.elements(value)
        if elements is None or any(e is UNKNOWN for e in elements.reshape(-1)):
            return None
        return tuple(
            e if not isinstance(e, (np.integer, bool)) else int(e) for e in elements.reshape(-1)
        )


def may_hold_sizes(value: Value) -> bool:
    """Whether a value is a small tensor of integers or booleans."""
    type_ = value.type
    if not isinstance(type_, TensorType) or not (type_.dtype.is_integer or type_.dtype == bool_):
        return False
    return isinstance(type_.count, int) and type_.count <= MAX_ELEMENTS


def _fits(elements: Any, value: Value) -> bool:
    array = np.asarray(elements, dtype=object)
    if array.size > MAX_ELEMENTS or array.ndim != len(value.shape):
        return False
    whole = (e for e in array.reshape(-1) if isinstance(e, int))
    return all(abs(number) < MAX_MAGNITUDE for number in whole)
