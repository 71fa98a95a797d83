"""Values, and the instruction list of a function under construction.

A `Value` is the text of an operand and its type. Python operators emit instructions:

    + - *  on integers and floats     /  on floats       & | ^ <<  on integers and masks
    < <= > >=  signed or ordered      ptr + n  offsets a pointer by n bytes

A Python number takes the type of the other operand; a scalar is broadcast to a vector operand.
Arithmetic is IEEE 754: nothing is contracted or reordered unless the kernel uses `fma`.

Common subexpressions whose definition dominates the current block are reused: kernels request the
same addresses and masks often, and local reuse is cheaper than LLVM's elimination.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from bitwright.backends.cpu.codegen.emit.types import Type, constant, i64, ptr
from bitwright.errors import CompileError
from bitwright.target import Target

if TYPE_CHECKING:
    from bitwright.backends.cpu.codegen.emit.function import Function
    from bitwright.backends.cpu.codegen.emit.module import Module


def _operator(name: str, reflected: bool = False) -> Callable[[Value, Operand], Value]:
    def emit(self: Value, other: Operand) -> Value:
        function: Callable[[Operand, Operand], Value] = getattr(self.f, name)
        return function(other, self) if reflected else function(self, other)

    return emit


class Value:
    """An operand: an SSA name, a parameter or a constant."""

    __slots__ = ("f", "text", "type")

    def __init__(self, f: Function, type_: Type, text: str) -> None:
        self.f, self.type, self.text = f, type_, text

    def __add__(self, other: Operand) -> Value:
        if self.type is ptr:
            return self.f.offset(self, other)
        return self.f.add(self, other)

    __radd__ = _operator("add", reflected=True)
    __sub__, __rsub__ = _operator("sub"), _operator("sub", reflected=True)
    __mul__, __rmul__ = _operator("mul"), _operator("mul", reflected=True)
    __truediv__, __rtruediv__ = _operator("div"), _operator("div", reflected=True)
    __and__, __or__, __xor__ = _operator("and_"), _operator("or_"), _operator("xor")
    __lshift__ = _operator("shl")
    __lt__, __le__ = _operator("lt"), _operator("le")
    __gt__, __ge__ = _operator("gt"), _operator("ge")

    def __neg__(self) -> Value:
        return self.f.neg(self)

    def __invert__(self) -> Value:
        return self.f.not_(self)

    def __bool__(self) -> bool:
        raise CompileError(
            "an emitted value has no truth value in Python", hint="Use f.if_, f.select or f.and_."
        )

    def __repr__(self) -> str:
        return f"{self.type} {self.text}"


Operand = Value | float
_REPEATABLE = frozenset({
    "add", "and", "ashr", "bitcast", "getelementptr", "icmp", "insertelement", "lshr", "mul", "or",
    "ptrtoint", "select", "sext", "shl", "shufflevector", "sub", "trunc", "udiv", "urem", "xor",
    "zext",
})  # fmt: skip
"""Pure instructions on integers, addresses and lanes: equal operands give equal results."""
_REPEATABLE_CALLS = tuple(
    f"call {type_} @llvm.{name}"
    for type_ in ("i32", "i64")
    for name in ("smax", "smin", "umax", "umin", "x86.bmi.bzhi")
)


class Region:
    """Code emitted inside a `with` block; `_close` ends it unless an exception leaves the block."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is None:
            self._close()

    def _close(self) -> None:
        raise NotImplementedError


