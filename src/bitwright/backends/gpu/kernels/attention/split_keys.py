"""Attention of few queries: programs share the keys of a head, a second kernel joins their parts.

    part:  top, sums and acc of one range of keys, for all queries of all heads that share the keys
    join:  y = sum(acc 2^(top - highest)) / sum(sums 2^(top - highest)), in the order of the ranges

Rows of a tile are (head of the group, query).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bitwright.backends.gpu.codegen.source import Config, KernelSource, Work, cdiv
from bitwright.backends.gpu.kernels.attention.spec import Attention, padded
from bitwright.backends.gpu.lowering.operands import At
from bitwright.ir.dtype import f32

MAX_ROWS = 64
"""Queries times heads of a group; more use blocks of queries."""
KEYS = 32
"""Keys of a tile."""


def part_source(form: Attention, rows: int, splits: int) -> KernelSource:
    wide, deep, tall = padded(form.features), padded(form.values), padded(rows)
    mask = f"r < {rows}" if wide == form.features else f"(r < {rows}) & (dq < {form.features})"
    spot = f"((b * kv_heads + kv) * {splits} + tl.program_id(1)) * {rows} + r"
    lines = [
        "b = (tl.program_id(0) // kv_heads).to(tl.int64)",
        "kv = (tl.program_id(0) % kv_heads).to(tl.int64)",
        f"r = tl.arange(0, {tall})[:, None]",
        f"row_ok = r < {rows}",
        "m = r % queries",
        "h = kv * group + r // queries",
        f"dq = tl.arange(0, {wide})[None, :]",
        f"d = tl.arange(0, {wide})[:, None]",
        f"dv = tl.arange(0, {deep})[None, :]",
        *form.offset_lines(),
        "position = before + m",
        *form.range_lines("before", "(before + queries - 1)"),
        "low = (tl.maximum(low, 0) // BN) * BN",
        f"share = tl.cdiv(tl.maximum(high - low, 0), {splits} * BN) * BN",
        "first = low + tl.program_id(1) * share",
        "last = tl.minimum(first + share, high)",
        f"qt = tl.load(q + b * q_s0 + h * q_s1 + m * q_s2 + dq, {mask}, other=0.0)",
        f'top = tl.full([{tall}], float("-inf"), tl.float32)',
        f"sums = tl.zeros([{tall}], tl.float32)",
        f"acc = tl.zeros([{tall}, {deep}], tl.float32)",
        *form.key_loops(
            [
                f"s = tl.dot(qt, kt{form.dot})",
                *form.score_lines("h", "m"),
                *form.softmax_lines(),
            ],
            "first",
            "last",
        ),
        f"tl.store(tops + {spot}, top[:, None], row_ok)",
        f"tl.store(sum_parts + {spot}, sums[:, None], row_ok)",
        f"tl.store(parts + ({spot}) * {form.values} + dv, acc, row_ok & (dv < {form.values}))",
    ]
    pointers = {**form.operands, "tops": f32, "sum_parts": f32, "parts": f32}
    sizes = (*form.sizes, *form.stride_sizes)
    depth = form.features + form.values

    def grid(size: Mapping[str, int]) -> Sequence[int]:
        return size["batches"] * size["kv_heads"], splits

    return KernelSource(
        f"attention_part_{form.element}",
        "\n".join(lines),
        pointers,
        sizes,
        (
            Config({"BN": KEYS}, 4, 3),
            Config({"BN": KEYS}, 4, 2),
            Config({"BN": KEYS}, 2, 3),
        ),
        grid,
        contracts=True,
        work=Work(
            lambda size: 2.0 * size["programs"] * size["queries"] * size["total"] * depth,
            form.element.name,
        ),
    )


def join_source(form: Attention, rows: int, splits: int) -> KernelSource:
    """One program per row: batches × heads × queries."""
    deep, many = padded(form.values), 1 << max(splits - 1, 0).bit_length()
    at = At("row + tl.zeros([1, 1], tl.int64)", "dv", "", f"dv < {form.values}")
    spot = f"((b * kv_heads + kv) * {splits} + part) * {rows} + r"
    lines = [
        "row = tl.program_id(0).to(tl.int64)",
        "m = row % queries",
        "h = (row // queries) % heads",
        "b = row // (queries * heads)",
        "kv = h // group",
        "r = (h % group) * queries + m",
        f"dv = tl.arange(0, {deep})[None, :]",
        f"part = tl.arange(0, {many})[:, None]",
        f"spot = {spot}",
        f'top = tl.load(tops + spot, part < {splits}, other=float("-inf"))',
        "highest = tl.max(top, axis=0)[None, :]",
        'safe = tl.where(highest == float("-inf"), 0.0, highest)',
        "weight = tl.exp2(top - safe)",
        f"total = tl.sum(weight * tl.load(sum_parts + spot, part < {splits}, other=0.0), axis=0)",
        f"inside = (part < {splits}) & (dv < {form.values})",
        f"found = tl.load(parts + spot * {form.values} + dv, inside, other=0.0)",
        "found = tl.sum(weight * found, axis=0)[None, :]",
        "found = found / tl.where(total == 0, 1.0, total)[None, :]",
        *form.tail.text("found", at, 0).split("\n"),
    ]
    pointers = {"tops": f32, "sum_parts": f32, "parts": f32, **form.tail.pointers}
    sizes = ("batches", "heads", "kv_heads", "group", "queries", *form.tail.sizes)
    return KernelSource(
        f"attention_join_{form.element}",
        "\n".join(lines),
        pointers,
        sizes,
        (Config({"UNUSED": 1}, 4 if many * deep >= 4096 else 2, 1),),
        lambda size: (size["batches"] * size["heads"] * size["queries"],),
    )


def split_count(programs: object, total: object, multiprocessors: int) -> int:
    """How many programs share the keys of a head."""
    if not isinstance(programs, int):
        return 16
    wanted = max(1, cdiv(2 * multiprocessors, max(programs, 1)))
    if isinstance(total, int):
        wanted = min(wanted, max(1, cdiv(total, KEYS)))
    return min(wanted, 64)
