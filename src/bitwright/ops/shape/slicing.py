"""Slices and padding.

In the attribute form a slice is normalized: 0 <= start <= stop <= size for a positive step; start
>= stop >= -1 for a negative step, where -1 is before the first element. `normalize_slice` converts
Python's indices to that form, symbolically. The result holds for every size, with two assumptions
that keep it short: a symbolic size is at least 1, and a window with an undecided symbolic start
lies inside the axis. A run that violates them raises an error; it never gives a wrong result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bitwright.errors import InferenceError, RunError
from bitwright.ir.allocation import require_room
from bitwright.ir.dim import UNKNOWN, Dim, Size, bounds, max_size, min_size
from bitwright.ir.dtype import string
from bitwright.ir.types import TensorType, normalize_axis
from bitwright.ops.core import expect
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.symbolic import movement, on_elements
from bitwright.ops.shape.movement import as_ints
from bitwright.ops.shape.slice_gradients import grad_pad, grad_slice

OPEN_END = 2**31 - 1  # exporters write this, or the 64-bit extreme, for "to the end"


# normal form


def normalize_slice(size: Size, start: Size, stop: Size, step: int = 1) -> tuple[Size, Size]:
    """Start and stop of `x[start:stop:step]` on an axis of this size, in normal form.

    As in Python, except for a start before the first element with a negative step: ONNX starts at
    the first element, and Python selects nothing.
    """
    if step == 0:
        raise InferenceError("a slice has the step 0")
    if not any(isinstance(s, Dim) for s in (size, start, stop)):
        first, last, _ = slice(int(start), int(stop), step).indices(int(size))  # type: ignore[arg-type]
        first = max(first, min(0, int(size) - 1)) if step < 0 else first  # type: ignore[arg-type]
        if (last - first) * step <= 0:
            return max(first, 0), max(first, 0)
        return first, last
    low, high = (0, size) if step > 0 else (-1, size - 1)
    if isinstance(start, Dim) and not _at_most(start, high, size):
        return start, _clamp(stop, size, low, high, inside=True)
    start = _clamp(start, size, 0, high)
    stop = _clamp(stop, size, low, high)
    before, after = (start, stop) if step > 0 else (stop, start)
    if before == low or after == high or _at_most(before, after, size):
        return start, stop
    if _at_most(after, before, size):
        return start, start
    return start, max_size(start, stop) if step > 0 else min_size(start, stop)


def _at_most(a: Size, b: Size, size: Size) -> bool:
    """Whether a <= b for every size that is at least 1."""
    gap = b - a
    return bounds(gap)[0] >= 0 or bounds(gap - size + 1)[0] >= 0


def _clamp(index: Size, size: Size, low: Size, high: Size, inside: bool = False) -> Size:
    """A Python index as an offset from the front, between low and high."""
    if isinstance(index, int):
        if index >= OPEN_END:
            return high
        if index <= -OPEN_END:
            return low
    given = isinstance(index, Dim)
    if bounds(index)[1] < given:  # -3, or a computed -m
        given, index = False, size + index
    if inside:
        return index
    if not _at_most(index, high, size):
        index = high if _at_most(high, index, size) else min_size(index, high)
    if given or _at_most(low, index, size):
        return index  # a computed index of unclear sign counts from the front
    return low if _at_most(index, low, size) else max_size(index, low)


def slice_size(start: Size, stop: Size, step: int) -> Size:
    """The number of elements of a slice in normal form."""
    if step > 0:
        return (stop - start + step - 1) // step
    return (start - stop - step - 1) // -step


# slice

Vector = TensorType | None


def _infer_slice(
    x: TensorType, *operands: Vector, starts: Any, stops: Any, steps: Any, axes: Any
) -> TensorType:
    attrs = {"starts": starts, "stops": stops, "axes": axes, "steps": steps}
    expect.one_form("starts", starts, operands[0])
    if operands[0] is not None:
        return _infer_slice_by_data(x, operands, attrs)
    missing = [name for name, value in attrs.items() if value is None]
    if missing or any(operand is not None for operand in operands):
        raise InferenceError(
            "is half attributes and half operands",
            expected="starts, stops, steps and axes",
            found=", ".join(name for name in attrs if name not in missing),
        )
    if len({len(starts), len(stops), len(steps), len(axes)}) != 1:
        raise InferenceError("starts, stops, steps and axes have different lengths")
    shape = list(x.shape)
    for axis, start, stop, step in zip(_axes(axes, x.rank), starts, stops, steps, strict=True):
        _require_normal(shape[axis], start, stop, step, axis)
        shape[axis] = slice_size(start, stop, step)
    return x.with_shape(shape)


def _infer_slice_by_data(
    x: TensorType, operands: tuple[Vector, ...], attrs: dict[str, Any]
) -> TensorType:
    if operands[1] is None or any(value is not None for value in attrs.values()):
        raise InferenceError(
            "is half operands and half attributes", expected="operands starts and stops"
        )
    lengths = {expect.static_length("an index operand", o) for o in operands if o is not None}
    if len(lengths) != 1 or lengths.pop() > x.rank:
        raise InferenceError(
            "index operands have the wrong length",
            expected=f"one length, at most {x.rank}",
            found=", ".join(map(str, filter(None, operands))),
        )
    return x.with_shape((UNKNOWN,) * x.rank)


def _axes(axes: Sequence[int], rank: int) -> list[int]:
    normal = [normalize_axis(axis, rank) for axis in axes]
    if len(set(normal)) != len(normal):
        raise InferenceError(f"an axis occurs twice in {list(axes)}")
    return normal


def _require_normal(size: Size, start: Size, stop: Size, step: int, axis: int) -> None:
    if step == 0:
        raise InferenceError(f"a slice of axis {axis} has the step 0")
    low, high = (0, size) if step > 0 else (-1, size - 1)
    before, after = (start, stop) if step > 0 else (stop, start)
    gaps = (before - low, high - after, after - before)
    if start != stop and any(bounds(gap)[1] < 0 for gap in gaps):
        raise InferenceError(
            f"slice {start}:{stop}:{step} does not fit axis {axis}",
            expected=f"{low} to {high} in the direction of the step",
            hint="Use normalize_slice for Python's indices.",
        )


def _slice(
    x: Array,
    starts_data: Array | None,
    stops_data: Array | None,
    axes_data: Array | None,
    steps_data: Array | None,
    starts: Any,
    stops: Any,
    steps: Any,
    axes: Any,
) -> Array:
    if starts_data is not None and stops_data is not None:
        starts, stops = as_ints(starts_data), as_ints(stops_data)
        axes = range(len(starts)) if axes_data is None else as_ints(axes_data)
        steps = (1,) * len(starts) if steps_data is None else as_ints(steps_data)
        sizes = [x.shape[axis] for axis in _axes(axes, x.ndim)]
        normal = [normalize_slice(*row) for row in zip(sizes, starts, stops, steps, strict=True)]
        starts, stops = [row[0] for row in normal], [row[1] for row in normal]
    window = [slice(None)] * x.ndim
    for axis, start, stop, step in zip(_axes(axes, x.ndim), starts, stops, steps, strict=True):
        window[axis] = _window(x.shape[axis], start, stop, step, axis)
    return x[tuple(window)]


def _window(size: int, start: int, stop: int, step: int, axis: int) -> slice:
    if start == stop:
        return slice(0, 0)
    low, high = (0, size) if step > 0 else (-1, size - 1)
    if not (low <= min(start, stop) and max(start, stop) <= high and (stop - start) * step > 0):
        raise RunError(f"slice {start}:{stop}:{step} does not fit axis {axis} of size {size}")
    return slice(start, stop if stop >= 0 else None, step)


def _slice_samples() -> list[Sample]:
    return [
        sample(draw(5, 7), starts=(1, 0), stops=(4, 7), steps=(1, 2), axes=(0, 1)),
        sample(draw(5, 7), starts=(4,), stops=(-1,), steps=(-1,), axes=(-2,)),
        sample(draw(8, dtype="i64"), starts=(6,), stops=(0,), steps=(-4,), axes=(0,)),
        sample(draw(3, 4), starts=(3,), stops=(3,), steps=(1,), axes=(1,)),
        sample(draw(0, 4), starts=(0,), stops=(0,), steps=(1,), axes=(0,)),
        sample(draw(4), starts=(), stops=(), steps=(), axes=()),
        sample(draw(5, 7), np.array([-3, 99]), np.array([2**40, -99]), None, np.array([1, -3])),
        sample(draw(5, 7, dtype="i8"), np.array([1]), np.array([3]), np.array([-1])),
        sample(draw(3, 2), np.array([2], np.int32), np.array([1], np.int32)),
    ]


# pad


def _infer_pad(
    x: TensorType, value: TensorType | None, given: TensorType | None, pads: Any, mode: str
) -> TensorType:
    expect.one_form("pads", pads, given)
    expect.same_dtype(x, value)
    if value is not None:
        expect.size("the padding value", value.count, 1)
    if given is not None:
        length = expect.static_length("pads", given)
        expect.size("pads", length, 2 * x.rank)
        return x.with_shape((UNKNOWN,) * x.rank)
    expect.size("pads", len(pads), 2 * x.rank)
    rows = zip(x.shape, pads[: x.rank], pads[x.rank :], strict=True)
    return x.with_shape(size + before + after for size, before, after in rows)


def _pad(
    x: Array, value: Array | None, given: Array | None, pads: Any, mode: str, empty: Any = None
) -> Array:
    pads = pads if given is None else as_ints(given)
    around = list(zip(pads[: x.ndim], pads[x.ndim :], strict=True))
    shape = [size + sum(pair) for size, pair in zip(x.shape, around, strict=True)]
    if any(size < 0 for size in shape):
        raise RunError(f"pads {list(pads)} take more than there is", found=list(x.shape))
    require_room(shape, x.itemsize, "its result")
    if mode != "constant":
        for axis, (before, after) in enumerate(around):
            x = np.take(x, _extended(x.shape[axis], before, after, mode, axis), axis)
        return x
    if empty is None:
        empty = "" if x.dtype == string.numpy else np.zeros((), x.dtype)
    filled = np.full(shape, empty if value is None else value.reshape(()), x.dtype)
    rows = list(zip(x.shape, around, shape, strict=True))
    inner = tuple(slice(max(-b, 0), max(size - max(-a, 0), 0)) for size, (b, a), _ in rows)
    outer = tuple(slice(max(b, 0), max(total - max(a, 0), 0)) for _, (b, a), total in rows)
    filled[outer] = x[inner]
    return filled


def _extended(size: int, before: int, after: int, mode: str, axis: int) -> Array:
    """The source index of each element of an axis that is extended on both sides."""
    places = np.arange(-before, size + after)
    if size == 0 and places.size:
        raise RunError(f"axis {axis} is empty", expected=f"an element to {mode} from")
    if mode == "edge" or size <= 1:
        return np.clip(places, 0, max(size - 1, 0))
    if mode == "wrap":
        return places % size
    period = 2 * (size - 1)
    places = places % period
    return np.where(places < size, places, period - places)


def _pad_sizes(x: Any, value: Any, given: Any, pads: Any, mode: str) -> Any:
    return _pad(x, value, given, pads, mode, empty=0)


def _pad_samples() -> list[Sample]:
    two = draw(2, 3)
    return [
        sample(two, pads=(1, 0, 2, 3)),
        sample(two, np.array(1.5, np.float32), pads=(0, -1, 1, 0)),
        sample(draw(4, 5), pads=(-2, 3, 1, -4)),
        sample(draw(4, 5), pads=(2, 0, 1, 4), mode="reflect"),
        sample(draw(4, 5, dtype="i32"), pads=(0, 7, -1, 9), mode="reflect"),
        sample(draw(3, 1), pads=(2, 2, 0, 1), mode="edge"),
        sample(draw(3, 2), pads=(4, -1, 0, 3), mode="wrap"),
        sample(draw(0, 2), pads=(2, 0, 0, 1)),
        sample(draw(2, 2, dtype="bool"), None, np.array([1, 0, 0, 1])),
        sample(np.array(["a"], object), np.array("?", object), pads=(1, 1)),
    ]


OPDEFS = [
    movement(
        "slice",
        "x, starts?, stops?, axes?, steps?",
        _infer_slice,
        _slice,
        _slice_samples,
        grad=grad_slice,
        attrs={
            "starts": Attr("sizes", None),
            "stops": Attr("sizes", None),
            "steps": Attr("ints", None),
            "axes": Attr("ints", None),
        },
        doc="x[start:stop:step] along axes; attributes in normal form, operands as in Python.",
    ),
    OpDef(
        "pad",
        Kind.MOVEMENT,
        "x, value?, pads?",
        _infer_pad,
        _pad,
        _pad_samples,
        grad=grad_pad,
        attrs={
            "pads": Attr("sizes", None),
            "mode": Attr("str", "constant", ("constant", "reflect", "edge", "wrap")),
        },
        sizes=on_elements(_pad_sizes),
        doc="x with padding on both sides of each axis (begins, then ends); negative pads crop.",
    ),
]
