"""Steps that move elements: views, joins and parts, gathers and scatters, padding."""

from __future__ import annotations

import numpy as np
from onnx_growing import BOOL, F32, I8, I32, I64, U8, Growing, Size, Value, count


def _movable(g: Growing, ranks: tuple[int, ...] = (1, 2, 3, 4)) -> Value:
    return g.operand(g.pick(*[F32] * 8, I64, I64, BOOL, U8, I8, I32), ranks)


def transpose(g: Growing) -> None:
    x = _movable(g)
    perm = [int(axis) for axis in g.random.permutation(x.rank)]
    g.move("Transpose", [x], [x.shape[axis] for axis in perm], perm=perm)


def reshape(g: Growing) -> None:
    x = _movable(g)
    shape: list[Size] = list(x.shape)
    at = g.integer(0, x.rank - 1)
    if x.rank > 1 and g.chance(0.6):
        at = min(at, x.rank - 2)
        pair = shape[at : at + 2]
        joined: Size = g.unknown()
        if all(isinstance(s, int) for s in pair):
            joined = pair[0] * pair[1]  # type: ignore[assignment, operator]
        shape[at : at + 2] = [joined]
    elif isinstance(shape[at], int) and shape[at]:
        part = g.pick(*[p for p in (1, 2, 3, 4, 8) if shape[at] % p == 0])  # type: ignore[operator]
        rest = shape[at] // part  # type: ignore[operator]
        shape[at : at + 1] = g.pick([rest, part], [part, rest])
    named = [i for i, s in enumerate(shape) if isinstance(s, str)]
    if len(named) > 1 or (named and 0 in shape):
        return
    target = [-1 if isinstance(s, str) else s for s in shape]
    if not named and 0 not in shape and g.chance(0.3):
        target[g.integer(0, len(target) - 1)] = -1
    g.move("Reshape", [x, g.numbers(target)], shape, allowzero=1 if 0 in shape else None)


def squeeze(g: Growing) -> None:
    x = _movable(g)
    ones = [axis for axis, s in enumerate(x.shape) if s == 1]
    if ones and g.chance(0.5):
        gone = [axis for axis in ones if g.chance(0.7)] or ones[:1]
        kept = [s for axis, s in enumerate(x.shape) if axis not in gone]
        g.move("Squeeze", [x, g.numbers(gone)], kept)
        return
    at = g.integer(0, x.rank)
    shape = [*x.shape[:at], 1, *x.shape[at:]]
    if len(shape) <= 5:
        g.move("Unsqueeze", [x, g.numbers([at])], shape)


def flatten(g: Growing) -> None:
    x = _movable(g)
    axis = g.integer(0, x.rank)
    sides = [x.shape[:axis], x.shape[axis:]]
    shape: list[Size] = []
    for side in sides:
        known = all(isinstance(s, int) for s in side)
        shape.append(int(np.prod(side, dtype=np.int64)) if known else g.unknown())  # type: ignore[arg-type]
    g.move("Flatten", [x], shape, axis=axis)


def slice_(g: Growing) -> None:
    x = _movable(g)
    axis = g.integer(0, x.rank - 1)
    size = x.shape[axis]
    if isinstance(size, str) or size == 0:
        return
    step = g.pick(1, 1, 2, 3, -1, -2)
    start, stop = (g.integer(-size - 1, size + 1) for _ in range(2))
    found = len(range(*slice(start, stop, step).indices(size)))
    shape = [found if at == axis else s for at, s in enumerate(x.shape)]
    given = [g.numbers([number]) for number in (start, stop, axis, step)]
    g.move("Slice", [x, *given], shape)


def concat(g: Growing) -> None:
    x = _movable(g)
    axis = g.integer(0, x.rank - 1)
    if isinstance(x.shape[axis], str):
        return

    def around(v: Value) -> tuple[Size, ...]:
        return (*v.shape[:axis], *v.shape[axis + 1 :])

    same = [
        v
        for v in g.values
        if v.dtype == x.dtype
        and v.rank == x.rank
        and around(v) == around(x)
        and isinstance(v.shape[axis], int)
    ]
    parts = [x, *(g.pick(*same) for _ in range(g.integer(0, 3)))]
    total = sum(v.shape[axis] for v in parts)  # type: ignore[misc]
    shape = [total if at == axis else s for at, s in enumerate(x.shape)]
    if count(shape) <= 1 << 14:
        exact = all(v.exact for v in parts)
        g.make(
            "Concat",
            list(parts),
            shape,
            x.dtype,
            exact,
            axis=axis - (x.rank if g.chance(0.3) else 0),
        )


