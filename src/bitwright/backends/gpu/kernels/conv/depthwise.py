"""Convolutions with one input channel per filter, in NHWC: a sum over taps of elementwise products.

A program computes BM pixels × BN channels. Integers are widened to i32 and centred before the
product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import indent

from bitwright.backends.gpu.codegen.source import Config, Grid, cdiv
from bitwright.backends.gpu.kernels.conv.geometry import Geometry
from bitwright.backends.gpu.kernels.conv.implicit import PAD, PAD_LINE

CONFIGS = (
    Config({"BM": 32, "BN": 64}, 4, 1),
    Config({"BM": 16, "BN": 128}, 4, 1),
    Config({"BM": 64, "BN": 32}, 4, 1),
    Config({"BM": 128, "BN": 32}, 8, 1),
)


def body(geometry: Geometry, filters: int, type_: str, fill: int | str, tail: str) -> str:
    """`type_` is that of the sum, `fill` the value of pixels outside of the image."""
    inside = geometry.inside("[:, None]")
    mask = f"here & {inside}" if inside else "here"
    is_centred = fill not in (0, "0.0")
    other = 0 if is_centred else fill
    centre = f"{PAD}.to({type_})" if fill == PAD else fill
    lines = [
        *geometry.tap_lines("tap"),
        f"x_tile = tl.load(x_at + shift * C, mask={mask}, other={other}).to({type_})",
        f"x_tile = tl.where({mask}, x_tile - {centre}, 0)" if is_centred else "",
        f"w_tile = tl.load(w + tap * {filters} + columns, mask=columns < N, other=0)",
        f"acc += x_tile * w_tile.to({type_})[None, :]",
    ]
    multiplier = filters // geometry.channels
    head = "\n".join(geometry.head)
    window = "\n".join(geometry.window_lines("tl.minimum(rows, M - 1)"))
    return f"""
{head}
N: tl.constexpr = {filters}
rows = tl.program_id(0) * BM + tl.arange(0, BM)
columns = tl.program_id(1) * BN + tl.arange(0, BN)
row = rows[:, None].to(tl.int64)
column = columns[None, :]
here = (row < M) & (column < N)
{window}
{PAD_LINE if fill == PAD else ""}
x_at = x + (image * C)[:, None] + (columns // {multiplier})[None, :]
acc = tl.zeros((BM, BN), {type_})
for tap in tl.static_range(TAPS):
{indent(chr(10).join(line for line in lines if line), "    ")}
{tail}
"""


def grid(filters: int) -> Grid:
    def programs(size: Mapping[str, int]) -> Sequence[int]:
        return cdiv(size["M"], size["BM"]), cdiv(filters, size["BN"])

    return programs
