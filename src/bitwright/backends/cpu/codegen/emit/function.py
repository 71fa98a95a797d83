"""A function under construction, and the kernel: a function with named argument slots.

with module.kernel("scale", Signature(("x", "y"), ("count",), f32=("factor",))) as f:
    x, y, count = f.args.pointer("x"), f.args.pointer("y"), f.args.size("count")
    lanes = f.target.lanes(32)
    begin, end = f.share(count, lanes)
    with f.loop(begin, end, lanes) as loop:
        mask = f.mask(end - loop.index, lanes)
        v = f.load(f32.vector(lanes), x, loop.index, mask=mask)
        f.store(v * f.args.scalar("factor"), y, loop.index, mask=mask)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from bitwright.backends.cpu.codegen.emit.args import Arguments
from bitwright.backends.cpu.codegen.emit.core import Operand, Value
from bitwright.backends.cpu.codegen.emit.subnormals import Subnormals
from bitwright.backends.cpu.codegen.emit.types import Type, i64, ptr, void
from bitwright.backends.cpu.codegen.signature import SLOT_BYTES, Signature

if TYPE_CHECKING:
    from bitwright.backends.cpu.codegen.emit.module import Module


class Function(Subnormals):
    """Emits its body inside a `with` block; a void function returns at the end."""

    def __init__(
        self,
        module: Module,
        name: str,
        result: Type,
        params: Sequence[tuple[str, Type]],
        *,
        attributes: Sequence[str] = (),
        internal: bool = False,
        inline: bool = False,
    ) -> None:
        super().__init__(module, name)
        self.result, self.internal, self.inline = result, internal, inline
        self.params = tuple(Value(self, type_, f"%{name}") for name, type_ in params)
        notes = attributes or [""] * len(params)
        self._header = ", ".join(
            " ".join(filter(None, (value.type.text, note, value.text)))
            for value, note in zip(self.params, notes, strict=True)
        )

    def __enter__(self) -> Function:
        return self

    def _close(self) -> None:
        if self.result is void:
            self.emit_void("ret void")
        self.module.add(self)

    def ret(self, value: Value) -> None:
        """Return a value; the last instruction of a non-void function."""
        self.emit_void(f"ret {value.type.text} {value.text}")

    def call(self, function: Function, *operands: Operand) -> Value:
        """Call another function of the module."""
        values = [
            self.as_value(operand, param.type)
            for operand, param in zip(operands, function.params, strict=True)
        ]
        return self._call(function.result, f"{function.result.text} @{function.name}", values)

    def call_pointer(
        self, pointer: Value, result: Type, *operands: Value, variadic_from: int = -1
    ) -> Value:
        """Call through an address; `variadic_from` is the number of fixed operands in C."""
        signature = result.text
        if variadic_from >= 0:
            named = [operand.type.text for operand in operands[:variadic_from]]
            signature = f"{result.text} ({', '.join([*named, '...'])})"
        return self._call(result, f"{signature} {pointer.text}", operands)

    def _call(self, result: Type, callee: str, operands: Sequence[Value]) -> Value:
        text = f"call {callee}({self.listed(operands)})"
        if result is void:
            self.emit_void(text)
            return self.undefined(void)
        return self.emit(result, text)

    def vectors(
        self,
        begin: Operand,
        end: Operand,
        lanes: int,
        body: Callable[..., Sequence[Value] | None],
        carry: Sequence[Value] = (),
        unroll: int = 1,
    ) -> tuple[Value, ...]:
        """Loop over begin … end in vectors of `lanes` elements, with a masked tail.

        `body(index, mask, *carried)` returns the new carried values. It is emitted for whole
        vectors with mask None, and once for the tail with a mask. `begin <= end`.
        """
        known = isinstance(begin, int) and isinstance(end, int)
        rest = self.index((end - begin) % lanes) if known else None  # type: ignore[operator]
        begin, end = self.index(begin), self.index(end)
        if unroll > 1:
            stop = self.sub(end, self.urem(self.sub(end, begin), lanes * unroll))
            with self.loop(begin, stop, lanes * unroll, carry) as loop:
                values = loop.carried
                for turn in range(unroll):
                    values = tuple(body(loop.index + turn * lanes, None, *values) or ())
                loop.next(*values)
            begin, carry = self.max(begin, stop), loop.results
        stop = self.sub(end, self.urem(self.sub(end, begin), lanes))
        with self.loop(begin, stop, lanes, carry) as loop:
            loop.next(*(body(loop.index, None, *loop.carried) or ()))
        if lanes == 1:
            return loop.results
        with self.if_(self.lt(stop, end), loop.results) as branch:
            mask = self.mask(self.sub(end, stop) if rest is None else rest, lanes)
            self.partial_masks.add(mask.text)
            branch.next(*(body(stop, mask, *loop.results) or ()))
        return branch.results

    def text(self) -> str:
        linkage = "internal " if self.internal else ""
        notes = "alwaysinline #0" if self.inline else "#0"
        define = f"define {linkage}{self.result.text} @{self.name}({self._header}) {notes} {{"
        return "\n".join([define, "entry:", *self._prologue, *self._lines, "}"])


class Kernel(Function):
    """void kernel(ptr args, i64 thread, i64 threads), with its named slots."""

    def __init__(self, module: Module, name: str, signature: Signature) -> None:
        size = max(1, len(signature.slots)) * SLOT_BYTES
        attributes = (f"noalias readonly captures(none) align 8 dereferenceable({size})", "", "")
        params = (("args", ptr), ("thread", i64), ("threads", i64))
        super().__init__(module, name, void, params, attributes=attributes)
        table, self.thread, self.threads = self.params
        self.args = Arguments(self, table, signature)

    def __enter__(self) -> Kernel:
        return self

    def share(self, count: Operand, unit: int = 1) -> tuple[Value, Value]:
        """This thread's range of `count` items, split at multiples of `unit`.

        Every item belongs to exactly one thread; ranges of consecutive threads are consecutive.
        """
        count = self.index(count)
        pieces = count if unit == 1 else self.udiv(self.add(count, unit - 1), unit)
        begin = self.udiv(self.mul(pieces, self.thread), self.threads)
        end = self.udiv(self.mul(pieces, self.add(self.thread, 1)), self.threads)
        if unit == 1:
            return begin, end
        return self.mul(begin, unit), self.min(self.mul(end, unit), count)
