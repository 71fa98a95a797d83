"""Gradients of rotary embeddings, cumulative sums and gathers."""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.nn.compiled import Array, require, results


def rope_backward(
    dy: Any, cos: Any, sin: Any, n_rot: int | None = None, interleaved: bool = False
) -> Array:
    """The gradient of x from that of its rotation: the rotation by the opposite angles.

    dy is [..., positions, features] with up to four axes, cos and sin are [positions, n_rot / 2].
    The features after the first `n_rot` are copied.
    """
    given, angles = np.asarray(dy), (np.asarray(cos), np.asarray(sin))
    require(
        2 <= given.ndim <= 4,
        "dy has the wrong rank",
        expected="[batch, heads,] positions, features",
        found=list(given.shape),
    )
    size = given.shape[-1]
    rotated = size if n_rot is None else n_rot
    require(
        rotated > 0 and rotated % 2 == 0 and rotated <= size,
        "n_rot does not fit the features",
        expected=f"an even number up to {size}",
        found=rotated,
    )
    for name, table in zip(("cos", "sin"), angles, strict=True):
        require(
            table.shape[-2:] == (given.shape[-2], rotated // 2),
            f"{name} has the wrong shape",
            expected=[given.shape[-2], rotated // 2],
            found=list(table.shape),
        )
    whole = given.reshape((1,) * (4 - given.ndim) + given.shape)
    operands = {"dy": whole, "cos": angles[0], "sin": -angles[1]}
    attrs = {"interleaved": interleaved, "rotary_dim": 0 if rotated == size else rotated}
    return results("rotary", operands, **attrs)[0].reshape(given.shape)


def cumsum_backward(
    dy: Any, axis: int = -1, exclusive: bool = False, reverse: bool = False
) -> Array:
    """The gradient of x from that of its cumulative sum: sums from the other end."""
    _require_axis(np.ndim(dy), axis)
    attrs = {"axis": axis, "exclusive": exclusive, "reverse": not reverse}
    return results("cumsum", {"dy": dy}, **attrs)[0]


def gather_backward(indices: Any, dy: Any, size: int, axis: int = 0) -> Array:
    """The gradient of a table from that of `table.take(indices, axis)`: rows of dy are added at
    their indices into `size` zeroed rows. Negative indices count from the end."""
    places, given = np.asarray(indices), np.asarray(dy)
    require(places.dtype.kind in "iu", "indices are not integers", found=str(places.dtype))
    rank = given.ndim - places.ndim + 1
    require(rank >= 1, "dy has fewer axes than indices", found=list(given.shape))
    _require_axis(rank, axis)
    start = axis % rank
    require(
        given.shape[start : start + places.ndim] == places.shape,
        "dy does not fit the indices",
        expected=f"{list(places.shape)} from axis {start}",
        found=list(given.shape),
    )
    wrong = (places < -size) | (places >= size)
    if wrong.any():
        found = places[wrong].reshape(-1)[0]
        require(False, "an index is out of range", expected=f"{-size} to {size - 1}", found=found)
    operands = {"dy": given, "indices": places.astype(np.int64, copy=False)}
    return results("gather_backward", operands, axis=start, size=size)[0]


def _require_axis(rank: int, axis: int) -> None:
    require(-rank <= axis < rank, "the axis is out of range", expected=f"rank {rank}", found=axis)
