"""The expression interface of the scalar forms of elementwise ops.

A scalar form such as `lambda e, x: e.max(x, 0)` is independent of LLVM, Triton and C: each backend
passes its own renderer as `e`. `NumpyScalars` renders to numpy for tests. Arguments are values of
the renderer or Python numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from bitwright.ir.dtype import DType

Term = Any


class Scalars(Protocol):
    """The operations of a renderer. Comparisons return booleans; `select` chooses by one."""

    def add(self, a: Term, b: Term) -> Term: ...
    def sub(self, a: Term, b: Term) -> Term: ...
    def mul(self, a: Term, b: Term) -> Term: ...
    def div(self, a: Term, b: Term) -> Term: ...
    def rem(self, a: Term, b: Term) -> Term:
        """The remainder with the sign of the dividend (C's fmod and %)."""

    def pow(self, a: Term, b: Term) -> Term: ...
    def neg(self, a: Term) -> Term: ...
    def abs(self, a: Term) -> Term: ...
    def max(self, a: Term, b: Term) -> Term:
        """The larger; NaN if either is NaN."""

    def min(self, a: Term, b: Term) -> Term:
        """The smaller; NaN if either is NaN."""

    def sqrt(self, a: Term) -> Term: ...
    def exp(self, a: Term) -> Term: ...
    def log(self, a: Term) -> Term: ...
    def sin(self, a: Term) -> Term: ...
    def cos(self, a: Term) -> Term: ...
    def tan(self, a: Term) -> Term: ...
    def asin(self, a: Term) -> Term: ...
    def acos(self, a: Term) -> Term: ...
    def atan(self, a: Term) -> Term: ...
    def sinh(self, a: Term) -> Term: ...
    def cosh(self, a: Term) -> Term: ...
    def tanh(self, a: Term) -> Term: ...
    def asinh(self, a: Term) -> Term: ...
    def acosh(self, a: Term) -> Term: ...
    def atanh(self, a: Term) -> Term: ...
    def erf(self, a: Term) -> Term: ...
    def floor(self, a: Term) -> Term: ...
    def ceil(self, a: Term) -> Term: ...
    def round(self, a: Term) -> Term:
        """To the nearest whole number, halves to even."""

    def eq(self, a: Term, b: Term) -> Term: ...
    def ne(self, a: Term, b: Term) -> Term: ...
    def lt(self, a: Term, b: Term) -> Term: ...
    def le(self, a: Term, b: Term) -> Term: ...
    def gt(self, a: Term, b: Term) -> Term: ...
    def ge(self, a: Term, b: Term) -> Term: ...
    def bit_and(self, a: Term, b: Term) -> Term: ...
    def bit_or(self, a: Term, b: Term) -> Term: ...
    def bit_xor(self, a: Term, b: Term) -> Term: ...
    def bit_not(self, a: Term) -> Term: ...
    def shift_left(self, a: Term, b: Term) -> Term:
        """a * 2**b; a distance outside the width of the type gives 0."""

    def shift_right(self, a: Term, b: Term) -> Term:
        """floor(a / 2**b); a distance outside the width gives 0, or -1 if a is negative."""

    def select(self, condition: Term, a: Term, b: Term) -> Term: ...
    def requantize(
        self, a: Term, zero: Term | None, highest: Term | None, to: DType, bounded: bool
    ) -> Term:
        """saturate(rne(min(a, highest)) + zero) in an integer type of at most 16 bits; NaN gives
        the lowest value. `bounded` promises that |a| < 2**30 and that there is no NaN."""


_erf = np.frompyfunc(math.erf, 1, 1)


def erf(x: Any) -> Any:
    """The error function, elementwise in f64."""
    return np.asarray(_erf(np.asarray(x, np.float64)), np.float64)


def scalar_form(operation: str) -> Callable[..., Term]:
    """The scalar form that is one operation of the renderer."""
    return lambda e, *operands: getattr(e, operation)(*operands)


class NumpyScalars:
    """Renders scalar forms to numpy, elementwise."""

    add, sub, mul, neg = np.add, np.subtract, np.multiply, np.negative
    pow, abs, sqrt, exp, log = np.power, np.abs, np.sqrt, np.exp, np.log
    max, min, rem = np.maximum, np.minimum, np.fmod
    sin, cos, tan, asin, acos, atan = np.sin, np.cos, np.tan, np.arcsin, np.arccos, np.arctan
    sinh, cosh, tanh = np.sinh, np.cosh, np.tanh
    asinh, acosh, atanh = np.arcsinh, np.arccosh, np.arctanh
    floor, ceil, round = np.floor, np.ceil, np.rint
    eq, ne, lt, le = np.equal, np.not_equal, np.less, np.less_equal
    gt, ge = np.greater, np.greater_equal
    bit_and, bit_or, bit_xor, bit_not = (
        np.bitwise_and,
        np.bitwise_or,
        np.bitwise_xor,
        np.bitwise_not,
    )
    shift_left, shift_right, select = np.left_shift, np.right_shift, np.where
    erf = staticmethod(erf)

    @staticmethod
    def div(a: Any, b: Any) -> Any:
        """Quotient; integers truncate towards zero."""
        if np.asarray(a).dtype.kind in "iu":
            return np.trunc(np.divide(a, b)).astype(np.asarray(a).dtype)
        return np.divide(a, b)

    @staticmethod
    def requantize(a: Any, zero: Any, highest: Any, to: DType, bounded: bool) -> Any:
        if highest is not None:
            a = np.where(np.less(highest, a), highest, a)
        offset = 0.0 if zero is None else np.asarray(zero, np.float64)
        found = np.clip(np.rint(np.nan_to_num(a, nan=-np.inf)) + offset, to.min, to.max)
        return found.astype(np.int64)
