"""An assertion: y = x if the condition holds, else the run fails with the message.

Importers insert it where a model is valid only if a condition holds.
"""

from __future__ import annotations

import numpy as np

from bitwright.errors import RunError
from bitwright.ir.types import ValueType
from bitwright.ops.core.bodies import require_condition
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, draw, sample


def _infer(condition: ValueType, x: ValueType, *, message: str) -> ValueType:
    require_condition(condition)
    return x


def _reference(condition: Array, x: Array, *, message: str) -> Array:
    if not np.asarray(condition).reshape(()):
        raise RunError(message)
    return x


OPDEFS = [
    OpDef(
        "require",
        Kind.MOVEMENT,
        "condition, x",
        infer=_infer,
        reference=_reference,
        samples=lambda: [
            sample(np.array(True), draw(3, 4), message="no"),
            sample(np.array([True]), draw(0, dtype="i64"), message="no"),
        ],
        grad=lambda b, node, dys: [None, dys[0]],
        attrs={"message": Attr("str")},
        doc="x; the run fails with the message unless the condition holds",
    )
]
