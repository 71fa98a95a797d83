"""Attention of blocks of queries: scores stay in registers, keys are read once per block.

    for each block of keys:  s = q @ k.T;  top, sums, acc are updated;  y = acc / sums

A program computes BM queries of one head; where one block holds all keys, it loops over further
heads, whose operands are loaded meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bitwright.backends.gpu.codegen.source import Config, KernelSource, Work, cdiv
from bitwright.backends.gpu.kernels.attention.spec import Attention, padded
from bitwright.backends.gpu.lowering.operands import At
from bitwright.ir.dtype import f32

ALL = 1 << 30
"""As PROGRAMS: every program computes one block."""


def flash_source(form: Attention, multiprocessors: int) -> KernelSource:
    wide, deep = padded(form.features), padded(form.values)
    scores = [
        f"s = tl.dot(qt, kt{form.dot})",
        *form.score_lines("h", "m"),
        *form.softmax_lines(),
    ]
    at = At("(b * heads + h) * queries + m", "dv", "m < queries", f"dv < {form.values}")
    block = form.whole_block
    mask = "m < queries" if wide == form.features else f"(m < queries) & (dq < {form.features})"
    is_single = block == form.sizes["total"] and block > 0
    place = ("item % row_blocks", "item // row_blocks")
    row_block, head = place if is_single else ("tl.program_id(0)", "tl.program_id(1)")
    features = [
        f"dq = tl.arange(0, {wide})[None, :]",
        f"d = tl.arange(0, {wide})[:, None]",
        f"dv = tl.arange(0, {deep})[None, :]",
    ]
    lines = [
        f"h = (({head}) % heads).to(tl.int64)",
        f"b = (({head}) // heads).to(tl.int64)",
        "kv = h // group",
        f"m = ({row_block}) * BM + tl.arange(0, BM)[:, None]",
        "row_ok = m < queries",
        *([] if block else _bounds(form)),
        f"qt = tl.load(q + b * q_s0 + h * q_s1 + m.to(tl.int64) * q_s2 + dq, {mask}, other=0.0)",
        'top = tl.full([BM], float("-inf"), tl.float32)',
        "sums = tl.zeros([BM], tl.float32)",
        f"acc = tl.zeros([BM, {deep}], tl.float32)",
        *(form.whole_lines() if block else form.key_loops(scores)),
        "found = acc / tl.where(sums == 0, 1.0, sums)[:, None]",
        *form.tail.text("found", at, 0).split("\n"),
    ]
    sizes = _sizes(form)
    pointers = {**form.operands, **form.tail.pointers}
    depth = form.features + form.values
    return KernelSource(
        f"attention_{form.element}",
        "\n".join([*features, *(_loop(lines) if is_single else lines)]),
        pointers,
        sizes,
        _single_configs(form, multiprocessors) if is_single else _configs(form),
        _single_grid if is_single else _grid,
        contracts=True,
        work=Work(
            lambda size: (
                2.0
                * size["programs"]
                * size["queries"]
                * size["total"]
                * depth
                * (0.5 if form.causal else 1.0)
            ),
            form.element.name,
        ),
    )


def _loop(lines: Sequence[str]) -> list[str]:
    """A loop over blocks of queries and heads, or (with PROGRAMS=ALL) one of them, which needs
    fewer registers."""
    inside = [f"    {line}" for line in lines]
    return [
        "row_blocks = tl.cdiv(queries, BM)",
        f"if PROGRAMS == {ALL}:",
        "    item = tl.program_id(0)",
        *inside,
        "else:",
        "    for item in range(tl.program_id(0), row_blocks * programs, tl.num_programs(0)):",
        *(f"    {line}" for line in inside),
    ]


def _bounds(form: Attention) -> list[str]:
    """Statements for the keys `low` to `high` that the queries of a program may see."""
    return [
        *form.offset_lines(),
        "position = before + m",
        "first = before + tl.program_id(0) * BM",
        "last = before + tl.minimum(tl.program_id(0) * BM + BM, queries) - 1",
        *form.range_lines("first", "last"),
        "low = (tl.maximum(low, 0) // BN) * BN",
    ]


def _sizes(form: Attention) -> tuple[str, ...]:
    return (*form.sizes, *form.stride_sizes, *form.tail.sizes)


def _grid(size: Mapping[str, int]) -> Sequence[int]:
    return cdiv(size["queries"], size["BM"]), size["programs"]


def _single_grid(size: Mapping[str, int]) -> Sequence[int]:
    return (min(cdiv(size["queries"], size["BM"]) * size["programs"], size["PROGRAMS"]),)


def _single_configs(form: Attention, multiprocessors: int) -> tuple[Config, ...]:
    """As `_configs`; programs that loop load the next operands while they compute."""
    queries, heads = form.sizes["queries"], form.sizes["programs"]
    few = False
    if isinstance(queries, int) and isinstance(heads, int):
        few = cdiv(queries, 64) * heads <= multiprocessors
    tiles: tuple[tuple[int, int, int, int], ...]
    if form.element == f32 or max(form.features, form.values) > 64:
        tiles = ((64, 4, 1, ALL), (32, 4, 1, ALL), (64, 8, 1, ALL))
    elif few:
        tiles = ((64, 4, 1, ALL), (32, 4, 1, ALL), (16, 2, 1, ALL), (32, 2, 1, ALL))
    else:
        tiles = ((64, 4, 1, ALL), (64, 4, 2, 4), (64, 4, 3, 3), (128, 8, 2, 2), (128, 4, 2, 3))
    return tuple(
        Config(
            {
                "BM": rows,
                "BN": form.whole_block,
                "PROGRAMS": ALL if each == ALL else each * multiprocessors,
            },
            warps,
            stages,
        )
        for rows, warps, stages, each in tiles
    )


def _configs(form: Attention) -> tuple[Config, ...]:
    """BN fixes the order of sums; candidates differ in BM, warps and stages only."""
    widest = max(padded(form.features), padded(form.values))
    block = form.whole_block
    tiles: tuple[tuple[int, int, int], ...]
    if form.element == f32:
        keys, tiles = 64 if widest <= 64 else 32, ((64, 4, 2), (32, 4, 2), (64, 8, 2))
    elif widest > 128:
        keys, tiles = 32, ((64, 8, 2), (128, 8, 2))
    else:
        keys, tiles = 64, ((64, 4, 3), (128, 8, 3), (64, 4, 2), (128, 8, 2))
        tiles += ((128, 4, 3), (64, 8, 3)) if widest <= 64 else ()
    return tuple(
        Config({"BM": rows, "BN": block or keys}, warps, stages) for rows, warps, stages in tiles
    )
