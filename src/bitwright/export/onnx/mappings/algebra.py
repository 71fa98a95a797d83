"""Fourier transforms and systems of equations."""

from __future__ import annotations

from bitwright.export.onnx.bodies import subgraph
from bitwright.export.onnx.forms import counting, slice_axis, unsqueeze
from bitwright.export.onnx.mapping import Ref, Scope, exports, no_form
from bitwright.export.onnx.sizes import size_scalar, sizes_tensor
from bitwright.ir.dim import Size, max_size
from bitwright.ir.dtype import bool_, i64
from bitwright.ir.types import broadcast_shapes, normalize_axis


@exports("dft")
def dft(e: Scope, x: Ref, axis: int, length: Size | None, inverse: bool, onesided: bool) -> Ref:
    at = normalize_axis(axis, x.rank)
    if inverse and onesided:
        return _from_one_side(e, x, at, length)
    return _dft(e, x, at, length, inverse, onesided)


def _dft(e: Scope, x: Ref, at: int, length: Size | None, inverse: bool, onesided: bool) -> Ref:
    """A DFT; the axis is an attribute in opset 17 and an operand since 20."""
    number = None if length is None else size_scalar(e, length)
    flags = {"inverse": inverse, "onesided": onesided}
    if e.opset >= 20:
        return e.DFT(x, number, e.constant(at, i64), **flags)
    return e.DFT(x, number, axis=at, **flags)


def _from_one_side(e: Scope, x: Ref, at: int, length: Size | None) -> Ref:
    """An inverse onesided DFT, which runtimes lack; the other terms are conjugates."""
    terms = x.shape[at]
    total = 2 * (terms - 1) if length is None else length
    held = total // 2 + 1
    head = x
    if terms != held:
        ends: list[Size] = [0] * (2 * x.rank)
        ends[x.rank + at] = max_size(held - terms, 0)
        head = slice_axis(e, e.Pad(x, sizes_tensor(e, ends), e.scalar(0, x)), at, 0, held)
    start = sizes_tensor(e, [total - held])
    mirrored = e.Slice(head, start, e.ints([0]), e.ints([at]), e.ints([-1]))
    conjugate = e.Mul(mirrored, e.constant([1, -1], x.element))
    whole = e.Concat(head, conjugate, axis=at)
    return slice_axis(e, _dft(e, whole, at, None, True, False), x.rank - 1, 0, 1)


no_form("fft", reason="no ONNX op computes with complex numbers; `dft` holds them as pairs")


@exports("solve")
def solve(e: Scope, a: Ref, b: Ref) -> Ref:
    """Gauss-Jordan elimination of [a | b] with row pivots, one column per loop iteration."""
    if a.element.is_complex:
        raise e.reject("no ONNX op computes with complex numbers")
    size, columns = a.shape[-1], b.shape[-1]
    batch = broadcast_shapes(a.shape[:-2], b.shape[:-2])
    if size == 0:
        return e.Expand(b, sizes_tensor(e, (*batch, size, columns)))
    whole = (a.element, (*batch, size, size + columns))
    sides = [e.Expand(x, sizes_tensor(e, (*batch, *x.shape[-2:]))) for x in (a, b)]

    def body(e: Scope, step: Ref, going: Ref, m: Ref) -> list[Ref]:
        row = counting(e, size)
        is_step = e.Equal(row, step)
        column = e.Gather(m, step, axis=-1)
        below = e.GreaterOrEqual(row, step)
        size_of = e.Where(below, e.Abs(column), e.scalar(-1, m))
        pivot = e.ArgMax(size_of, axis=-1, keepdims=1)
        order = e.Where(is_step, pivot, e.Where(e.Equal(row, pivot), step, row))
        places = e.Expand(unsqueeze(e, order, -1), e.Shape(m))
        swapped = e.GatherElements(m, places, axis=-2)
        chosen = unsqueeze(e, e.Gather(swapped, step, axis=-2), -2)
        line = e.Div(chosen, unsqueeze(e, e.Gather(chosen, step, axis=-1), -1))
        factor = unsqueeze(e, e.Gather(swapped, step, axis=-1), -1)
        is_row = unsqueeze(e, is_step, -1)
        rest = e.Sub(swapped, e.Mul(factor, line))
        return [e.Identity(going), e.Where(is_row, line, rest)]

    inputs = [(i64, ()), (bool_, ()), whole]
    attrs = {"body": subgraph(e, "step", inputs, inputs[1:], body)}
    start = [size_scalar(e, size), None, e.Concat(*sides, axis=-1)]
    (reduced,) = e.emit("Loop", start, attrs, dtypes=[a.element])
    return slice_axis(e, reduced, len(batch) + 1, size)