def split(g: Growing) -> None:
    x = _movable(g)
    axis = g.integer(0, x.rank - 1)
    size = x.shape[axis]
    if isinstance(size, str):
        return
    cuts = sorted(g.integer(0, size) for _ in range(g.integer(1, 3)))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, size], strict=True)]
    results = [
        (x.dtype, [part if at == axis else s for at, s in enumerate(x.shape)], x.exact)
        for part in sizes
    ]
    g.nodes_of("Split", [x, g.numbers(sizes)], results, axis=axis)


def expand(g: Growing) -> None:
    x = _movable(g)
    if any(isinstance(s, str) for s in x.shape):
        return
    front = [g.pick(1, 2, 3)] if g.chance(0.5) and x.rank < 4 else []
    shape = [*front, *(g.pick(0, 1, 3, 5) if s == 1 and g.chance(0.7) else s for s in x.shape)]
    if count(shape) <= 1 << 14:
        g.move("Expand", [x, g.numbers(shape)], shape)  # type: ignore[arg-type]


def tile(g: Growing) -> None:
    x = _movable(g)
    repeats = [g.pick(1, 1, 2, 3, 0 if g.chance(0.05) else 1) for _ in x.shape]
    shape = [
        s * r if isinstance(s, int) else (s if r == 1 else g.unknown())
        for s, r in zip(x.shape, repeats, strict=True)
    ]
    if count(shape) <= 1 << 14:
        g.move("Tile", [x, g.numbers(repeats)], shape)


def pad(g: Growing) -> None:
    x = g.operand(F32, (1, 2, 3, 4))
    mode = g.pick("constant", "constant", "reflect", "edge", "wrap")
    begins, ends, shape = [], [], []
    for size in x.shape:
        low = g.pick(0, 0, 1, 2, -1 if mode == "constant" else 0)
        high = g.pick(0, 0, 1, 3, -1 if mode == "constant" else 0)
        if mode != "constant" and (isinstance(size, str) or size <= max(low, high)):
            low = high = 0
        if (low < 0 or high < 0) and (isinstance(size, str) or size < 4):
            low = high = 0
        begins.append(low)
        ends.append(high)
        more = low + high
        shape.append(size + more if isinstance(size, int) else (g.unknown() if more else size))
    value = g.constant(np.float32(0.5)) if mode == "constant" and g.chance(0.6) else None
    if count(shape) <= 1 << 14:
        g.move("Pad", [x, g.numbers([*begins, *ends]), value], shape, mode=mode)


def gather(g: Growing) -> None:
    x = _movable(g)
    axis = g.integer(0, x.rank - 1)
    size = x.shape[axis]
    if isinstance(size, str) or size == 0:
        return
    shape = g.pick((), (1,), (3,), (2, 2), (0,))
    held = g.random.integers(-size, size, shape).astype(g.pick(np.int64, np.int32))
    indices = g.decisive(held)
    found = [*x.shape[:axis], *shape, *x.shape[axis + 1 :]]
    if len(found) <= 5:
        g.move("Gather", [x, indices], found, axis=axis)


def gather_elements(g: Growing) -> None:
    x = _movable(g)
    axis = g.integer(0, x.rank - 1)
    if any(isinstance(s, str) or s == 0 for s in x.shape):
        return
    shape = [g.integer(1, s) for s in x.shape]  # type: ignore[arg-type]
    shape[axis] = g.pick(1, 2, 5)
    held = g.random.integers(-x.shape[axis], x.shape[axis], shape)  # type: ignore[operator]
    indices = g.decisive(held.astype(np.int64))
    g.move("GatherElements", [x, indices], shape, axis=axis)  # type: ignore[arg-type]


def gather_nd(g: Growing) -> None:
    x = _movable(g, (2, 3, 4))
    if any(isinstance(s, str) or s == 0 for s in x.shape):
        return
    depth = g.integer(1, x.rank)
    rows = g.pick((1,), (3,), (2, 2))
    held = np.stack([g.random.integers(-s, s, rows) for s in x.shape[:depth]], -1)
    indices = g.decisive(held.astype(np.int64))
    g.move("GatherND", [x, indices], [*rows, *x.shape[depth:]])


