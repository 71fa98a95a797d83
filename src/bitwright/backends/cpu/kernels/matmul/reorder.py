"""Permutes every block of 32 channels of 8-bit rows, and pads them.

    y[line, 32 b + i] = x[line, 32 b + order[b, i]]

The order depends on the weights: it avoids pairs of neighbours that can saturate
(`kernels.matmul.dot.int8_pairs`). A block takes two shuffles of 16-byte halves and a blend. The
order of blocks repeats along a line of whole pixels. The end of a line behind its last whole block
is not permuted. Signed values get their top bit flipped: u8 = s8 + 128.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Value, i8
from bitwright.backends.cpu.codegen.instr import shuffle_bytes

Array = np.ndarray[Any, Any]
BLOCK, HALF = 32, 16
SIZES = (
    "lines", "oh", "ih", "top", "left", "run", "width", "x_image", "x_line", "period",
)  # fmt: skip
_NOTHING = 0x80
"""A shuffle index that yields 0."""
_FLIP = 0x80


def masks_of(order: Array) -> Array:
    """order[blocks, 32] as indices of two shuffles: of the block, and of the block with its 16-byte
    halves swapped."""
    target = np.arange(BLOCK) // HALF
    same = order // HALF == target
    place = (order % HALF).astype(np.uint8)
    return np.stack([np.where(same, place, _NOTHING), np.where(same, _NOTHING, place)], axis=1)


def best_order(weights: Array, largest: int) -> Array:
    """The order[blocks, 32] of the whole blocks of k in w[..., k, n] that minimizes the pairs whose
    weights of one sign in a column sum to more than `largest`."""
    depth, columns = weights.shape[-2:]
    blocks = depth // BLOCK
    wide = weights.astype(np.int16).reshape(-1, depth, columns)[:, : blocks * BLOCK]
    rows = np.moveaxis(wide, 1, 0).reshape(blocks, BLOCK, -1)
    if rows.shape[2] > _SAMPLE:
        rows = rows[:, :, :: -(-rows.shape[2] // _SAMPLE)]
    return np.array([_match(_conflicts(block, largest)) for block in rows]).reshape(-1, BLOCK)


_SAMPLE = 2048
"""The largest number of columns that is sampled."""


def _conflicts(block: Array, largest: int) -> Array:
    """For each two of the 32 rows, the number of columns in which they would saturate as a pair."""
    high, low = np.maximum(block, 0), np.maximum(-block, 0)
    found = np.empty((BLOCK, BLOCK), np.int64)
    for i in range(BLOCK):
        found[i] = (high[i] + high > largest).sum(1) + (low[i] + low > largest).sum(1)
    np.fill_diagonal(found, np.iinfo(np.int32).max)
    return found


def _match(conflicts: Array) -> list[int]:
    """An order of the rows in pairs with few conflicts: greedy matching, hardest rows first, then
    exchanges between two pairs while they reduce conflicts. Pairs are sorted by conflicts."""
    cost: list[list[int]] = conflicts.tolist()
    free = set(range(BLOCK))
    pairs: list[tuple[int, int]] = []
    for i in np.argsort(-np.sort(conflicts, 1)[:, :4].sum(1), kind="stable").tolist():
        if i in free:
            free.remove(i)
            j = min(free, key=cost[i].__getitem__)
            free.remove(j)
            pairs.append((i, j))
    improved = True
    while improved:
        improved = False
        for first in range(len(pairs)):
            for second in range(first):
                (a, b), (c, d) = pairs[first], pairs[second]
                now = cost[a][b] + cost[c][d]
                for left, right in (((a, c), (b, d)), ((a, d), (b, c))):
                    if cost[left[0]][left[1]] + cost[right[0]][right[1]] < now:
                        pairs[first], pairs[second], improved = left, right, True
                        break
    pairs.sort(key=lambda pair: cost[pair[0]][pair[1]])
    return [k for pair in pairs for k in pair]


def emit_reorder(module: Module, name: str, signed: bool) -> Signature:
    """Emits the kernel; slots as in `kernels.matmul.dot.int16_dot.emit_widen`. `period` is the
    number of blocks after which the order repeats, 0 for no permutation."""
    signature = Signature(("x", "y", "fill", "masks"), SIZES)
    with module.kernel(name, signature) as f:
        size = {slot: f.args.size(slot) for slot in SIZES}
        fill = f.load(i8, f.args.pointer("fill"))
        fill = f.xor(fill, _FLIP) if signed else fill
        begin, end = f.share(size["lines"])
        with f.loop(begin, end) as loop:
            image = f.udiv(loop.index, size["oh"])
            line = loop.index - image * size["oh"] - size["top"]
            y = f.gep(i8, f.args.pointer("y"), loop.index * size["width"])
            with f.if_(f.ult(line, size["ih"])) as branch:
                x = f.gep(i8, f.args.pointer("x"), image * size["x_image"] + line * size["x_line"])
                _fill(f, y, f.index(0), size["left"], fill)
                _permute(f, x, f.gep(i8, y, size["left"]), size["run"], size["period"], signed)
                _fill(f, y, size["left"] + size["run"], size["width"], fill)
            with branch.else_():
                _fill(f, y, f.index(0), size["width"], fill)
    return signature


def _fill(f: Kernel, y: Value, begin: Value, end: Value, fill: Value) -> None:
    vector = f.splat(fill, BLOCK)
    stop = end - f.urem(end - begin, BLOCK)
    with f.loop(begin, stop, BLOCK) as loop:
        f.store(vector, y, loop.index, align=1)
    with f.loop(stop, end) as loop:
        f.store(fill, y, loop.index)


def _permute(f: Kernel, x: Value, y: Value, count: Value, period: Value, signed: bool) -> None:
    """Permutes whole blocks and copies the rest of the line."""
    stop = f.select(f.gt(period, 0), count - f.urem(count, BLOCK), 0)
    shuffle = shuffle_bytes(f.target)
    assert shuffle is not None
    vector, masks = i8.vector(BLOCK), f.args.pointer("masks")
    with f.loop(0, stop, BLOCK, carry=(f.index(0),)) as loop:
        (block,) = loop.carried
        found = f.load(vector, x, loop.index, align=1)
        swapped = f.shuffle(found, [*range(HALF, BLOCK), *range(HALF)])
        at = block * (2 * BLOCK)
        own, other = (f.load(vector, masks, at + i * BLOCK, align=BLOCK) for i in (0, 1))
        value = f.or_(shuffle(f, found, own), shuffle(f, swapped, other))
        f.store(f.xor(value, _FLIP) if signed else value, y, loop.index, align=1)
        after = block + 1
        loop.next(f.select(f.eq(after, period), 0, after))
    with f.loop(stop, count) as loop:
        value = f.load(i8, x, loop.index)
        f.store(f.xor(value, _FLIP) if signed else value, y, loop.index)
