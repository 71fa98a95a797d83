"""Renders the scalar forms of ops (`ops.core.scalar`) as Triton statements.

    lines = Lines()
    e = TritonScalars(lines, default=f32)
    y = opdef.scalar(e, Term("x", f32), 2.0, **attrs)     # appends `v0 = ...` to lines, one per
    operation

A `Term` is the name of a variable and its element type. Short floats are computed in f32, booleans
are tl.int1. A
Python number takes the type of the other operand, or the default. Rounding and saturation are
those of the
CPU's renderer: halves to even, NaN to the lowest integer, IEEE quotients and square roots. Integer
division by zero
gives 0; a shift beyond the width equals repeated shifts by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from bitwright.backends.gpu.codegen.types import triton_type, widened
from bitwright.errors import CompileError
from bitwright.ir.dtype import DType, bf16, bool_, f4e2m1, f16, f32, f64, i32, i64, u64


@dataclass(frozen=True)
class Term:
    text: str
    dtype: DType

    def __str__(self) -> str:
        return self.text


Operand = Term | float


@dataclass
class Lines:
    """Statements in order; `fresh` numbers their variables."""

    prefix: str = "v"
    lines: list[str] = field(default_factory=list)

    def assign(self, text: str) -> str:
        name = f"{self.prefix}{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        return name

    def text(self, indent: int = 0) -> str:
        return "\n".join(" " * indent + line for line in self.lines)


def number_text(value: float, dtype: DType) -> str:
    """A number as a typed scalar."""
    type_ = triton_type(dtype)
    if dtype.is_float:
        real = float(value)
        if math.isfinite(real):
            return f"tl.full([], {real!r}, {type_})"
        return f'tl.full([], float("{real}"), {type_})'
    whole = bool(value) if dtype == bool_ else int(value)
    if dtype == bool_:
        return f"tl.full([], {int(whole)}, {type_})"
    if not dtype.is_signed and whole < 0:
        whole += 1 << dtype.bits
    return f"tl.full([], {whole}, {type_})"


def _float_only(f32_form: str, f64_form: str = "") -> Callable[..., Term]:
    def render(self: TritonScalars, a: Operand) -> Term:
        (x,) = self._numbers(a)
        if not x.dtype.is_float:
            raise CompileError("the function takes floats", found=x.dtype)
        form = f64_form if x.dtype == f64 else f32_form
        if not form:
            raise CompileError(f"the GPU has no f64 form of {f32_form}")
        return self._made(form.format(x), x.dtype)

    return render


def _whole(f32_form: str, f64_form: str) -> Callable[..., Term]:
    def render(self: TritonScalars, a: Operand) -> Term:
        """Integers are returned unchanged."""
        (x,) = self._numbers(a)
        if not x.dtype.is_float:
            return x
        return self._made((f64_form if x.dtype == f64 else f32_form).format(x), x.dtype)

    return render


def _arithmetic(sign: str) -> Callable[..., Term]:
    def render(self: TritonScalars, a: Operand, b: Operand) -> Term:
        x, y = self._numbers(a, b)
        return self._made(f"{x} {sign} {y}", x.dtype)

    return render


def _bitwise(sign: str) -> Callable[..., Term]:
    def render(self: TritonScalars, a: Operand, b: Operand) -> Term:
        x, y = self._pair(a, b)
        return self._made(f"{x} {sign} {y}", x.dtype)

    return render


def _compare(sign: str) -> Callable[..., Term]:
    def render(self: TritonScalars, a: Operand, b: Operand) -> Term:
        x, y = self._pair(a, b)
        return self._made(f"{x} {sign} {y}", bool_)

    return render


class TritonScalars:
    """Implements the protocol `ops.core.scalar.Scalars` with Triton statements."""

    def __init__(self, lines: Lines, default: DType = f32) -> None:
        self.lines, self.default = lines, widened(default)

    add, sub, mul = _arithmetic("+"), _arithmetic("-"), _arithmetic("*")
    eq, ne = _compare("=="), _compare("!=")
    lt, le, gt, ge = _compare("<"), _compare("<="), _compare(">"), _compare(">=")
    bit_and, bit_or, bit_xor = _bitwise("&"), _bitwise("|"), _bitwise("^")
    floor, ceil = _whole("tl.floor({})", "tl.floor({})"), _whole("tl.ceil({})", "tl.ceil({})")
    round = _whole("bw_round({})", "bw_round_f64({})")
    trunc = _whole("bw_trunc({})", "bw_trunc({})")
    sqrt = _float_only("tl.sqrt_rn({})", "tl.sqrt({})")
    exp, log = _float_only("tl.exp({})", "tl.exp({})"), _float_only("tl.log({})", "tl.log({})")
    sin, cos = _float_only("tl.sin({})", "tl.sin({})"), _float_only("tl.cos({})", "tl.cos({})")
    erf = _float_only("tl.erf({})", "tl.erf({})")
    tan = _float_only("bw_tan({})", "tl.sin({0}) / tl.cos({0})")
    asin, acos, atan = (_float_only(f"bw_{n}({{}})") for n in ("asin", "acos", "atan"))
    sinh, cosh, tanh = (_float_only(f"bw_{n}({{}})") for n in ("sinh", "cosh", "tanh"))
    asinh, acosh, atanh = (_float_only(f"bw_{n}({{}})") for n in ("asinh", "acosh", "atanh"))

    def neg(self, a: Operand) -> Term:
        (x,) = self._numbers(a)
        if x.dtype.is_float:
            return self._made(f"-{x}", x.dtype)
        return self._made(f"{number_text(0, x.dtype)} - {x}", x.dtype)

    def abs(self, a: Operand) -> Term:
        (x,) = self._numbers(a)
        return self._made(f"tl.abs({x})", x.dtype) if x.dtype.is_signed else x

    def max(self, a: Operand, b: Operand) -> Term:
        return self._extreme("max", a, b)

    def min(self, a: Operand, b: Operand) -> Term:
        return self._extreme("min", a, b)

    def _extreme(self, name: str, a: Operand, b: Operand) -> Term:
        x, y = self._numbers(a, b)
        if not x.dtype.is_float:
            return self._made(f"tl.{name}imum({x}, {y})", x.dtype)
        if not isinstance(b, Term) and not math.isnan(b):  # NaN can only be in x
            sign = ">" if name == "max" else "<"
            return self._made(f"tl.where(({x} {sign} {y}) | ({x} != {x}), {x}, {y})", x.dtype)
        all_ = "tl.PropagateNan.ALL"
        return self._made(f"tl.{name}imum({x}, {y}, propagate_nan={all_})", x.dtype)

    def div(self, a: Operand, b: Operand) -> Term:
        x, y = self._numbers(a, b)
        if x.dtype == f64:
            return self._made(f"{x} / {y}", x.dtype)
        if x.dtype.is_float:
            return self._made(f"tl.div_rn({x}, {y})", x.dtype)
        divisor, zero = self._safe_divisor(x, y)
        return self._zeroed(f"{x} // {divisor}", zero, x.dtype)

    def rem(self, a: Operand, b: Operand) -> Term:
        x, y = self._numbers(a, b)
        if x.dtype.is_float:
            raise CompileError("the GPU has no remainder of floats")
        divisor, zero = self._safe_divisor(x, y)
        return self._zeroed(f"{x} % {divisor}", zero, x.dtype)

    def _zeroed(self, text: str, zero: Term, dtype: DType) -> Term:
        found = self._made(text, dtype)
        return self._made(f"tl.where({zero}, {number_text(0, dtype)}, {found})", dtype)

    def _safe_divisor(self, a: Term, b: Term) -> tuple[Term, Term]:
        """(divisor, is it 0): 1 replaces 0, and replaces -1 if the dividend is the lowest
        integer."""
        zero = unsafe = self._made(f"{b} == {number_text(0, b.dtype)}", bool_)
        if a.dtype.is_signed:
            lowest = self._made(f"{a} == {number_text(a.dtype.min, a.dtype)}", bool_)
            minus = self._made(f"{b} == {number_text(-1, b.dtype)}", bool_)
            unsafe = self._made(f"{zero} | ({lowest} & {minus})", bool_)
        one = number_text(1, b.dtype)
        return self._made(f"tl.where({unsafe}, {one}, {b})", b.dtype), zero

    def call(self, helper: str, a: Operand, *constants: float) -> Term:
        """A helper of the library on an f32 term and constants."""
        (x,) = self._numbers(a)
        return self._made(f"{helper}({', '.join([x.text, *map(repr, constants)])})", x.dtype)

    def pow(self, a: Operand, b: Operand) -> Term:
        x, y = self._numbers(a, b)
        if isinstance(b, (int, float)) and b == 2:
            return self._made(f"{x} * {x}", x.dtype)
        if x.dtype != f32:
            raise CompileError("the GPU has powers of f32 only", found=x.dtype)
        return self._made(f"bw_pow({x}, {y})", x.dtype)

    def bit_not(self, a: Operand) -> Term:
        x = self._as_term(a)
        if x.dtype == bool_:
            return self._made(f"{x} == 0", bool_)
        return self._made(f"{x} ^ {number_text(-1, x.dtype)}", x.dtype)

    def shift_left(self, a: Operand, b: Operand) -> Term:
        x, y = self._pair(a, b)
        inside, safe = self._distance(x, y, 0)
        zero = number_text(0, x.dtype)
        return self._made(f"tl.where({inside}, {x} << {safe}, {zero})", x.dtype)

    def shift_right(self, a: Operand, b: Operand) -> Term:
        x, y = self._pair(a, b)
        if x.dtype.is_signed:
            _, safe = self._distance(x, y, x.dtype.bits - 1)
            return self._made(f"{x} >> {safe}", x.dtype)
        inside, safe = self._distance(x, y, 0)
        zero = number_text(0, x.dtype)
        return self._made(f"tl.where({inside}, {x} >> {safe}, {zero})", x.dtype)

    def _distance(self, x: Term, y: Term, outside: int) -> tuple[Term, Term]:
        """Whether a distance is inside the width, and the distance, replaced where it is not."""
        last = number_text(x.dtype.bits - 1, y.dtype)
        text = f"{y} <= {last}"
        if y.dtype.is_signed:
            text = f"({text}) & ({y} >= {number_text(0, y.dtype)})"
        inside = self._made(text, bool_)
        other = number_text(outside, y.dtype)
        return inside, self._made(f"tl.where({inside}, {y}, {other})", y.dtype)

    def select(self, condition: Operand, a: Operand, b: Operand) -> Term:
        mask = self._as_term(condition, bool_)
        if mask.dtype != bool_:
            mask = self._made(f"{mask} != 0", bool_)
        x, y = self._pair(a, b)
        return self._made(f"tl.where({mask}, {x}, {y})", x.dtype)

    def requantize(
        self, a: Operand, zero: Operand | None, highest: Operand | None, to: DType, bounded: bool
    ) -> Term:
        """Clamped as floats between integers, then rounded: rounding cannot leave the range."""
        x = self._as_term(a, f32)
        if highest is not None:
            high = self._as_term(highest, x.dtype)
            x = self._made(f"tl.where({high} < {x}, {high}, {x})", x.dtype)
        bounds = [number_text(float(bound), x.dtype) for bound in (to.min, to.max)]
        offset: Term | None = None
        if isinstance(zero, Term):
            offset = self._made(f"{zero}.to(tl.int32)", i32)
            moved = self._made(f"{offset}.to({triton_type(x.dtype)})", x.dtype)
            bounds = [f"({bound} - {moved})" for bound in bounds]
        elif zero is not None:
            offset = Term(number_text(zero, i32), i32)
            bounds = [number_text(bound - float(zero), x.dtype) for bound in (to.min, to.max)]
        low, high_ = bounds
        above = self._made(f"tl.where({x} > {low}, {x}, {low})", x.dtype)  # NaN gives the lowest
        inside = self._made(f"tl.where({above} < {high_}, {above}, {high_})", x.dtype)
        form = "bw_round_f64({}).to(tl.int32)" if x.dtype == f64 else "bw_whole_small({})"
        whole = self._made(form.format(inside), i32)
        if offset is not None:
            whole = self._made(f"{whole} + {offset}", i32)
        return self._made(f"{whole}.to({triton_type(to)})", to)

    # conversions

    def result(self, a: Operand, dtype: DType) -> Term:
        """The result of a scalar form in the computed type of the op's result."""
        x = self._as_term(a)
        wide = widened(dtype)
        if x.dtype == wide:
            return x
        return self._converted(x, wide)

    def cast(self, a: Operand, dtype: DType) -> Term:
        """The term in another type, as the op `cast` defines it."""
        x, to = self._as_term(a), widened(dtype)
        if f4e2m1 in (x.dtype, to) and x.dtype != to:
            raise CompileError("the GPU has no conversion of f4e2m1")
        if x.dtype.is_float and to.is_integer:
            return self._truncated(x, to)
        found = x if x.dtype == to else self._converted(x, to)
        if dtype in (f16, bf16):  # rounded to the storage type
            half = self._made(f"{found}.to({triton_type(dtype)})", dtype)
            return self._made(f"{half}.to(tl.float32)", f32)
        return found

    def _converted(self, x: Term, to: DType) -> Term:
        if to == bool_:
            return self._made(f"{x} != {number_text(0, x.dtype)}", bool_)
        return self._made(f"{x}.to({triton_type(to)})", to)

    def _truncated(self, x: Term, to: DType) -> Term:
        """A float truncated; values outside i32 (for short types) or i64 become the minimum."""
        if to == u64:
            raise CompileError("the GPU has no cast of floats to u64")
        middle = i32 if to.bits < 32 or to == i32 else i64
        limit = 2.0 ** (middle.bits - 1)
        low = -limit - 1.0 if x.dtype == f64 and middle is i32 else -limit
        sign = ">" if low < -limit else ">="
        low_text, high_text = number_text(low, x.dtype), number_text(limit, x.dtype)
        fits = self._made(f"({x} {sign} {low_text}) & ({x} < {high_text})", bool_)
        type_ = triton_type(middle)
        safe = self._made(f"tl.where({fits}, {x}, {number_text(0.0, x.dtype)})", x.dtype)
        lowest = number_text(middle.min, middle)
        whole = self._made(f"tl.where({fits}, {safe}.to({type_}), {lowest})", middle)
        return whole if to == middle else self._made(f"{whole}.to({triton_type(to)})", to)

    # operands

    def _made(self, text: str, dtype: DType) -> Term:
        return Term(self.lines.assign(text), dtype)

    def _as_term(self, a: Operand, dtype: DType | None = None) -> Term:
        if isinstance(a, Term):
            return a
        dtype = dtype or self.default
        return Term(number_text(a, dtype), dtype)

    def _pair(self, a: Operand, b: Operand) -> tuple[Term, Term]:
        """Both at one type: a number takes the type of the term, a boolean becomes a number."""
        if not isinstance(a, Term) and not isinstance(b, Term):
            return self._as_term(a), self._as_term(b)
        if not isinstance(a, Term):
            second, first = self._pair(b, a)
            return first, second
        if not isinstance(b, Term):
            if a.dtype == bool_ and not isinstance(b, bool) and b not in (0, 1):
                a = self.cast(a, self.default)
            return a, self._as_term(b, a.dtype)
        if a.dtype == b.dtype:
            return a, b
        if a.dtype == bool_:
            return self.cast(a, b.dtype), b
        if b.dtype == bool_:
            return a, self.cast(b, a.dtype)
        raise CompileError("operands have different element types", expected=a.dtype, found=b.dtype)

    def _numbers(self, *operands: Operand) -> tuple[Term, ...]:
        """As `_pair`, with booleans converted to the default type."""
        terms = self._pair(*operands) if len(operands) == 2 else (self._as_term(operands[0]),)
        return tuple(self.cast(t, self.default) if t.dtype == bool_ else t for t in terms)
