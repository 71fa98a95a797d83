"""Operations on the bits of integers, with numpy broadcasting.

A shift by a negative distance, or by the width of the type or more, gives 0, or -1 for a negative
number shifted right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bitwright.ir.types import TensorType
from bitwright.ops.core.inference import broadcast, is_integer, require_dtype
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Kind, NonDifferentiable, OpDef, Sample, draw, sample

_INTEGER = NonDifferentiable("its result is an integer")


def _infer(*operands: TensorType) -> TensorType:
    for operand in operands:
        require_dtype("an operand", operand, is_integer, "an integer type")
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


def _op(
    name: str,
    reference: Callable[..., Any],
    scalar: Callable[..., Any],
    doc: str,
    samples: Callable[[], list[Sample]] = _samples,
    **rest: Any,
) -> OpDef:
    return OpDef(
        name,
        Kind.ELEMENTWISE,
        "x, y",
        infer=_infer,
        reference=lambda x, y: reference(wide(x), wide(y)),
        grad=_INTEGER,
        samples=samples,
        scalar=scalar,
        doc=doc,
        **rest,
    )


OPDEFS = [
    _op(
        "bitwise_and",
        np.bitwise_and,
        lambda e, x, y: e.bit_and(x, y),
        "the bits set in both",
        onnx="BitwiseAnd",
        commutative=True,
    ),
    _op(
        "bitwise_or",
        np.bitwise_or,
        lambda e, x, y: e.bit_or(x, y),
        "the bits set in either",
        onnx="BitwiseOr",
        commutative=True,
    ),
    _op(
        "bitwise_xor",
        np.bitwise_xor,
        lambda e, x, y: e.bit_xor(x, y),
        "the bits set in exactly one",
        onnx="BitwiseXor",
        commutative=True,
    ),
    _op(
        "shift_left",
        np.left_shift,
        lambda e, x, y: e.shift_left(x, y),
        "x * 2**y, bits beyond the width lost",
        samples=lambda: _samples(0, 7),
    ),
    _op(
        "shift_right",
        np.right_shift,
        lambda e, x, y: e.shift_right(x, y),
        "floor(x / 2**y)",
        samples=lambda: _samples(0, 7),
    ),
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
        scalar=lambda e, x: e.bit_not(x),
        onnx="BitwiseNot",
        doc="every bit flipped",
    ),
]
