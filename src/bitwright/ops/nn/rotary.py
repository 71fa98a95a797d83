"""Rotary position embeddings: pairs of features are rotated by angles of their position.

    (a, b) -> (a*cos - b*sin, b*cos + a*sin)

Pairs are (i, i + n/2) of the n rotated features, or (2i, 2i + 1) if interleaved. Features beyond
`rotary_dim` are copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bitwright.errors import InferenceError, RunError
from bitwright.ir.dim import Size
from bitwright.ir.graph import Node, Value
from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.reverse import Gradients, composed, takes_wanted

_INTERLEAVED = Attr("bool", False)


def rotate(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """x with all features of the last axis rotated; cos and sin have one angle for each pair."""
    half = x.shape[-1] // 2
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    rotated_pairs = first * cos - second * sin, second * cos + first * sin
    if interleaved:
        return np.stack(rotated_pairs, axis=-1).reshape(x.shape)
    return np.concatenate(rotated_pairs, axis=-1)


def _infer_rotary(
    x: TensorType,
    cos: TensorType,
    sin: TensorType,
    position_ids: TensorType | None,
    rotary_dim: int,
    **_: Any,
) -> TensorType:
    expect.floating("x", x)
    expect.rank("x", x, 4)
    expect.same_dtype(x, cos, sin)
    size = x.shape[3]
    rotated: Size = rotary_dim or size
    if rotary_dim < 0 or rotary_dim % 2 or (isinstance(size, int) and rotary_dim > size):
        raise InferenceError(
            "'rotary_dim' does not fit the features",
            expected=f"an even number up to {size}",
            found=rotary_dim,
        )
    if isinstance(rotated, int) and rotated % 2:
        raise InferenceError("an odd number of features has no pairs", found=x)
    for name, table in (("cos", cos), ("sin", sin)):
        expect.rank(name, table, *((2,) if position_ids is not None else (2, 3)))
        expect.size(f"the last axis of {name}", table.shape[-1], rotated // 2)
        if position_ids is None:
            expect.size(f"axis {table.rank - 2} of {name}", table.shape[-2], x.shape[2])
        if table.rank == 3 and table.shape[0] != 1:
            expect.size(f"axis 0 of {name}", table.shape[0], x.shape[0])
    if position_ids is not None:
        expect.integer("position_ids", position_ids)
        expect.rank("position_ids", position_ids, 2)
        expect.size("axis 0 of position_ids", position_ids.shape[0], x.shape[0])
        expect.size("axis 1 of position_ids", position_ids.shape[1], x.shape[2])
    return x


def _rotary(
    x: Array, cos: Array, sin: Array, position_ids: Array | None, interleaved: bool, rotary_dim: int
) -> Array:
    if position_ids is not None:
        wrong = position_ids[(position_ids < 0) | (position_ids >= len(cos))]
        if wrong.size:
            raise RunError(
                "a position lies outside the table of angles",
                expected=f"0 to {len(cos) - 1}",
                found=int(wrong[0]),
            )
        cos, sin = cos[position_ids], sin[position_ids]
    cos, sin = (wide(t)[..., None, :, :] for t in (cos, sin))
    rotated = rotary_dim or x.shape[3]
    rotated_pairs = rotate(wide(x[..., :rotated]), cos, sin, interleaved)
    return np.concatenate([rotated_pairs, wide(x[..., rotated:])], axis=-1)


def _infer_axial(
    x: TensorType,
    cos_h: TensorType,
    sin_h: TensorType,
    cos_w: TensorType,
    sin_w: TensorType,
    **_: Any,
) -> TensorType:
    expect.floating("x", x)
    expect.rank("x", x, 4)
    expect.same_dtype(x, cos_h, sin_h, cos_w, sin_w)
    if isinstance(x.shape[3], int) and x.shape[3] % 4:
        raise InferenceError(
            "the features do not split into two halves of pairs",
            expected="a multiple of 4",
            found=x.shape[3],
        )
    for name, table, like in (
        ("cos_h", cos_h, cos_h),
        ("sin_h", sin_h, cos_h),
        ("cos_w", cos_w, cos_w),
        ("sin_w", sin_w, cos_w),
    ):
        expect.rank(name, table, 2)
        expect.size(f"axis 0 of {name}", table.shape[0], like.shape[0])
        expect.size(f"axis 1 of {name}", table.shape[1], x.shape[3] // 4)
    expect.size("axis 2 of x (rows * columns)", x.shape[2], cos_h.shape[0] * cos_w.shape[0])
    return x


def _axial(
    x: Array, cos_h: Array, sin_h: Array, cos_w: Array, sin_w: Array, interleaved: bool
) -> Array:
    half, rows, columns = x.shape[3] // 2, len(cos_h), len(cos_w)
    cos_h, sin_h = (np.repeat(wide(t), columns, axis=0) for t in (cos_h, sin_h))
    cos_w, sin_w = (np.tile(wide(t), (rows, 1)) for t in (cos_w, sin_w))
    parts = (
        rotate(wide(x[..., :half]), cos_h, sin_h, interleaved),
        rotate(wide(x[..., half:]), cos_w, sin_w, interleaved),
    )
    return np.concatenate(parts, axis=-1)


def _parts(b: Builder, x: Value, start: Size, stop: Size) -> Value:
    """Features start … stop - 1."""
    return _value(b.slice(x, starts=(start,), stops=(stop,), steps=(1,), axes=(x.rank - 1,)))


def _value(value: Any) -> Value:
    assert isinstance(value, Value)
    return value


def _compose_rotate(b: Builder, x: Value, cos: Value, sin: Value, interleaved: bool) -> Value:
    """`rotate` by other ops."""
    *outer, size = x.shape
    half = size // 2
    if interleaved:
        pairs = b.reshape(x, shape=(*outer, half, 2))
        first, second = (
            b.reshape(_parts(b, pairs, i, i + 1), shape=(*outer, half)) for i in (0, 1)
        )
    else:
        first, second = _parts(b, x, 0, half), _parts(b, x, half, size)
    turned = (
        b.sub(b.mul(first, cos), b.mul(second, sin)),
        b.add(b.mul(second, cos), b.mul(first, sin)),
    )
    if not interleaved:
        return _value(b.concat(*turned, axis=x.rank - 1))
    columns = [b.reshape(part, shape=(*outer, half, 1)) for part in turned]
    return _value(b.reshape(b.concat(*columns, axis=x.rank), shape=x.shape))


def _compose_rotary(
    b: Builder,
    x: Value,
    cos: Value,
    sin: Value,
    position_ids: Value | None,
    interleaved: bool,
    rotary_dim: int,
) -> Value:
    size = x.shape[3]
    rotated: Size = rotary_dim or size
    if position_ids is not None:
        cos, sin = (b.gather(table, position_ids, axis=0) for table in (cos, sin))
    cos, sin = (
        b.reshape(table, shape=(*table.shape[:-2], 1, *table.shape[-2:])) for table in (cos, sin)
    )
    turned = _compose_rotate(b, _parts(b, x, 0, rotated), cos, sin, interleaved)
    return turned if rotated == size else b.concat(turned, _parts(b, x, rotated, size), axis=3)


def _compose_axial(
    b: Builder, x: Value, cos_h: Value, sin_h: Value, cos_w: Value, sin_w: Value, interleaved: bool
) -> Value:
    size, (rows, columns) = x.shape[3], (cos_h.shape[0], cos_w.shape[0])
    grid = (rows, columns, size // 4)
    angles: list[Value] = []
    for table, shape in (
        (cos_h, (rows, 1, size // 4)),
        (sin_h, (rows, 1, size // 4)),
        (cos_w, (1, columns, size // 4)),
        (sin_w, (1, columns, size // 4)),
    ):
        wide_table = b.expand(b.reshape(table, shape=shape), shape=grid)
        angles.append(b.reshape(wide_table, shape=(rows * columns, size // 4)))
    half = size // 2
    parts = (
        _compose_rotate(b, _parts(b, x, 0, half), angles[0], angles[1], interleaved),
        _compose_rotate(b, _parts(b, x, half, size), angles[2], angles[3], interleaved),
    )
    return _value(b.concat(*parts, axis=3))


def _backward(sines: tuple[int, ...], compose: Callable[..., Value]) -> Callable[..., Gradients]:
    """The rule of a rotation: dy rotated back, by the negative sines (operands `sines`).

    Gradients of the angles, where they are asked for, are those of the composed form.
    """

    @takes_wanted
    def rule(b: Builder, node: Node, dys: list[Value | None], wanted: list[bool]) -> Gradients:
        angles = node.inputs[1:]
        back = [
            b.neg(angle) if number in sines else angle for number, angle in enumerate(angles, 1)
        ]
        found: list[Value | None] = [b.op(node.op, dys[0], *back, **node.attrs)]
        if any(wanted[1:]):
            found += composed(compose)(b, node, dys)[1:]
        return found

    return rule


def _rotary_samples() -> list[Sample]:
    x = draw(2, 4, 3, 8)
    tables = draw(9, 4, seed=1), draw(9, 4, seed=2)
    short = draw(9, 2, seed=1), draw(9, 2, seed=2)
    ids = np.array([[0, 1, 2], [8, 3, 3]])
    return [
        sample(x, *tables, ids),
        sample(x, *tables, ids, interleaved=True),
        sample(x, *short, ids, rotary_dim=4),
        sample(x, *short, ids.astype(np.int32), rotary_dim=4, interleaved=True),
        sample(x, draw(2, 3, 4, seed=1), draw(2, 3, 4, seed=2)),
        sample(x, draw(1, 3, 4, seed=1), draw(1, 3, 4, seed=2), interleaved=True),
        sample(x, draw(3, 4, seed=1), draw(3, 4, seed=2)),
        sample(draw(2, 4, 0, 8), draw(0, 4), draw(0, 4)),
        sample(draw(1, 1, 1, 2, dtype="f64"), draw(1, 1, dtype="f64"), draw(1, 1, dtype="f64")),
    ]


def _axial_samples() -> list[Sample]:
    tables = draw(3, 2, seed=1), draw(3, 2, seed=2), draw(5, 2, seed=3), draw(5, 2, seed=4)
    return [
        sample(draw(2, 4, 15, 8), *tables),
        sample(draw(2, 4, 15, 8), *tables, interleaved=True),
    ]


OPDEFS = [
    OpDef(
        "rotary",
        Kind.MOVEMENT,
        "x, cos, sin, position_ids?",
        infer=_infer_rotary,
        reference=_rotary,
        samples=_rotary_samples,
        grad=_backward((2,), _compose_rotary),
        attrs={"interleaved": _INTERLEAVED, "rotary_dim": Attr("int", 0)},
        doc="Rotates the first rotary_dim features (0: all) of x[B, H, S, D]. cos and sin are "
        "[positions, pairs] read at position_ids[B, S], or [B or 1, S, pairs] or [S, pairs].",
    ),
    OpDef(
        "axial_rotary",
        Kind.MOVEMENT,
        "x, cos_h, sin_h, cos_w, sin_w",
        infer=_infer_axial,
        reference=_axial,
        samples=_axial_samples,
        grad=_backward((2, 4), _compose_axial),
        attrs={"interleaved": _INTERLEAVED},
        doc="Rotates x[B, H, rows * columns, D] on a grid: the first D/2 features by the row's "
        "angles [rows, D/4], the others by the column's [columns, D/4].",
    ),
]
