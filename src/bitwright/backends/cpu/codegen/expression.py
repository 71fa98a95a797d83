"""An elementwise region as a list of steps, emitted on operands in registers.

    expression = Expression.of(graph)                     # a graph of ops with scalar forms
    results = expression.emit(f, values, lanes)           # one value per output

Kernels inline it at loads (prologue) or stores (epilogue); `kernels.elementwise.elementwise` emits
a standalone kernel. Values are in computed types: f32 for half floats, i1 for booleans. `repr` of
an expression is exact, so it can be part of a kernel's key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.backends.cpu.codegen.emit import Function, Value, computed, storage_type
from bitwright.backends.cpu.codegen.scalars import HalfScalars, LlvmScalars, Term
from bitwright.errors import CompileError
from bitwright.ir.dtype import DType, bool_, f16, f32
from bitwright.ir.graph import Graph, Node
from bitwright.ir.graph import Value as GraphValue
from bitwright.ops.core.registry import get

_ROUNDED_ONCE = frozenset({"add", "sub", "mul", "div"})
_EXACT = frozenset({"relu", "neg", "abs", "maximum", "minimum"})


@dataclass(frozen=True)
class ValueRef:
    """An operand that is an input or an earlier result, by number."""

    number: int


@dataclass(frozen=True)
class Step:
    op: str
    operands: tuple[ValueRef | float | None, ...]
    """References, constant scalars, or None for absent operands."""
    attrs: tuple[tuple[str, Any], ...]
    dtype: DType
    """The element type of the result."""


@dataclass(frozen=True)
class Expression:
    inputs: tuple[DType, ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    """Numbers of inputs (from 0) and steps (from len(inputs) on)."""

    @classmethod
    def of(cls, graph: Graph) -> Expression:
        """The expression of a graph whose nodes all have scalar forms; constants are scalars."""
        numbers = {value: number for number, value in enumerate(graph.inputs)}
        steps: list[Step] = []
        for node in graph.nodes:
            if node.is_boundary:
                continue
            operands = tuple(_operand(value, numbers) for value in node.inputs)
            numbers[node.outputs[0]] = len(graph.inputs) + len(steps)
            steps.append(Step(node.op, operands, _attrs(node), node.outputs[0].dtype))
        return cls(
            tuple(value.dtype for value in graph.inputs),
            tuple(steps),
            tuple(numbers[value] for _, value in graph.outputs),
        )

    @classmethod
    def single(cls, op: str, inputs: Sequence[DType], result: DType, **attrs: Any) -> Expression:
        """One op applied to its operands."""
        places = tuple(ValueRef(number) for number in range(len(inputs)))
        step = Step(op, places, tuple(attrs.items()), result)
        return cls(tuple(inputs), (step,), (len(inputs),))

    @property
    def results(self) -> tuple[DType, ...]:
        known = (*self.inputs, *(step.dtype for step in self.steps))
        return tuple(known[number] for number in self.outputs)

    @property
    def widest_bits(self) -> int:
        """The width of the widest computed type, which determines the lanes of a register."""
        known = (*self.inputs, *(step.dtype for step in self.steps))
        return max((computed(dtype).bits for dtype in known if dtype != bool_), default=8)

    def emit(self, f: Function, values: Sequence[Value], lanes: int) -> list[Value]:
        """The outputs, from one computed value per input; scalars are broadcast."""
        known = self._terms(f, values, lanes)
        return [f.as_value(known[n].value, known[n].value.type.vector(lanes)) for n in self.outputs]

    @property
    def is_exact_half(self) -> bool:
        """Whether computing in f16 gives the same bits as computing in f32 and rounding once.

        The significand of f32 has more than 2p + 2 bits of f16's p, so one sum, difference, product
        or quotient rounds to the same value through f32; all other steps must be exact.
        """
        names = [step.op for step in self.steps]
        rounding = sum(name in _ROUNDED_ONCE for name in names)
        numbers = [o for step in self.steps for o in step.operands if isinstance(o, float)]
        return (
            rounding <= 1
            and all(name in _ROUNDED_ONCE or name in _EXACT for name in names)
            and all(dtype == f16 for dtype in (*self.inputs, *(s.dtype for s in self.steps)))
            and all(math.isnan(x) or float(np.float16(x)) == x for x in numbers)
        )

    def emit_half(self, f: Function, values: Sequence[Value], lanes: int) -> list[Value]:
        """The outputs of an expression that `is_exact_half`, in f16 from f16."""
        e = HalfScalars(f, lanes)
        known = [e.term(value, f16) for value in values]
        for step in self.steps:
            operands = [known[o.number] if isinstance(o, ValueRef) else o for o in step.operands]
            scalar = get(step.op).scalar
            assert scalar is not None
            found = scalar(e, *operands, **get(step.op).call_attrs(dict(step.attrs)))
            known.append(e.result(found, step.dtype))
        return [f.as_value(known[n].value, known[n].value.type.vector(lanes)) for n in self.outputs]

    def _terms(self, f: Function, values: Sequence[Value], lanes: int) -> list[Term]:
        """Inputs and the results of all steps."""
        scalars = LlvmScalars(f, lanes=lanes)
        known = [
            scalars.term(value, dtype) for value, dtype in zip(values, self.inputs, strict=True)
        ]
        for step in self.steps:
            known.append(_emit_step(f, step, known, lanes))
        return known

    @property
    def narrows(self) -> DType | None:
        """The 8-bit result type if the last step is a bounded `requantize`, else None."""
        if not self.steps or self.outputs != (len(self.inputs) + len(self.steps) - 1,):
            return None
        last = self.steps[-1]
        is_plain = last.op == "requantize" and dict(last.attrs).get("bounded")
        return last.dtype if is_plain and last.dtype.bits == 8 else None

    def emit_wide(self, f: Function, values: Sequence[Value], lanes: int) -> Value:
        """The result of an expression that `narrows`, in i32 before saturation."""
        before = Expression(self.inputs, self.steps[:-1], ())
        known = before._terms(f, values, lanes)
        last = self.steps[-1]
        operands = [known[o.number] if isinstance(o, ValueRef) else o for o in last.operands]
        x, zero, highest = (*operands, None, None)[:3]
        assert x is not None
        return LlvmScalars(f, f32, lanes).rounded_qvalues(x, zero, highest, last.dtype, True)


def _emit_step(f: Function, step: Step, known: Sequence[Term], lanes: int) -> Term:
    operands = [known[o.number] if isinstance(o, ValueRef) else o for o in step.operands]
    typed = next((o.dtype for o in operands if isinstance(o, Term)), step.dtype)
    default = typed if step.dtype == bool_ else step.dtype
    e = LlvmScalars(f, default, lanes)
    if step.op == "cast":
        x = operands[0]
        assert x is not None
        return e.cast(x, step.dtype)
    opdef = get(step.op)
    if opdef.scalar is None:
        raise CompileError(f"op {step.op!r} has no scalar form")
    return e.result(opdef.scalar(e, *operands, **opdef.call_attrs(dict(step.attrs))), step.dtype)


def _attrs(node: Node) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(node.attrs.items()))


def _operand(
    value: GraphValue | None, numbers: Mapping[GraphValue, int]
) -> ValueRef | float | bool | None:
    if value is None:
        return None
    if value in numbers:
        return ValueRef(numbers[value])
    held = np.asarray(value.node.attrs.get("value"))
    if value.node.op != "constant" or held.size != 1:
        raise CompileError(
            "an expression can hold only constant scalars", found=f"{value.node.op} {value}"
        )
    read = float if value.dtype.is_float else bool if value.dtype == bool_ else int
    return read(held.reshape(-1)[0])


def load_computed(f: Function, dtype: DType, lanes: int, *where: Any, **how: Any) -> Value:
    """`f.load` of stored elements, converted to their computed type."""
    value = f.load(storage_type(dtype).vector(lanes), *where, **how)
    return from_stored(f, value, dtype)


def from_stored(f: Function, value: Value, dtype: DType) -> Value:
    return f.convert(value, computed(dtype))


def to_stored(f: Function, value: Value, dtype: DType) -> Value:
    """A computed value in its storage type."""
    return f.convert(value, storage_type(dtype))
