"""Steps element by element: one operand, two that broadcast, choices, conversions."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import helper
from onnx_growing import BOOL, F16, F32, F64, I8, I32, I64, U8, Growing, Value, broadcast, count

SMOOTH = (
    "Relu",
    "Tanh",
    "Sigmoid",
    "Neg",
    "Abs",
    "Erf",
    "Sin",
    "Cos",
    "Softsign",
    "Softplus",
    "Gelu",
    "Elu",
    "Selu",
    "LeakyRelu",
    "HardSigmoid",
    "HardSwish",
    "Mish",
    "Exp",
    "Atan",
    "Celu",
    "ThresholdedRelu",
)
POSITIVE = ("Sqrt", "Log", "Reciprocal")
BINARY = ("Add", "Sub", "Mul", "Max", "Min")
COMPARISONS = ("Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal")
WHOLE = ("Add", "Sub", "Mul", "Max", "Min")


def unary(g: Growing) -> None:
    x = g.operand(ranks=range(5))
    op = g.pick(*SMOOTH)
    if op == "ThresholdedRelu" and not x.exact:
        op = "Relu"
    y = g.make("Tanh", [x], x.shape) if op == "Exp" else x
    g.make(op, [y], x.shape, exact=x.exact and op in ("Relu", "Neg", "Abs"))


def positive(g: Growing) -> None:
    x = g.operand(ranks=range(5))
    above = g.make("Abs", [x], x.shape)
    above = g.make("Add", [above, g.constant(np.float32(0.5))], x.shape)
    op = g.pick(*POSITIVE, "Pow", "Div")
    if op == "Pow":
        g.make(
            op, [above, g.constant(g.pick(np.float32(0.5), np.float32(2), np.float32(-1)))], x.shape
        )
    elif op == "Div":
        g.make(op, [g.other(x.shape), above], x.shape)
    else:
        g.make(op, [above], x.shape)


def rounding(g: Growing) -> None:
    x = g.operand(ranks=range(5), exact=True)
    op = g.pick("Round", "Floor", "Ceil", "Sign")
    eight = g.constant(np.float32(8))
    y = g.make("Mul", [x, eight], x.shape, exact=True)
    g.make(op, [y], x.shape, exact=True)


def binary(g: Growing) -> None:
    x = g.operand(ranks=range(5))
    if g.chance(0.6):
        other = g.other(x.shape)
        shape: Any = x.shape
    else:
        other = g.operand(ranks=range(5))
        shape = broadcast(x.shape, other.shape)
    if shape is None or count(shape) > 1 << 14:
        return
    op = g.pick(*BINARY)
    exact = x.exact and other.exact and op in ("Max", "Min")
    g.make(op, list(g.pick((x, other), (other, x))), shape, exact=exact)


def several(g: Growing) -> None:
    x = g.operand(ranks=range(4))
    others = [g.other(x.shape) for _ in range(g.integer(0, 3))]
    g.make(g.pick("Sum", "Mean", "Max", "Min"), [x, *others], x.shape)


def whole_numbers(g: Growing) -> None:
    kind = g.pick(I64, I32)
    x = g.operand(kind, ranks=range(4), exact=True)
    other = g.other(x.shape, kind)
    op = g.pick(*WHOLE, "Mod", "Div")
    if op in ("Mod", "Div"):
        held = np.abs(g.array([1], dtype=kind)) + np.array(1, kind)
        other = g.constant(held.astype(kind))
        if x.rank == 0:
            return
    y = g.make(op, [x, other], x.shape, kind, True)
    if g.chance(0.5):
        g.make("Cast", [y], x.shape, exact=True, to=helper.np_dtype_to_tensor_dtype(F32))


def where(g: Growing) -> None:
    x = g.operand(ranks=range(5), exact=True)
    y = g.operand(ranks=range(5))
    shape = broadcast(x.shape, y.shape)
    if shape is None or count(shape) > 1 << 14:
        return
    limit = g.constant(np.float32(g.pick(0.0, 0.25)))
    condition = g.make(g.pick(*COMPARISONS), [x, limit], x.shape, BOOL, True)
    if g.chance(0.3):
        condition = g.make("Not", [condition], x.shape, BOOL, True)
    if g.chance(0.3):
        same = g.other(x.shape, BOOL)
        condition = g.make(g.pick("And", "Or", "Xor"), [condition, same], x.shape, BOOL, True)
    g.make("Where", [condition, y, g.constant(np.float32(-0.5))], shape, exact=y.exact)


def clip(g: Growing) -> None:
    x = g.operand(ranks=range(5))
    low = g.constant(np.float32(-0.5)) if g.chance(0.7) else None
    high = g.constant(np.float32(0.25)) if g.chance(0.7) else None
    g.make("Clip", [x, low, high], x.shape, exact=x.exact)


def p_relu(g: Growing) -> None:
    x = g.operand(ranks=range(1, 5))
    g.make("PRelu", [x, g.other(x.shape)], x.shape)


def convert(g: Growing) -> None:
    """Other types, and back."""
    x = g.operand(ranks=range(5), exact=True)
    to = g.pick(I32, I64, I8, U8, F16, F64, BOOL)
    scaled = g.make("Mul", [x, g.constant(np.float32(8))], x.shape, exact=True)
    if to == U8:
        scaled = g.make("Abs", [scaled], x.shape, exact=True)
    narrow = g.make(
        "Cast", [scaled], x.shape, to, True, to=helper.np_dtype_to_tensor_dtype(np.dtype(to))
    )
    if to in (F64, F16) and g.chance(0.5):
        narrow = _in_other_floats(g, narrow)
    if to in (I32, I64) and g.chance(0.5):
        narrow = g.make(g.pick("Add", "Mul", "Sub"), [narrow, narrow], x.shape, to, True)
    g.make("Cast", [narrow], narrow.shape, exact=narrow.exact, to=1)


def _in_other_floats(g: Growing, x: Value) -> Value:
    small = g.make("Tanh", [x], x.shape, x.dtype)
    return g.make("Add", [small, small], x.shape, x.dtype)


STEPS = [
    *[unary] * 3,
    positive,
    rounding,
    *[binary] * 4,
    several,
    whole_numbers,
    where,
    clip,
    p_relu,
    convert,
]
