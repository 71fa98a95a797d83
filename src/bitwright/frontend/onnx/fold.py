"""Folds small values that depend on constants only, for mappings that need a number."""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.errors import BitwrightError
from bitwright.ir import TensorType, Value
from bitwright.ops.core.numeric import narrow
from bitwright.ops.core.opdef import Kind
from bitwright.ops.core.registry import get

Array = np.ndarray[Any, Any]
MAX_ELEMENTS = 4096
_REARRANGING = (
    "bitcast concat expand gather gather_elements gather_nd identity iota one_hot reshape roll "
    "scatter_elements scatter_nd shape_of sizes slice split tile top_k transpose trilu"
)
_REDUCING = "argmax argmin cumprod cumsum"
CHEAP = frozenset(f"constant parameter {_REARRANGING} {_REDUCING}".split())
"""Ops that are folded besides elementwise ops and reductions. Models compute sizes with them, and
their cost is bounded by the sizes of operands and results; that of a window or product is not."""


class ConstantFolder:
    """Evaluates small values with the reference implementations, and caches the results."""

    def __init__(self) -> None:
        self._known: dict[Value, Array | None] = {}

    def array(self, value: Value) -> Array | None:
        stack = [value]
        while stack:
            top = stack[-1]
            if top in self._known:
                stack.pop()
            elif not _foldable(top):
                self._known[top] = None
            elif waiting := [v for v in top.node.operands if v not in self._known]:
                stack.extend(waiting)
            else:
                self._evaluate(top)
        return self._known[value]

    def _evaluate(self, value: Value) -> None:
        node = value.node
        for output in node.outputs:
            self._known[output] = None
        if node.op in ("constant", "parameter"):
            self._known[value] = node.attrs.get("value")
            return
        operands = [None if v is None else self._known[v] for v in node.inputs]
        if any(a is None and v is not None for a, v in zip(operands, node.inputs, strict=True)):
            return
        opdef = get(node.op)
        fixed = sum(not operand.variadic for operand in opdef.operands)
        operands += [None] * (fixed - len(operands))
        try:
            with np.errstate(all="ignore"):
                result = opdef.reference(*operands, **opdef.call_attrs(node.attrs))
        except (BitwrightError, ValueError, IndexError, TypeError, ArithmeticError, MemoryError):
            return
        results = result if isinstance(result, tuple) else (result,)
        for output, array in zip(node.outputs, results, strict=True):
            self._known[output] = narrow(array, output.dtype)


def _foldable(value: Value) -> bool:
    node = value.node
    opdef = get(node.op)
    cheap = node.op in CHEAP or node.op.startswith("reduce_") or opdef.kind is Kind.ELEMENTWISE
    if not cheap or not opdef.deterministic:
        return False
    if node.attr_symbols:
        return False
    return all(
        isinstance(v.type, TensorType)
        and isinstance(v.type.count, int)
        and v.type.count <= MAX_ELEMENTS
        for v in node.outputs
    )
