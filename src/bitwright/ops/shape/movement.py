"""Ops that only rearrange elements: reshape, transpose, expand, tile, concat, split.

Target shapes are attributes that may have symbolic sizes, without -1 and 0: importers call
`resolve_reshape` first. A shape that only the data decides is an operand, and the result then has
unknown sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import numpy as np

from bitwright.errors import InferenceError
from bitwright.ir.allocation import require_room
from bitwright.ir.dim import UNKNOWN, Dim, Size, bounds, divide_exactly, product
from bitwright.ir.graph import Node, Value
from bitwright.ir.types import Shape, TensorType, normalize_axis
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.derivatives import zeros_like
from bitwright.ops.core.gradients import sum_to
from bitwright.ops.core.inference import same
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.reverse import Gradients
from bitwright.ops.core.symbolic import movement


def as_ints(vector: Array) -> tuple[int, ...]:
    """The elements of an index tensor; a `TypeError` if one is symbolic."""
    return tuple(int(element) for element in vector.reshape(-1))


# reshape


def resolve_reshape(shape: Shape, target: Sequence[Size], allowzero: bool = False) -> Shape:
    """The final shape for a target in which 0 copies an axis and one -1 is inferred."""
    found: list[Size] = []
    for axis, size in enumerate(target):
        if size == 0 and not allowzero:
            if axis >= len(shape):
                raise InferenceError(
                    f"a 0 in the target {list(target)} copies axis {axis}",
                    expected=f"an axis of the shape {list(shape)}",
                )
            size = shape[axis]
        found.append(size if isinstance(size, Dim) else int(size))
    wild = [axis for axis, size in enumerate(found) if size == -1]
    if len(wild) > 1 or any(isinstance(size, int) and size < -1 for size in found):
        raise InferenceError(
            f"cannot reshape {list(shape)}",
            expected="sizes, among them at most one -1",
            found=list(target),
        )
    if wild:
        rest = [size for size in found if size != -1]
        found[wild[0]] = _missing_size(shape, rest)
    else:
        _require_same_count(shape, found)
    return tuple(found)


def _cancel(shape: Sequence[Size], other: Sequence[Size]) -> tuple[Size, Size]:
    """The element counts of both shapes, without their common factors."""
    left, right = list(shape), list[Size]()
    for size in other:
        if size in left:
            left.remove(size)
        else:
            right.append(size)
    return product(left), product(right)


def _missing_size(shape: Shape, rest: Sequence[Size]) -> Size:
    count, divisor = _cancel(shape, rest)
    if divisor == 0:
        raise InferenceError(f"-1 could be any size in a reshape of {list(shape)} beside a 0")
    exact = divide_exactly(count, divisor)
    if exact is not None:
        return exact
    if isinstance(count, int) and isinstance(divisor, int):
        raise InferenceError(
            f"-1 has no whole size in a reshape of {list(shape)}",
            expected=f"a multiple of {product(list(rest))} elements",
            found=product(list(shape)),
        )
    return count // divisor


def _require_same_count(shape: Sequence[Size], target: Sequence[Size]) -> None:
    before, after = _cancel(shape, target)
    if before == after or product(list(shape)) == product(list(target)):
        return
    low, high = bounds(before - after)
    if low > 0 or high < 0:
        raise InferenceError(
            f"cannot reshape {list(shape)} to {list(target)}",
            expected=f"{product(list(shape))} elements",
            found=product(list(target)),
        )


def _infer_reshape(
    x: TensorType, target: TensorType | None, shape: Shape | None, allowzero: bool | None
) -> TensorType:
    expect.one_form("shape", shape, target)
    if target is not None:
        return x.with_shape((UNKNOWN,) * expect.static_length("the target shape", target))
    assert shape is not None
    if any(isinstance(size, int) and size < 0 for size in shape):
        raise InferenceError(
            "a target shape is final", expected="no -1", hint="Use resolve_reshape.", found=shape
        )
    _require_same_count(x.shape, shape)
    return x.with_shape(shape)


def _reshape(
    x: Array, target: Array | None, shape: tuple[int, ...] | None, allowzero: bool | None
) -> Array:
    if target is not None:
        shape = resolve_reshape(x.shape, as_ints(target), bool(allowzero))  # type: ignore[assignment]
    _require_same_count(x.shape, shape or ())
    return x.reshape(shape or ())


def _reshape_samples() -> list[Sample]:
    return [
        sample(draw(2, 3, 4), shape=(6, 4)),
        sample(draw(6, dtype="i64"), shape=(1, 6, 1)),
        sample(draw(1), shape=()),
        sample(draw(0, 3), shape=(3, 0, 2)),
        sample(draw(2, 5), np.array([0, -1])),
        sample(draw(0, 5), np.array([5, 0], np.int32), allowzero=True),
        sample(draw(2, 3, dtype="bf16"), shape=(3, 2)),
        sample(np.array([["a", "b"]], object), shape=(2,)),
    ]


# transpose


def _infer_transpose(x: TensorType, perm: tuple[int, ...]) -> TensorType:
    if sorted(perm) != list(range(x.rank)):
        raise InferenceError(
            "perm is no permutation of the axes", expected=list(range(x.rank)), found=list(perm)
        )
    return x.with_shape(x.shape[axis] for axis in perm)


def inverse(perm: Sequence[int]) -> tuple[int, ...]:
    """The permutation that undoes `perm`."""
    return tuple(perm.index(axis) for axis in range(len(perm)))


# expand


def _infer_expand(x: TensorType, target: TensorType | None, shape: Shape | None) -> TensorType:
    expect.one_form("shape", shape, target)
    if target is not None:
        rank = max(x.rank, expect.static_length("the target shape", target))
        own = (1,) * (rank - x.rank) + x.shape
        return x.with_shape(s if isinstance(s, int) and s != 1 else UNKNOWN for s in own)
    assert shape is not None
    front = len(shape) - x.rank
    fits = front >= 0 and all(
        size == 1 or isinstance(size, Dim) or isinstance(goal, Dim) or size == goal
        for size, goal in zip(x.shape, shape[max(front, 0) :], strict=False)
    )
    if not fits:
        raise InferenceError("cannot be broadcast", expected=f"to {list(shape)}", found=x)
    return x.with_shape(shape)


def _expand(x: Array, target: Array | None, shape: tuple[int, ...] | None) -> Array:
    if target is not None:
        shape = np.broadcast_shapes(x.shape, as_ints(target))
        require_room(shape, x.itemsize, "its result")
    return np.array(np.broadcast_to(x, shape or ()))


def _expand_samples() -> list[Sample]:
    return [
        sample(draw(3, 1), shape=(2, 3, 4)),
        sample(draw(), shape=(5,)),
        sample(draw(1, 0), shape=(4, 0)),
        sample(draw(3, 1, dtype="i8"), np.array([2, 1, 6])),
        sample(draw(2, 4), np.array([1], np.int64)),
        sample(draw(3), shape=(3,)),
    ]


# tile


def _infer_tile(x: TensorType, counts: TensorType | None, repeats: Shape | None) -> TensorType:
    expect.one_form("repeats", repeats, counts)
    given = len(repeats or ()) if counts is None else expect.static_length("repeats", counts)
    if given != x.rank:
        raise InferenceError("has one repeat for each axis", expected=x.rank, found=given)
    if repeats is None:
        return x.with_shape(0 if size == 0 else UNKNOWN for size in x.shape)
    return x.with_shape(size * count for size, count in zip(x.shape, repeats, strict=True))


def _tile(x: Array, counts: Array | None, repeats: tuple[int, ...] | None) -> Array:
    if counts is not None:
        repeats = tuple(as_ints(counts))
        sizes = [size * count for size, count in zip(x.shape, repeats, strict=True)]
        require_room(sizes, x.itemsize, "its result")
    return np.tile(x, repeats or ())


def _tile_samples() -> list[Sample]:
    return [
        sample(draw(2, 3), repeats=(2, 1)),
        sample(draw(2, 3), repeats=(0, 4)),
        sample(draw(), repeats=()),
        sample(draw(3, dtype="u8", low=0), np.array([3])),
        sample(draw(1, 0, 2), np.array([2, 2, 2], np.int32)),
    ]


# concat, split


def _infer_concat(*xs: TensorType, axis: int) -> TensorType:
    if not xs:
        raise InferenceError("has nothing to join", expected="at least one operand")
    element = expect.same_dtype(*xs)
    axis = normalize_axis(axis, xs[0].rank)
    shape = list(xs[0].shape)
    for x in xs[1:]:
        expect.rank("an operand of concat", x, len(shape))
        for at, size in enumerate(x.shape):
            if at == axis:
                shape[at] = shape[at] + size
                continue
            expect.size(f"axis {at} of an operand", size, shape[at])
            shape[at] = size if isinstance(size, int) else shape[at]
    return TensorType(element, tuple(shape))


def _concat_samples() -> list[Sample]:
    return [
        sample(draw(2, 3), draw(2, 5, seed=1), axis=1),
        sample(draw(2, 3, dtype="i32"), axis=-2),
        sample(draw(0, 3), draw(4, 3, seed=1), draw(1, 3, seed=2), axis=0),
        sample(draw(2, 1, 2, dtype="f16"), draw(2, 1, 2, dtype="f16", seed=1), axis=-1),
        sample(np.array(["a"], object), np.array(["b", "c"], object), axis=0),
    ]


def _infer_split(x: TensorType, axis: int, sizes: Shape) -> tuple[TensorType, ...]:
    axis = normalize_axis(axis, x.rank)
    if not sizes:
        raise InferenceError("splits into no parts", expected="at least one size")
    low, high = bounds(sum(sizes) - x.shape[axis])
    if low > 0 or high < 0:
        raise InferenceError(
            f"the parts do not add up to axis {axis}", expected=x.shape[axis], found=sum(sizes)
        )
    return tuple(x.with_shape((*x.shape[:axis], size, *x.shape[axis + 1 :])) for size in sizes)


def _split(x: Array, axis: int, sizes: tuple[int, ...]) -> tuple[Array, ...]:
    ends = [0, *np.cumsum(sizes).tolist()]
    if ends[-1] != x.shape[axis]:
        raise InferenceError(
            f"the parts do not add up to axis {axis}", expected=x.shape[axis], found=ends[-1]
        )
    whole = np.moveaxis(x, axis, 0)
    return tuple(np.moveaxis(whole[start:end], 0, axis) for start, end in pairwise(ends))


def _split_samples() -> list[Sample]:
    return [
        sample(draw(6, 2), axis=0, sizes=(1, 2, 3)),
        sample(draw(2, 4), axis=-1, sizes=(4,)),
        sample(draw(2, 4, dtype="i64"), axis=1, sizes=(0, 4, 0)),
    ]


# trilu, identity


def _infer_trilu(x: TensorType, diagonal: TensorType | None, upper: bool, k: int) -> TensorType:
    if x.rank < 2:
        raise InferenceError("has the wrong rank", expected="rank 2 or more", found=x)
    if diagonal is not None:
        expect.index("the diagonal", diagonal)
        expect.size("the diagonal", diagonal.count, 1)
        if k:
            raise InferenceError("k is given twice", expected="the attribute or the operand")
    return x


def _trilu(x: Array, diagonal: Array | None, upper: bool, k: int) -> Array:
    keep = np.triu if upper else np.tril
    return keep(x, k if diagonal is None else as_ints(diagonal)[0])


def _trilu_samples() -> list[Sample]:
    return [
        sample(draw(4, 5), upper=True),
        sample(draw(2, 3, 3, dtype="i64"), upper=False, k=-1),
        sample(draw(5, 3), np.array(1), upper=True),
        sample(draw(3, 3), np.array([-7]), upper=False),
        sample(draw(0, 3), upper=False, k=1),
        sample(draw(3, 4, dtype="bf16"), upper=False, k=2),
    ]


def _grad_tile(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    """The sum over the copies; every axis becomes a pair of axes, copies and elements."""
    x = node.inputs[0]
    assert x is not None
    if x.tensor.count == 0:
        return [zeros_like(b, x)]
    given = node.attrs.get("repeats")
    repeats = given or [total // size for total, size in zip(dys[0].shape, x.shape, strict=True)]
    shape, copies = list[Size](), list[int]()
    for size, count in zip(x.shape, repeats, strict=True):
        if count != 1:
            copies.append(len(shape))
            shape.append(count)
        shape.append(size)
    if not copies:
        return [dys[0]]
    return [b.reduce_sum(b.reshape(dys[0], shape=shape), axes=copies, keepdims=False)]


def _grad_concat(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    """The parts of dy. Slices and not one split, so that parts nobody reads cost nothing."""
    (dy,) = dys
    axis, start = normalize_axis(node.attrs["axis"], dy.rank), 0
    parts = []
    for x in node.operands:
        stop = start + x.shape[axis]
        parts.append(dy if len(node.inputs) == 1 else slice_axis(b, dy, axis, start, stop))
        start = stop
    return parts


def slice_axis(b: Builder, x: Value, axis: int, start: Size, stop: Size) -> Value:
    """x[start:stop] along one axis."""
    return cast(Value, b.slice(x, starts=(start,), stops=(stop,), steps=(1,), axes=(axis,)))


def pad_axis(b: Builder, x: Value, axis: int, before: Size, after: Size) -> Value:
    """x with zeros around it on one axis; negative sizes crop."""
    if before == 0 and after == 0:
        return x
    sizes = [[pad if at == axis else 0 for at in range(x.rank)] for pad in (before, after)]
    return cast(Value, b.pad(x, pads=(*sizes[0], *sizes[1])))


def _grad_split(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    (x,) = node.operands
    axis, sizes = normalize_axis(node.attrs["axis"], x.rank), node.attrs["sizes"]
    used = [number for number, dy in enumerate(dys) if dy is not None]
    if len(used) == 1:  # padding reads only this part
        (one,) = used
        before, after = sum(sizes[:one]), sum(sizes[one + 1 :])
        return [pad_axis(b, dys[one], axis, before, after)]
    parts = [
        zeros_like(b, y) if dy is None else dy for y, dy in zip(node.outputs, dys, strict=True)
    ]
    return [b.concat(*parts, axis=axis)]


def _grad_trilu(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    return [b.trilu(dys[0], *node.inputs[1:], **node.attrs)]


OPDEFS = [
    movement(
        "reshape",
        "x, shape?",
        _infer_reshape,
        _reshape,
        _reshape_samples,
        grad=lambda b, node, dys: [b.reshape(dys[0], shape=node.inputs[0].shape)],
        attrs={"shape": Attr("sizes", None), "allowzero": Attr("bool", None)},
        doc="The same elements in another shape. In the operand, -1 is inferred and 0 "
        "copies an axis (with `allowzero` it is a zero).",
    ),
    movement(
        "transpose",
        "x",
        _infer_transpose,
        lambda x, perm: x.transpose(perm),
        lambda: [
            sample(draw(2, 3, 4), perm=(2, 0, 1)),
            sample(draw(3, 0, dtype="i8"), perm=(1, 0)),
            sample(draw(), perm=()),
        ],
        grad=lambda b, node, dys: [b.transpose(dys[0], perm=inverse(node.attrs["perm"]))],
        attrs={"perm": Attr("ints")},
        doc="Axis i of the result is axis perm[i] of x.",
    ),
    movement(
        "expand",
        "x, shape?",
        _infer_expand,
        _expand,
        _expand_samples,
        grad=lambda b, node, dys: [sum_to(b, dys[0], node.inputs[0])],
        attrs={"shape": Attr("sizes", None)},
        doc="x broadcast to a shape; the operand form broadcasts both ways.",
    ),
    movement(
        "tile",
        "x, repeats?",
        _infer_tile,
        _tile,
        _tile_samples,
        grad=_grad_tile,
        attrs={"repeats": Attr("sizes", None)},
        doc="x repeated along every axis.",
    ),
    movement(
        "concat",
        "xs*",
        _infer_concat,
        lambda *xs, axis: np.concatenate(xs, axis),
        _concat_samples,
        grad=_grad_concat,
        attrs={"axis": Attr("int")},
        doc="The operands one after the other along an axis.",
    ),
    movement(
        "split",
        "x",
        _infer_split,
        _split,
        _split_samples,
        grad=_grad_split,
        attrs={"axis": Attr("int"), "sizes": Attr("sizes")},
        doc="Parts of these sizes along an axis.",
    ),
    OpDef(
        "trilu",
        Kind.MOVEMENT,
        "x, k?",
        _infer_trilu,
        _trilu,
        _trilu_samples,
        grad=_grad_trilu,
        attrs={"upper": Attr("bool"), "k": Attr("int", 0)},
        doc="The part of each matrix on and above (or below) its k-th diagonal, else 0.",
    ),
    movement(
        "identity",
        "x",
        same,
        lambda x: x,
        lambda: [sample(draw(2, 3)), sample(draw(0, dtype="i64")), sample(draw(dtype="bool"))],
        grad=lambda b, node, dys: [dys[0]],
        onnx="Identity",
        doc="x",
    ),
]
