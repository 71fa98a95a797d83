"""ONNX nodes and short sequences of nodes that many mappings use."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bitwright.export.onnx.scope import Ref, Scope
from bitwright.export.onnx.sizes import size_scalar, sizes_tensor
from bitwright.ir.dim import Dim, Size, bounds
from bitwright.ir.dtype import f32, i64
from bitwright.ir.types import Shape

LAST = (1 << 63) - 1
"""A stop that means "to the end" in Slice."""


def reshape(e: Scope, x: Ref, before: Shape, after: Shape) -> Ref:
    """Squeeze or Unsqueeze if possible, else Reshape with 0 for unchanged sizes and -1 for one
    symbolic size."""
    if tuple(before) == tuple(after):
        return x
    if (axes := _added_ones(before, after)) is not None:
        return unsqueeze(e, x, *axes)
    if (axes := _added_ones(after, before)) is not None:
        return squeeze(e, x, *axes)
    stays = [axis < len(before) and before[axis] == size for axis, size in enumerate(after)]
    open_axes = [
        axis for axis, size in enumerate(after) if isinstance(size, Dim) and not stays[axis]
    ]
    has_zero = any(size == 0 and not stays[axis] for axis, size in enumerate(after))
    if len(open_axes) > 1 or has_zero:
        return e.Reshape(x, sizes_tensor(e, after), allowzero=1)
    target = [
        -1 if axis in open_axes else 0 if isinstance(size, Dim) or size == 0 else size
        for axis, size in enumerate(after)
    ]
    return e.Reshape(x, e.ints(target))


def _added_ones(shorter: Shape, longer: Shape) -> list[int] | None:
    """The axes of size 1 in `longer` whose removal gives `shorter`, or None."""
    axes: list[int] = []
    for axis, size in enumerate(longer):
        at = axis - len(axes)
        if at < len(shorter) and shorter[at] == size:
            continue
        if size != 1:
            return None
        axes.append(axis)
    return axes if len(longer) - len(axes) == len(shorter) else None


def unsqueeze(e: Scope, x: Ref, *axes: int) -> Ref:
    return e.Unsqueeze(x, e.ints(axes))


def squeeze(e: Scope, x: Ref, *axes: int) -> Ref:
    return e.Squeeze(x, e.ints(axes))


def as_scalar(e: Scope, x: Ref) -> Ref:
    """A value of one element as a value of rank 0."""
    return x if not x.rank else e.Reshape(x, e.ints([]))


def transpose(e: Scope, x: Ref, *perm: int) -> Ref:
    return x if list(perm) == list(range(len(perm))) else e.Transpose(x, perm=perm)


def slice_axis(e: Scope, x: Ref, axis: int, start: Size, stop: Size | None = None) -> Ref:
    """Part of one axis, to its end if there is no stop."""
    stops = e.ints([LAST]) if stop is None else sizes_tensor(e, [stop])
    return e.Slice(x, sizes_tensor(e, [start]), stops, e.ints([axis]))


def reduce(e: Scope, op_type: str, x: Ref, axes: Sequence[int], keepdims: bool = True) -> Ref:
    """A reduction; the axes are an operand since opset 18, for ReduceSum since 13."""
    if not axes:  # in ONNX an empty list means every axis
        return reduce(e, op_type, unsqueeze(e, x, 0), [0], keepdims=False)
    if e.opset >= 18 or op_type == "ReduceSum":
        return e.emit(op_type, [x, e.ints(axes)], {"keepdims": keepdims})[0]
    return e.emit(op_type, [x], {"axes": list(axes), "keepdims": keepdims})[0]


def counting(e: Scope, length: Size) -> Ref:
    """0, 1, … up to but not including a size."""
    if isinstance(length, int):
        return e.ints(range(length))
    return e.Range(e.constant(0, i64), size_scalar(e, length), e.constant(1, i64))


def in_f32(e: Scope, x: Ref, compute: Callable[[Ref], Ref]) -> Ref:
    """A decomposition computed in f32 if x is narrower, and rounded once at the end."""
    if x.element.bits >= 32:
        return compute(x)
    return e.cast(compute(e.cast(x, f32)), x.element)


def static_size(e: Scope, size: Size) -> int:
    """A size that must be a number."""
    if isinstance(size, Dim):
        raise e.reject(f"the size {size} is symbolic")
    return size


def may_be_negative(size: Size) -> bool:
    return bounds(size)[0] < 0
