"""Reshape, transpose, slices, concatenation and padding. Final shapes become operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bitwright.export.onnx.forms import LAST, as_scalar, may_be_negative, reshape, slice_axis
from bitwright.export.onnx.mapping import Ref, Scope, exports
from bitwright.export.onnx.sizes import size_vector, sizes_tensor
from bitwright.ir.dim import Dim, Size, max_size
from bitwright.ir.dtype import i64
from bitwright.ir.types import Shape, normalize_axis
from bitwright.ops.core.registry import get

FIRST = -(1 << 63)
"""A stop that means "before the first element" in Slice, where -1 is the last one."""


@exports("reshape", widens=False)
def write_reshape(
    e: Scope, x: Ref, target: Ref | None, shape: Shape | None, allowzero: bool | None
) -> Ref:
    if target is not None:
        return e.Reshape(x, e.cast(target, i64), allowzero=1 if allowzero else None)
    assert shape is not None
    return reshape(e, x, x.shape, shape)


@exports("transpose", widens=False)
def transpose(e: Scope, x: Ref, perm: Sequence[int]) -> Ref:
    return e.Transpose(x, perm=list(perm)) if perm else e.Identity(x)


@exports("expand", widens=False)
def expand(e: Scope, x: Ref, target: Ref | None, shape: Shape | None) -> Ref:
    if target is not None:
        return e.Expand(x, e.cast(target, i64))
    assert shape is not None
    own = (1,) * (len(shape) - x.rank) + x.shape
    return e.Expand(
        x, sizes_tensor(e, [1 if o == s else s for o, s in zip(own, shape, strict=True)])
    )


@exports("tile", widens=False)
def tile(e: Scope, x: Ref, counts: Ref | None, repeats: Shape | None) -> Ref:
    return e.Tile(x, sizes_tensor(e, repeats or ()) if counts is None else e.cast(counts, i64))


@exports("concat", widens=False)
def concat(e: Scope, *xs: Ref, axis: int) -> Ref:
    return e.Concat(*xs, axis=axis)


@exports("split", widens=False)
def split(e: Scope, x: Ref, axis: int, sizes: Shape) -> tuple[Ref, ...]:
    return e.emit("Split", [x, sizes_tensor(e, sizes)], {"axis": axis}, results=len(sizes))


@exports("trilu", widens=False)
def trilu(e: Scope, x: Ref, diagonal: Ref | None, upper: bool, k: int) -> Ref:
    offset = e.constant(k, i64) if diagonal is None else as_scalar(e, e.cast(diagonal, i64))
    return e.Trilu(x, offset, upper=upper)


@exports("slice", widens=False)
def write_slice(
    e: Scope,
    x: Ref,
    start_data: Ref | None,
    stop_data: Ref | None,
    axis_data: Ref | None,
    step_data: Ref | None,
    starts: Any,
    stops: Any,
    steps: Any,
    axes: Any,
) -> Ref:
    if start_data is not None:
        data = (start_data, stop_data, axis_data, step_data)
        return e.Slice(x, *(None if ref is None else e.cast(ref, i64) for ref in data))
    if not axes:
        return e.Identity(x)
    ends = [
        _stop(e, x.shape[normalize_axis(axis, x.rank)], stop, step)
        for axis, stop, step in zip(axes, stops, steps, strict=True)
    ]
    joined = _vector(e, ends)
    return e.Slice(x, sizes_tensor(e, starts), joined, e.ints(axes), e.ints(steps))


def _stop(e: Scope, size: Size, stop: Size, step: int) -> int | Ref:
    """A stop for ONNX Slice, where negative numbers count from the end."""
    if step > 0:
        return LAST if stop == size else size_vector(e, stop) if isinstance(stop, Dim) else stop
    if isinstance(stop, int):
        return FIRST if stop < 0 else stop
    found = size_vector(e, stop)
    if not may_be_negative(stop):
        return found
    return e.Where(e.Less(found, e.ints([0])), e.ints([FIRST]), found)


def _vector(e: Scope, items: list[int | Ref]) -> Ref:
    if not any(isinstance(item, Ref) for item in items):
        return e.ints([item for item in items if isinstance(item, int)])
    parts = [item if isinstance(item, Ref) else e.ints([item]) for item in items]
    return parts[0] if len(parts) == 1 else e.Concat(*parts, axis=0)


@exports("pad", widens=False)
def pad(e: Scope, x: Ref, value: Ref | None, given: Ref | None, pads: Any, mode: str) -> Ref:
    if mode == "wrap":
        e.needs(19, "ONNX Pad has no mode 'wrap' before")
    if given is not None:
        amounts = e.cast(given, i64)
    elif not x.rank:
        return e.Identity(x)
    elif mode != "constant" and any(isinstance(n, int) and n < 0 for n in pads):
        return _pad_and_crop(e, x, pads, mode)
    elif mode != "constant" and _is_wide(x.shape, pads, mode):
        return _pad_by_index(e, x, pads, mode)
    else:
        amounts = sizes_tensor(e, pads)
    fill = None if value is None or mode != "constant" else as_scalar(e, value)
    return e.Pad(x, amounts, fill, mode=mode)


def _is_wide(shape: Shape, pads: Sequence[Size], mode: str) -> bool:
    """Whether the padding is wider than ONNX allows for the mode."""
    extra = {"reflect": -1, "wrap": 0, "edge": 1 << 40}[mode]
    return any(
        isinstance(size, int) and isinstance(n, int) and n > max(size + extra, 0)
        for n, size in zip(pads, (*shape, *shape), strict=True)
    )


def _pad_and_crop(e: Scope, x: Ref, pads: Sequence[Size], mode: str) -> Ref:
    """Padding with negative amounts: the padded tensor is cropped."""
    is_cut = [isinstance(n, int) and n < 0 for n in pads]
    grown = [0 if cut else n for n, cut in zip(pads, is_cut, strict=True)]
    y = pad(e, x, None, None, grown, mode)
    starts = [-n if cut else 0 for n, cut in zip(pads, is_cut, strict=True)][: x.rank]
    stops = [n if cut else LAST for n, cut in zip(pads, is_cut, strict=True)][x.rank :]
    axes = e.ints(range(x.rank))
    return e.Slice(y, sizes_tensor(e, starts), sizes_tensor(e, stops), axes)


def _pad_by_index(e: Scope, x: Ref, pads: Sequence[Size], mode: str) -> Ref:
    """Padding as a gather per axis, whose indices the op's reference computes."""
    rest: list[Size] = [0] * len(pads)
    rank = x.rank
    for axis, (size, before, after) in enumerate(
        zip(x.shape, pads[:rank], pads[rank:], strict=True)
    ):
        if before == 0 and after == 0:
            continue
        if isinstance(size, Dim) or isinstance(before, Dim) or isinstance(after, Dim):
            rest[axis], rest[rank + axis] = before, after
            continue
        places = get("pad").reference(np.arange(size), None, None, pads=(before, after), mode=mode)
        x = e.Gather(x, e.ints(places), axis=axis)
    return e.Pad(x, sizes_tensor(e, rest), mode=mode) if any(n != 0 for n in rest) else x


@exports("roll", widens=False)
def roll(e: Scope, x: Ref, shifts: Sequence[int], axes: Sequence[int]) -> Ref:
    y = x
    for shift, axis in zip(shifts, axes, strict=True):
        at = normalize_axis(axis, x.rank)
        start = -shift % max_size(x.shape[at], 1)
        y = e.Concat(slice_axis(e, y, at, start), slice_axis(e, y, at, 0, start), axis=at)
    return y
