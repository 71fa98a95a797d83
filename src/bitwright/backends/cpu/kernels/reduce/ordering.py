"""The order of elements: larger or smaller first, NaN beyond every number, ties by index.

`argmax`, `argmin` and `top_k` use it. argmax and argmin both select NaN; among the k smallest
elements of top_k, NaN is the largest.
"""

from __future__ import annotations

from dataclasses import dataclass

from bitwright.backends.cpu.codegen.emit import Function, Type, Value, computed, i8
from bitwright.ir.dtype import DType, bool_


@dataclass(frozen=True)
class Order:
    element: DType
    largest: bool
    nan_first: bool = True

    @property
    def type(self) -> Type:
        """The type in which elements are compared; a boolean is a byte."""
        return i8 if self.element == bool_ else computed(self.element)

    def to_compared(self, f: Function, v: Value) -> Value:
        return f.convert(v, self.type, self.element.is_signed)

    def before(self, f: Function, a: Value, b: Value) -> Value:
        """Whether a comes strictly before b."""
        if not self.element.is_float:
            if self.element.is_signed:
                return f.gt(a, b) if self.largest else f.lt(a, b)
            return f.ugt(a, b) if self.largest else f.ult(a, b)
        if self.nan_first:  # unordered comparisons are true for NaN; only a may be NaN
            beats = f.ugt(a, b) if self.largest else f.ult(a, b)
            return f.and_(beats, f.eq(b, b))
        beats = f.gt(a, b) if self.largest else f.lt(a, b)
        return f.or_(beats, f.and_(f.is_nan(b), f.eq(a, a)))

    def ties(self, f: Function, a: Value, b: Value) -> Value:
        """Whether neither comes before the other."""
        if not self.element.is_float:
            return f.eq(a, b)
        return f.or_(f.eq(a, b), f.and_(f.is_nan(a), f.is_nan(b)))
