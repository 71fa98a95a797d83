"""x, computed after other values: keeps recomputed nodes apart from the nodes they repeat.

`bw.grad(..., checkpoint=...)` computes parts of the forward pass again in the backward pass. The
repeated nodes read their operands through this op, so that they are not merged with the originals,
and so that they run when the gradients in `after` exist. It copies nothing.
"""

from __future__ import annotations

from typing import Any

from bitwright.ir.types import ValueType
from bitwright.ops.core.opdef import Kind, OpDef, draw, sample


def _infer(x: ValueType, *after: ValueType) -> ValueType:
    return x


def _reference(x: Any, *after: Any) -> Any:
    return x


OPDEFS = [
    OpDef(
        "optimization_barrier",
        Kind.MOVEMENT,
        "x, after*",
        infer=_infer,
        reference=_reference,
        samples=lambda: [
            sample(draw(3, 4), draw(2, seed=1)),
            sample(draw(0, dtype="i64")),
            sample(draw(7, dtype="f64"), draw(7, dtype="bool"), draw(0)),
        ],
        grad=lambda b, node, dys: [dys[0]],
        keeps=("after",),
        is_foldable=False,
        doc="x, not before the values in `after` are computed",
    )
]