def scatter_elements(g: Growing) -> None:
    x = g.operand(F32, (1, 2, 3, 4))
    axis = g.integer(0, x.rank - 1)
    if any(isinstance(s, str) or s == 0 for s in x.shape):
        return
    shape = [g.integer(1, s) for s in x.shape]  # type: ignore[arg-type]
    size = int(x.shape[axis])
    reduction = g.pick("none", "add", "mul", "max", "min")
    held = np.empty(shape, np.int64)
    places = held.swapaxes(axis, -1)  # different along the axis: no write meets another
    for at in np.ndindex(places.shape[:-1]):
        places[at] = g.random.permutation(size)[: shape[axis]]
    updates = g.constant(g.array(shape))
    indices = g.decisive(held - size * (g.random.random(shape) < 0.3))
    exact = x.exact and reduction in ("none", "max", "min")
    given = [x, indices, updates]
    g.make("ScatterElements", given, x.shape, exact=exact, axis=axis, reduction=reduction)


def scatter_nd(g: Growing) -> None:
    x = g.operand(F32, (1, 2, 3, 4))
    if any(isinstance(s, str) or s == 0 for s in x.shape):
        return
    depth = g.integer(1, x.rank)
    sizes = [int(s) for s in x.shape[:depth]]
    total = int(np.prod(sizes))
    rows = g.integer(1, min(3, total))
    flat = g.random.permutation(total)[:rows]
    held = np.stack(np.unravel_index(flat, sizes), -1).astype(np.int64)
    updates = g.constant(g.array([rows, *x.shape[depth:]]))  # type: ignore[list-item]
    reduction = g.pick("none", "add", "mul", "max", "min")
    exact = x.exact and reduction in ("none", "max", "min")
    given = [x, g.decisive(held), updates]
    g.make("ScatterND", given, x.shape, exact=exact, reduction=reduction)


def one_hot(g: Growing) -> None:
    shape = [g.size() for _ in range(g.integer(0, 2))]
    depth = g.pick(1, 2, 5, 9)
    indices = g.enter(shape, I64)
    axis = g.integer(-len(shape) - 1, len(shape))
    at = axis % (len(shape) + 1)
    values = g.constant(np.array([0.25, 1.0], np.float32))
    given = [indices, g.decisive(np.array(depth)), values]
    g.make("OneHot", given, [*shape[:at], depth, *shape[at:]], exact=True, axis=axis)


def triangle(g: Growing) -> None:
    x = g.operand(F32, (2, 3, 4))
    k = g.decisive(np.array(g.integer(-2, 2)))
    g.move("Trilu", [x, k], x.shape, upper=g.pick(0, 1))


def blocks(g: Growing) -> None:
    x = g.image(2)
    n, c, h, w = x.shape
    b = g.pick(1, 2, 3)
    if isinstance(h, str) or isinstance(w, str) or isinstance(c, str):
        return
    if c % (b * b) == 0 and g.chance(0.6):
        mode = g.pick("DCR", "CRD")
        g.move("DepthToSpace", [x], [n, c // b // b, h * b, w * b], blocksize=b, mode=mode)
    elif h % b == 0 and w % b == 0:
        g.move("SpaceToDepth", [x], [n, c * b * b, h // b, w // b], blocksize=b)


def range_(g: Growing) -> None:
    start, step = g.integer(-3, 3), g.pick(1, 2, -1)
    limit = start + step * g.integer(0, 9)
    kind = g.pick(I64, I32, F32)
    given = [g.decisive(np.array(v, kind)) for v in (start, limit, step)]
    size = len(range(start, limit, step))
    g.make("Range", given, [size], kind, True)


def reverse_sequence(g: Growing) -> None:
    x = g.operand(F32, (2, 3))
    n, length = x.shape[:2]
    if isinstance(n, str) or isinstance(length, str) or length == 0:
        return
    held = g.random.integers(1, length + 1, [n]).astype(np.int64)
    lengths = g.decisive(held)
    g.move("ReverseSequence", [x, lengths], x.shape, batch_axis=0, time_axis=1)


STEPS = [
    *[transpose, reshape, slice_, concat] * 3,
    *[split, expand, pad, gather, squeeze] * 2,
    *[flatten, tile, gather_elements, gather_nd, scatter_elements, scatter_nd],
    *[one_hot, triangle, blocks, range_, reverse_sequence],
]
