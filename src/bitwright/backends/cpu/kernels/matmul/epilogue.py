"""Epilogues: the computation between a sum and its store."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bitwright.backends.cpu.codegen.emit import Kernel, Value
from bitwright.backends.cpu.codegen.expression import Expression
from bitwright.backends.cpu.lowering.region import Part
from bitwright.ir.dtype import DType
from bitwright.ir.dtype import f32 as real

EmitEpilogue = Callable[[Kernel, Value, Value, Value, Value | None], Value]
EmitOperands = Callable[[Kernel, Value, Value, Value, Value | None], list[Value]]


@dataclass(frozen=True)
class Epilogue:
    """The computation between a sum and its store.

    `emit(f, value, row, column, mask)` returns the value to store for a vector of columns that
    starts at `column`; mask is None where all columns exist. It reads its slots from f.args.
    """

    emit: EmitEpilogue
    pointers: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    is_light: bool = True
    """Whether it is short enough to be unrolled for every vector of a full tile."""
    result: DType = real
    """The type of the stored result."""
    narrowest: int = 32
    """Bits of the narrowest element that is read or stored."""
    wide: EmitEpilogue | None = None
    """As `emit` for 8-bit results, but in i32 before saturation (`kernels.elementwise.narrow`)."""
    streams: int = 0
    """Results of at least as many bytes use non-temporal stores; 0 for never
    (`kernels.elementwise.streaming`)."""


LIGHT_STEPS = 6
_SIMPLE = frozenset(
    {"add", "sub", "mul", "relu", "clip", "maximum", "minimum", "neg", "abs", "hard_swish"}
)


def is_light(expression: Expression) -> bool:
    """Whether an epilogue is a few additions, products and comparisons, without transcendental
    functions."""
    steps = [step for step in expression.steps if step.op not in ("cast", "requantize")]
    return len(steps) <= LIGHT_STEPS and all(step.op in _SIMPLE for step in steps)


def identity(_f: Kernel, value: Value, _row: Value, _column: Value, _mask: Value | None) -> Value:
    return value


NO_EPILOGUE = Epilogue(identity)


def fused_epilogue(
    after: Part,
    operands: EmitOperands,
    lanes: int,
    pointers: Iterable[str],
    sizes: Iterable[str],
    types: Iterable[DType],
    streams: int = 0,
) -> Epilogue:
    """The epilogue that evaluates the fused nodes behind a product.

    `operands` emits their inputs, the sum first; `types` are those of the inputs in memory.
    """

    def emit(f: Kernel, value: Value, row: Value, column: Value, mask: Value | None) -> Value:
        return after.evaluate(f, operands(f, value, row, column, mask), lanes)

    def emit_wide(f: Kernel, value: Value, row: Value, column: Value, mask: Value | None) -> Value:
        return after.evaluate_wide(f, operands(f, value, row, column, mask), lanes)

    return Epilogue(
        emit,
        tuple(pointers),
        tuple(sizes),
        is_light(after.expression),
        after.dtype,
        min(dtype.bits for dtype in (after.dtype, *types)),
        emit_wide if after.expression.narrows else None,
        streams,
    )