class Core(Region):
    """The lines of one function, the current block, and operand conversion."""

    def __init__(self, module: Module, name: str) -> None:
        self.module, self.name = module, name
        self.target: Target = module.target
        self._lines: list[str] = []
        self._prologue: list[str] = []
        """The first lines of the entry block, which dominate every use."""
        self._known: dict[str, Value] = {}
        """Values by instruction text; only those whose definition dominates the block."""
        self._bits: dict[str, Value] = {}
        """The source of each bitcast value, by its text."""
        self.partial_masks: set[str] = set()
        """Texts of masks that are never true in every lane."""
        self._count = 0
        self.block = "entry"
        """The label of the current block."""
        self.flushes = False
        """Whether subnormal numbers are treated as zeros."""

    def comment(self, text: str) -> None:
        """Append a comment to the text."""
        self._lines.append(f"  ; {text}")

    def emit(self, type_: Type, text: str) -> Value:
        """The value of an instruction; appends it unless an equal one is available."""
        found = self._known.get(text)
        if found is not None:
            return found
        self._count += 1
        name = f"%v{self._count}"
        self._lines.append(f"  {name} = {text}")
        value = self.value(type_, name)
        if text[: text.find(" ")] in _REPEATABLE or text.startswith(_REPEATABLE_CALLS):
            self._known[text] = value
        return value

    def known(self) -> int:
        """The number of available values before a conditional region, for `forget`."""
        return len(self._known)

    def forget(self, known: int) -> None:
        """Drop values defined in a conditional region: they do not dominate what follows."""
        while len(self._known) > known:
            self._known.popitem()

    def emit_prologue(self, type_: Type, text: str) -> Value:
        """An instruction of the entry block, before everything emitted so far."""
        self._count += 1
        name = f"%v{self._count}"
        self._prologue.append(f"  {name} = {text}")
        return self.value(type_, name)

    def emit_void(self, text: str) -> None:
        self._lines.append(f"  {text}")

    def label(self, name: str) -> str:
        """A fresh block name."""
        self._count += 1
        return f"{name}{self._count}"

    def start_block(self, label: str) -> None:
        self._lines.append(f"{label}:")
        self.block = label

    # operands

    def value(self, type_: Type, text: str) -> Value:
        """A value of this function with the given text."""
        return Value(cast("Function", self), type_, text)

    def const(self, type_: Type, number: float) -> Value:
        """A constant, the same in every lane."""
        return self.value(type_, constant(type_, number))

    def const_vector(self, scalar: Type, numbers: Any) -> Value:
        """A vector constant with one number per lane."""
        texts = [constant(scalar, number) for number in numbers]
        if len(texts) == 1:
            return self.value(scalar, texts[0])
        body = ", ".join(f"{scalar.text} {text}" for text in texts)
        return self.value(scalar.vector(len(texts)), f"<{body}>")

    def undefined(self, type_: Type) -> Value:
        return self.value(type_, "poison")

    def as_value(self, operand: Operand, type_: Type) -> Value:
        """The operand as a value of exactly this type; numbers and scalars are broadcast."""
        if not isinstance(operand, Value):
            return self.const(type_, operand)
        if operand.type is type_:
            return operand
        if operand.type is type_.scalar:
            return self.splat(operand, type_.lanes)
        raise CompileError(
            "an operand has the wrong type",
            where=f"function {self.name!r}",
            expected=type_,
            found=operand.type,
        )

    def index(self, operand: Operand) -> Value:
        """The operand as an i64."""
        return self.as_value(operand, i64)

    def pair(self, a: Operand, b: Operand) -> tuple[Value, Value]:
        """Both operands at the wider of their types."""
        if isinstance(a, Value):
            if isinstance(b, Value) and b.type.lanes > a.type.lanes:
                return self.as_value(a, b.type), b
            return a, self.as_value(b, a.type)
        if isinstance(b, Value):
            return self.as_value(a, b.type), b
        raise CompileError("at least one operand must be an emitted value")

    def splat(self, scalar: Value, lanes: int) -> Value:
        """The scalar in every lane of a vector."""
        if lanes == 1:
            return scalar
        type_ = scalar.type.vector(lanes)
        if scalar.text[0] not in "%@":
            return Value(scalar.f, type_, f"splat ({self.listed([scalar])})")
        seed = self.emit(type_, f"insertelement {type_} poison, {self.listed([scalar])}, i64 0")
        order = f"<{lanes} x i32> zeroinitializer"
        return self.emit(type_, f"shufflevector {type_} {seed.text}, {type_} poison, {order}")

    def opaque(self, value: Value) -> Value:
        """The same integer or pointer with its definition hidden from LLVM.

        LLVM then keeps it in its own register instead of deriving addresses from each other in a
        chain of dependent additions.
        """
        type_ = value.type
        return self.emit(type_, f'call {type_.text} asm "", "=r,0"({type_.text} {value.text})')

    def intrinsic(self, name: str, result: Type, *operands: Value) -> Value:
        """Call an LLVM intrinsic by its full name."""
        types = ", ".join(operand.type.text for operand in operands)
        self.module.declare(name, f"declare {result.text} @{name}({types})")
        return self.emit(result, f"call {result.text} @{name}({self.listed(operands)})")

    def intrinsic_void(self, name: str, *operands: Value) -> None:
        types = ", ".join(operand.type.text for operand in operands)
        self.module.declare(name, f"declare void @{name}({types})")
        self.emit_void(f"call void @{name}({self.listed(operands)})")

    @staticmethod
    def listed(operands: Any) -> str:
        return ", ".join([f"{operand.type.text} {operand.text}" for operand in operands])
