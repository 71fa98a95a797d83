"""Matrix products, with float, integer and quantized weights."""

from __future__ import annotations

import string
from typing import Any

from bitwright.export.onnx.forms import reduce, slice_axis, squeeze, transpose, unsqueeze
from bitwright.export.onnx.functions import call
from bitwright.export.onnx.mapping import Ref, Scope, exports
from bitwright.export.onnx.mappings.integer_conv import eight_bits
from bitwright.export.onnx.mappings.quantization import dequantize
from bitwright.ir.dtype import DType, f32, i32, i64
from bitwright.ops.math.einsum import parse_equation


def multiply(e: Scope, x: Ref, w: Ref) -> Ref:
    """x @ w; integers of up to 8 bits give i32, of 16 bits i64."""
    if not (x.element.is_integer and w.element.is_integer):
        return e.MatMul(x, w)
    bits = max(x.element.bits, w.element.bits)
    if bits <= 8:
        return e.MatMulInteger(e.cast(x, eight_bits(x.element)), e.cast(w, eight_bits(w.element)))
    if bits <= 16:
        return e.MatMul(e.cast(x, i64), e.cast(w, i64))
    return e.MatMul(x, w)


@exports("matmul")
def matmul(e: Scope, x: Ref, w: Ref) -> Ref:
    return multiply(e, x, w)


@exports("lora_matmul")
def lora_matmul(e: Scope, x: Ref, w: Ref, a: Ref, b: Ref, bias: Ref | None, scale: float) -> Ref:
    update = e.MatMul(e.MatMul(x, a), b)
    if scale != 1:
        update = e.Mul(update, e.scalar(scale, x))
    y = e.Add(e.MatMul(x, w), update)
    return y if bias is None else e.Add(y, bias)


@exports("einsum")
def einsum(e: Scope, *xs: Ref, equation: str) -> Ref:
    """Einsum. In ONNX `...` is the same number of axes in every operand that has it, and runtimes
    require it in the result, so summed axes get letters."""
    if "..." in equation and "..." not in (equation.partition("->")[2] or "..."):
        return e.Einsum(*xs, equation=_with_letters(equation, [x.rank for x in xs]))
    terms = equation.replace(" ", "").partition("->")[0].split(",")
    hidden = [x.rank - len(term.replace("...", "")) for x, term in zip(xs, terms, strict=True)]
    aligned = [
        unsqueeze(e, x, *range(term.index("..."), term.index("...") + max(hidden) - count))
        if "..." in term and count < max(hidden)
        else x
        for x, term, count in zip(xs, terms, hidden, strict=True)
    ]
    return e.Einsum(*aligned, equation=equation)


def _with_letters(equation: str, ranks: list[int]) -> str:
    operands, result = parse_equation(equation, ranks)
    free = iter(sorted(set(string.ascii_letters) - set(equation)))
    letters: dict[str, str] = {}
    for label in (label for labels in operands for label in labels):
        if label not in letters:
            letters[label] = label if label.isalpha() else next(free)
    terms = ["".join(letters[label] for label in labels) for labels in (*operands, result)]
    return f"{','.join(terms[:-1])}->{terms[-1]}"


@exports("grouped_matmul", widens=False)
def grouped_matmul(e: Scope, x: Ref, w: Ref, counts: Ref) -> Ref:
    """A function, which the importer restores as the op."""
    experts = w.shape[0]
    if not isinstance(experts, int) or not experts:
        return _grouped(e, x, w, counts, experts)

    def body(e: Scope, x: Ref, w: Ref, counts: Ref) -> tuple[Ref, ...]:
        return (_grouped(e, x, w, counts, experts),)

    return call(e, "grouped_matmul", [x, w, counts], {"experts": experts}, body)[0]


def _grouped(e: Scope, x: Ref, w: Ref, counts: Ref, experts: Any) -> Ref:
    """One product per expert, or one per row if the number of experts is symbolic."""
    ends = e.CumSum(counts, e.constant(0, i64))
    if isinstance(experts, int) and experts:
        starts = e.Sub(ends, counts)
        parts = []
        for expert in range(experts):
            bounds = (e.Gather(edge, e.ints([expert]), axis=0) for edge in (starts, ends))
            rows = e.Slice(x, *bounds, e.ints([0]))
            parts.append(multiply(e, rows, e.Gather(w, e.constant(expert, i64), axis=0)))
        return parts[0] if experts == 1 else e.Concat(*parts, axis=0)
    owner = _owners(e, x, counts)
    return squeeze(e, multiply(e, unsqueeze(e, x, 1), e.Gather(w, owner, axis=0)), 1)


def _owners(e: Scope, x: Ref, counts: Ref) -> Ref:
    """The expert of each row of x."""
    ends = e.CumSum(counts, e.constant(0, i64))
    length = e.Squeeze(slice_axis(e, e.Shape(x), 0, 0, 1), e.ints([0]))
    row = e.Range(e.constant(0, i64), length, e.constant(1, i64))
    passed = e.cast(e.GreaterOrEqual(unsqueeze(e, row, 1), unsqueeze(e, ends, 0)), i64)
    return reduce(e, "ReduceSum", passed, [1], keepdims=False)


@exports("integer_grouped_matmul", widens=False)
def integer_grouped_matmul(
    e: Scope, x: Ref, w: Ref, counts: Ref, scale: Ref, x_zero: Ref | None
) -> Ref:
    """i32 sums times the scale of each row's expert."""
    wide = e.cast(x, i32)
    if x_zero is not None:
        wide = e.Sub(wide, e.cast(x_zero, i32))
    sums = _grouped(e, wide, e.cast(w, i32), counts, w.shape[0])
    scales = e.Gather(scale, _owners(e, x, counts), axis=0)
    return e.Mul(e.cast(sums, f32), squeeze(e, scales, 1))


@exports("dequant_matmul", widens=False)
def dequant_matmul(
    e: Scope, x: Ref, q: Ref, scale: Ref, zero_point: Ref | None, bias: Ref | None, block: int
) -> Ref:
    w = dequantize_blocks(e, q, scale, zero_point, block, x.element)
    y = e.MatMul(x, transpose(e, w, 1, 0))
    return y if bias is None else e.Add(y, bias)


@exports("dequant_grouped_matmul", widens=False)
def dequant_grouped_matmul(
    e: Scope, x: Ref, q: Ref, scale: Ref, counts: Ref, zero_point: Ref | None, block: int
) -> Ref:
    w = dequantize_blocks(e, q, scale, zero_point, block, x.element)
    return _grouped(e, x, transpose(e, w, 0, 2, 1), counts, q.shape[0])


def dequantize_blocks(
    e: Scope, q: Ref, scale: Ref, zero_point: Ref | None, block: int, to: DType
) -> Ref:
    """Weights dequantized with a scale for each block of the last axis."""
    return dequantize(e, q, scale, zero_point, axis=q.rank - 1, block=block, to=to)
