"""Many rows times packed weights: tiles of weights are dequantized in registers, then multiplied.

A tile of words [BN, words] becomes weights [BN, BK] by shifts, is scaled, converted to the type of
the rows and multiplied on the tensor cores. The type of the product is that of the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import indent

from bitwright.backends.gpu.codegen.source import Config, Grid, cdiv
from bitwright.backends.gpu.codegen.types import triton_type
from bitwright.backends.gpu.kernels.matmul.product import ORDER, PLACE
from bitwright.backends.gpu.kernels.weight_only.few_rows import PackedProduct
from bitwright.backends.gpu.kernels.weight_only.packing import GROUP
from bitwright.ir.dtype import DType, bf16, f4e2m1, f8e4m3fn, f8e5m2, f32, i8, u8

CANDIDATES = (
    # rows, columns, depth, warps, stages
    (64, 128, 64, 4, 3),
    (128, 128, 64, 8, 3),
    (16, 64, 128, 4, 3),
    (32, 64, 64, 4, 3),
    (64, 64, 64, 4, 3),
    (128, 64, 64, 4, 3),
)


def body(facts: PackedProduct, x: DType, tail: str) -> str:
    count = 8 if facts.is_narrow else 4
    per_group = facts.per_group
    shifts = "(p % 4) * 8 + (p // 4) * 4" if facts.is_narrow else "p * 8"
    is_late = facts.block >= facts.depth  # one scale per column: integers enter the product as such
    zero = ""
    if facts.has_zero:
        load = "tl.load(zero + block, mask=w_in, other=0).to(tl.float32)"
        offset = f" + {facts.offset}" if facts.offset else ""
        zero = f"v = v - ({load}{offset})[:, :, None]"
    elif facts.offset:
        zero = f"v = v - {facts.offset}"
    load = "tl.load(scale + block, mask=w_in, other=0.0).to(tl.float32)"
    scaled = f"v = v * ({load})[:, :, None]"
    lines = [
        "k = step * BK + tl.arange(0, BK)",
        "x_tile = tl.load(x + rows_in[:, None] * x_row + k[None, :], "
        "mask=(k < K)[None, :], other=0.0)",
        f"at = step * (BK // {count}) + tl.arange(0, BK // {count})",
        f"here = (columns < N)[:, None] & (at < G * {per_group})[None, :]",
        f"word = tl.load(q + columns_in[:, None] * (G * {per_group}) + at[None, :], "
        "mask=here, other=0)",
        f"v = {_decoded(facts, shifts)}",
        f"v = tl.reshape(v, (BN, BK // {GROUP}, {GROUP}))",
        f"blocks = step * (BK // {GROUP}) + tl.arange(0, BK // {GROUP})",
        "w_in = (columns < N)[:, None] & (blocks < G)[None, :]",
        f"block = columns_in[:, None] * BLOCKS + (blocks * {GROUP} // BLOCK)[None, :]",
        *([zero] if zero else []),
        *([] if is_late else [scaled]),
        "v = tl.reshape(v, (BN, BK))",
        _dot(facts, x),
    ]
    late = "s = tl.load(scale + columns, mask=columns < N, other=0.0).to(tl.float32)"
    late = f"{late}\nacc = acc * s[None, :]" if is_late else ""
    return f"""
N: tl.constexpr = {facts.columns}
K: tl.constexpr = {facts.depth}
G: tl.constexpr = {facts.groups}
BLOCK: tl.constexpr = {facts.block}
BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
row_tiles = tl.cdiv(M, BM)
column_tiles = tl.cdiv(N, BN)
tile = tl.program_id(0)
{ORDER}
{PLACE}
rows_in = tl.minimum(rows, M - 1).to(tl.int64)
columns_in = tl.minimum(columns, N - 1).to(tl.int64)
p = tl.arange(0, {count})
acc = tl.zeros((BM, BN), tl.float32)
for step in range(tl.cdiv(K, BK)):
{indent(chr(10).join(lines), "    ")}
{late}
{tail}
"""


def _decoded(facts: PackedProduct, shifts: str) -> str:
    """All weights of a tile of words, [BN, words, weights per word], in f32."""
    shifted = f"(word[:, :, None] >> ({shifts})[None, None, :])"
    if facts.kind == f4e2m1:
        return f"bw_f4({shifted} & 15)"
    if facts.is_narrow:
        return f"({shifted} & 15).to(tl.float32)"
    if facts.kind in (i8, u8):
        return f"(({shifted} << 24) >> 24).to(tl.float32)"
    type_ = {f8e4m3fn: "tl.float8e4nv", f8e5m2: "tl.float8e5"}[facts.kind]
    return f"({shifted} & 255).to(tl.uint8).to({type_}, bitcast=True).to(tl.float32)"


def _dot(facts: PackedProduct, x: DType) -> str:
    if x == f32:
        return 'acc = tl.dot(x_tile, v.T, acc, input_precision="ieee")'
    if facts.is_twin and x == bf16:
        return "acc = tl.dot(x_tile.to(tl.float32), v.to(tl.bfloat16).to(tl.float32).T, acc)"
    return f"acc = tl.dot(x_tile, v.to({triton_type(x)}).T, acc)"


def configs(rows: int) -> tuple[Config, ...]:
    """Candidates; first those whose tiles the rows fill."""

    def waste(candidate: Sequence[int]) -> float:
        height = candidate[0]
        return cdiv(rows, height) * height / rows + 8.0 / height

    return tuple(
        Config({"BM": m, "BN": n, "BK": k, "GROUP": 8}, warps, stages)
        for m, n, k, warps, stages in sorted(CANDIDATES, key=waste)
    )


def grid(columns: int) -> Grid:
    def programs(size: Mapping[str, int]) -> Sequence[int]:
        return (cdiv(size["M"], size["BM"]) * cdiv(columns, size["BN"]),)

    return programs
