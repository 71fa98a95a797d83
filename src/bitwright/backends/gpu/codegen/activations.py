"""Activation functions in closed GPU forms, cheaper than the scalar forms of their ops.

    if (form := form_of(step, is_short)) is not None: y = form(e, x)

A result is *short* if nothing reads it with more than 16 bits: it is stored as a 16-bit float or in
8 bits, or requantized to them (`short_steps`). A short GELU has an absolute error of 5e-6 and,
where it is at least 1e-4, a relative one of 2e-4 (rounding to bf16 has 2e-3, to f16 5e-4); the
other short forms have a relative error of 5e-6. GELU has a form for f32 too, which is closer to the
function than the formula with erf.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bitwright.backends.cpu.codegen.expression import Expression, Step, ValueRef
from bitwright.backends.gpu.codegen.scalars import Operand, Term, TritonScalars
from bitwright.backends.gpu.codegen.types import widened
from bitwright.ir.dtype import DType, f32
from bitwright.ops.core.registry import get
from bitwright.ops.nn.activation import TANH_GELU_CUBIC, TANH_GELU_LINEAR

Form = Callable[[TritonScalars, Operand], Term]
_OPS = ("gelu", "sigmoid", "silu", "swish", "quick_gelu", "tanh")
_PROPORTIONAL = frozenset({"mul", "neg", "abs", "relu", "maximum", "minimum", "cast"})
"""Ops whose relative error is that of their operands."""


def form_of(step: Step, is_short: bool) -> Form | None:
    """The form of a step on f32, or None for that of its op."""
    if widened(step.dtype) != f32 or step.op not in _OPS:
        return None
    attrs = get(step.op).call_attrs(dict(step.attrs))
    if step.op == "gelu" and attrs["approximate"] == "none":
        name = "bw_gelu_short" if is_short else "bw_gelu"
        return lambda e, x: e.call(name, x)
    return _short_form(step.op, attrs) if is_short else None


def _short_form(op: str, attrs: Mapping[str, Any]) -> Form:
    if op == "sigmoid":
        return lambda e, x: e.call("bw_sigmoid_short", x, 1.0)
    if op == "tanh":
        return lambda e, x: e.call("bw_tanh_short", x)
    if op == "gelu":
        return _tanh_gelu
    alpha = float(attrs.get("alpha", 1.0))
    return lambda e, x: e.mul(x, e.call("bw_sigmoid_short", x, alpha))


def _tanh_gelu(e: TritonScalars, x: Operand) -> Term:
    """x sigmoid(2 u), with u the argument of the tanh."""
    slope = e.add(e.mul(e.mul(x, x), -TANH_GELU_CUBIC), -TANH_GELU_LINEAR)
    return e.mul(x, e.call("bw_sigmoid_short", e.mul(x, slope), 1.0))


def short_steps(expression: Expression) -> list[bool]:
    """Whether the result of every step is read with at most 16 bits."""
    first = len(expression.inputs)
    wide = [False] * len(expression.steps)
    for number, dtype in zip(expression.outputs, expression.results, strict=True):
        if number >= first and not _is_short(dtype):
            wide[number - first] = True
    for number in range(len(expression.steps) - 1, -1, -1):
        step = expression.steps[number]
        if _is_short_float(step.dtype):
            wide[number] = False
        rounds = step.op in ("requantize", "cast") and _is_short(step.dtype)
        follows = step.op in _PROPORTIONAL and not wide[number]
        if rounds or follows or _is_short_float(step.dtype):
            continue
        for operand in step.operands:
            if isinstance(operand, ValueRef) and operand.number >= first:
                wide[operand.number - first] = True
    return [not one for one in wide]


def _is_short(dtype: DType) -> bool:
    """Whether rounding to a type hides the error of the short forms; i16 is too fine for that."""
    return dtype.bits <= (16 if dtype.is_float else 8)


def _is_short_float(dtype: DType) -> bool:
    return dtype.is_float and dtype.bits <= 16
