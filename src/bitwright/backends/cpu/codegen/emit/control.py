"""Structured control flow with loop-carried values.

    with f.loop(0, n, 16, carry=(total,)) as loop:           # for i in range(0, n, 16)
        x = f.load(f32x16, p, loop.index)
        loop.next(loop.carried[0] + x)                       # the last thing in the body
    total = loop.results[0]                                  # `total` itself if n <= 0

    with f.if_(condition, carry=(y,)) as branch:
        branch.next(f.neg(y))
    with branch.else_():                                     # optional; without it y passes through
        branch.next(f.abs(y))
    y = branch.results[0]

    with f.do_while(carry=(x,)) as loop:
        x = f.lshr(loop.carried[0], 1)
        loop.next(x, again=f.ne(x, 0))

A loop whose trip count is known at emission time is a Python loop, and is thereby unrolled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bitwright.backends.cpu.codegen.emit.arithmetic import Arithmetic
from bitwright.backends.cpu.codegen.emit.core import Operand, Region, Value
from bitwright.backends.cpu.codegen.emit.types import i64
from bitwright.errors import CompileError


class _Carrier(Region):
    """Values passed to `next`, and the phi nodes that receive them."""

    def __init__(self, f: Arithmetic, carry: Sequence[Value]) -> None:
        self.f, self._initial = f, tuple(carry)
        self.results: tuple[Value, ...] = ()
        self._next: tuple[Value, ...] | None = None

    def next(self, *values: Operand) -> None:
        """Set the next carried values; called once, at the end of the body."""
        if self._next is not None or len(values) != len(self._initial):
            raise CompileError(
                "next() must be called once, with one value for each carried value",
                where=f"function {self.f.name!r}",
                expected=len(self._initial),
                found=len(values),
            )
        self._next = tuple(
            self.f.as_value(value, start.type)
            for value, start in zip(values, self._initial, strict=True)
        )

    def _next_values(self) -> tuple[Value, ...]:
        if self._next is None and self._initial:
            raise CompileError(
                "a body that carries values must call next()", where=f"function {self.f.name!r}"
            )
        return self._next or ()

    def _phis(self, count: int) -> int:
        """Reserve lines for phi nodes at the start of a block; return the first line number."""
        at = len(self.f._lines)
        self.f._lines.extend([""] * count)
        return at

    def _fill(
        self, at: int, values: Sequence[Value], *sources: tuple[Sequence[Value], str]
    ) -> None:
        for position, value in enumerate(values):
            pairs = ", ".join(f"[ {given[position].text}, %{block} ]" for given, block in sources)
            self.f._lines[at + position] = f"  {value.text} = phi {value.type.text} {pairs}"

    def _fresh(self, values: Sequence[Value]) -> tuple[Value, ...]:
        return tuple(self.f.value(value.type, f"%{self.f.label('p')}") for value in values)


class Loop(_Carrier):
    """for index in range(start, stop, step), rotated: a guard, then the body with its exit test."""

    def __init__(
        self,
        f: Arithmetic,
        start: Operand,
        stop: Operand,
        step: Operand,
        carry: Sequence[Value],
        nonempty: bool,
    ) -> None:
        super().__init__(f, carry)
        self._start, self._stop, self._step = f.index(start), f.index(stop), f.index(step)
        self._nonempty = nonempty

    def __enter__(self) -> Loop:
        f = self.f
        self._body, self._exit = f.label("loop"), f.label("done")
        if self._nonempty:
            f.emit_void(f"br label %{self._body}")
        else:
            enters = f.lt(self._start, self._stop)
            f.emit_void(f"br i1 {enters.text}, label %{self._body}, label %{self._exit}")
        self._before, self._known = f.block, f.known()
        f.start_block(self._body)
        self.index, *carried = self._fresh((self._start, *self._initial))
        self.carried = tuple(carried)
        self._at = self._phis(1 + len(carried))
        return self

    def _close(self) -> None:
        f, values = self.f, self._next_values()
        after = f.emit(i64, f"add nuw nsw i64 {self.index.text}, {self._step.text}")
        again = f.lt(after, self._stop)
        f.emit_void(f"br i1 {again.text}, label %{self._body}, label %{self._exit}")
        last = f.block
        self._fill(
            self._at,
            (self.index, *self.carried),
            ((self._start, *self._initial), self._before),
            ((after, *values), last),
        )
        f.forget(self._known)
        f.start_block(self._exit)
        if self._nonempty:
            self.results = values
            return
        self.results = self._fresh(self._initial)
        at = self._phis(len(self.results))
        self._fill(at, self.results, (self._initial, self._before), (values, last))


class DoWhile(_Carrier):
    """A body that runs once, then repeats while `again` holds."""

    def __enter__(self) -> DoWhile:
        f = self.f
        self._body = f.label("loop")
        f.emit_void(f"br label %{self._body}")
        self._before = f.block
        f.start_block(self._body)
        self.carried = self._fresh(self._initial)
        self._at = self._phis(len(self.carried))
        self._again: Value | None = None
        return self

    def next(self, *values: Operand, again: Value | None = None) -> None:
        super().next(*values)
        self._again = again

    def _close(self) -> None:
        if self._again is None:
            raise CompileError("a do_while body must call next(…, again=condition)")
        f, values = self.f, self._next_values()
        done = f.label("done")
        f.emit_void(f"br i1 {self._again.text}, label %{self._body}, label %{done}")
        self._fill(self._at, self.carried, (self._initial, self._before), (values, f.block))
        f.start_block(done)
        self.results = values


class Branch(_Carrier):
    """An if-else; each branch may pass new values for the carried ones."""

    def __init__(self, f: Arithmetic, condition: Value, carry: Sequence[Value]) -> None:
        super().__init__(f, carry)
        self._condition = condition

    def __enter__(self) -> Branch:
        f = self.f
        then, self._else, self._end = f.label("then"), f.label("else"), f.label("end")
        f.emit_void(f"br i1 {self._condition.text}, label %{then}, label %{self._else}")
        self._known = f.known()
        f.start_block(then)
        return self

    def _close(self) -> None:
        f = self.f
        self._then_values, self._then_block = self._next_values(), f.block
        f.emit_void(f"br label %{self._end}")
        f.forget(self._known)
        f.start_block(self._else)
        self.results = self._fresh(self._initial)
        self._merge(self._initial)

    @contextmanager
    def else_(self) -> Iterator[None]:
        """The else branch; it must directly follow the `with if_` block."""
        f = self.f
        if len(f._lines) != self._length:
            raise CompileError("else_() must directly follow its if_")
        del f._lines[self._joint :]
        f.block, self._next = self._else, None
        yield
        f.forget(self._known)
        self._merge(self._next if self._next is not None else self._initial)

    def _merge(self, values: Sequence[Value]) -> None:
        f = self.f
        self._joint, last = len(f._lines), f.block
        f.emit_void(f"br label %{self._end}")
        f.start_block(self._end)
        at = self._phis(len(self.results))
        self._fill(at, self.results, (self._then_values, self._then_block), (values, last))
        self._length = len(f._lines)


class Control(Arithmetic):
    def loop(
        self,
        start: Operand,
        stop: Operand,
        step: Operand = 1,
        carry: Sequence[Value] = (),
        nonempty: bool = False,
    ) -> Loop:
        """for index in range(start, stop, step); `nonempty` guarantees at least one iteration."""
        return Loop(self, start, stop, step, carry, nonempty)

    def do_while(self, carry: Sequence[Value] = ()) -> DoWhile:
        return DoWhile(self, carry)

    def if_(self, condition: Value, carry: Sequence[Value] = ()) -> Branch:
        return Branch(self, condition, carry)
