"""Operations on the bits of integers, with numpy broadcasting.

A shift by a negative distance, or by the width of the type or more, gives 0, or -1 for a negative
number shifted right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.inference import broadcast
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Kind, NonDifferentiable, OpDef, Sample, draw, sample
from bitwright.ops.core.scalar import scalar_form

_INTEGER = NonDifferentiable("its result is an integer")


def _infer(*operands: TensorType) -> TensorType:
    for operand in operands:
        expect.integer("an operand", operand)
    return broadcast(*operands)


def _samples(low: int = -100, high: int = 100) -> list[Sample]:
    def pair(x: tuple[int, ...], y: tuple[int, ...], element: str) -> Sample:
        left = draw(*x, dtype=element, low=-100, high=100)
        return sample(left, draw(*y, dtype=element, seed=1, low=low, high=high))

    return [
        pair((3, 5), (3, 5), "i32"),
        pair((4, 1, 5), (3, 1), "u8"),
        pair((2, 3), (), "i64"),
        pair((0, 3), (1, 3), "u64"),
        pair((9,), (9,), "i8"),
        pair((9,), (9,), "u16"),
    ]


def _op(name: str, reference: Callable[..., Any], doc: str, scalar: str = "", **rest: Any) -> OpDef:
    return OpDef(
        name,
        Kind.ELEMENTWISE,
        "x, y",
        infer=_infer,
        reference=lambda x, y: reference(wide(x), wide(y)),
        grad=_INTEGER,
        scalar=scalar_form(scalar or name),
        doc=doc,
        **rest,
    )


def _logic(name: str, reference: Callable[..., Any], doc: str) -> OpDef:
    """`bit_<name>` of the renderer and Bitwise<Name> of ONNX."""
    traits: dict[str, Any] = {"onnx": f"Bitwise{name.capitalize()}", "commutative": True}
    return _op(f"bitwise_{name}", reference, doc, f"bit_{name}", samples=_samples, **traits)


OPDEFS = [
    _logic("and", np.bitwise_and, "the bits set in both"),
    _logic("or", np.bitwise_or, "the bits set in either"),
    _logic("xor", np.bitwise_xor, "the bits set in exactly one"),
    _op(
        "shift_left",
        np.left_shift,
        "x * 2**y, bits beyond the width lost",
        samples=lambda: _samples(0, 7),
    ),
    _op("shift_right", np.right_shift, "floor(x / 2**y)", samples=lambda: _samples(0, 7)),
    OpDef(
        "bitwise_not",
        Kind.ELEMENTWISE,
        "x",
        infer=_infer,
        reference=lambda x: np.bitwise_not(wide(x)),
        grad=_INTEGER,
        samples=lambda: [
            sample(draw(9, dtype="u8", low=0, high=255)),
            sample(draw(2, 3, dtype="i32", low=-100, high=100)),
            sample(draw(dtype="i64")),
            sample(draw(0, 3, dtype="u64")),
        ],
        scalar=scalar_form("bit_not"),
        onnx="BitwiseNot",
        doc="every bit flipped",
    ),
]
