"""Convolutions as implicit matrix products: rows are pixels, columns filters, K taps × channels.

    taps   a step is a range of channels of one tap: rows of x are contiguous (16 channels and more)
    flat   K is all taps × channels in one range, with an address per element (few channels)

The tiles of x are gathered from the image where they are read; nothing is copied before. Pixels
outside of the image have the value `fill`: 0, or the zero point of x, which may be `PAD`, read from
memory. Program axis 0 counts tiles and groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import indent

from bitwright.backends.gpu.codegen.loads import masked_load
from bitwright.backends.gpu.codegen.source import Config, Grid, cdiv
from bitwright.backends.gpu.kernels.conv.geometry import Geometry
from bitwright.backends.gpu.kernels.matmul import tiles
from bitwright.backends.gpu.kernels.matmul.product import ORDER, PLACE, Product, in_pieces
from bitwright.backends.gpu.lowering.context import Machine
from bitwright.ir.dim import Size
from bitwright.ir.dtype import DType

FEWEST_CHANNELS = 16
"""With fewer channels per group the flat form is used."""


PAD = "pad"
"""The zero point of x, known at run time, in the text of a kernel."""
PAD_LINE = f"{PAD} = tl.load({PAD}_at)"


def is_flat(geometry: Geometry) -> bool:
    return geometry.per_group < FEWEST_CHANNELS


def body(product: Product, geometry: Geometry, depth: int, fill: int | str, tail: str) -> str:
    """`depth` is the padded length of a filter's row: per tap, or of all taps in the flat form."""
    step = (
        _flat(product, geometry, depth, fill)
        if is_flat(geometry)
        else _taps(product, geometry, depth, fill)
    )
    head = "\n".join(geometry.head)
    window = "\n".join(geometry.window_lines("rows_in"))
    return f"""
{head}
N: tl.constexpr = {product.columns}
row_tiles = tl.cdiv(M, BM)
column_tiles = tl.cdiv(N, BN)
tile = tl.program_id(0) % (row_tiles * column_tiles)
z = tl.program_id(0) // (row_tiles * column_tiles)
{ORDER}
{PLACE}
rows_in = tl.minimum(rows, M - 1)
columns_in = z * N + tl.minimum(columns, N - 1)
{window}
{PAD_LINE if fill == PAD else ""}
x_from = x + image * C + z * CG
{product.zeros}
{step}
{in_pieces(tail)}
"""


def _taps(product: Product, geometry: Geometry, depth: int, fill: int | str) -> str:
    """A step is BK channels of one tap."""
    lines = [
        "tap = step // BLOCKS",
        "k = (step % BLOCKS) * BK + tl.arange(0, BK)",
        *geometry.tap_lines("tap"),
    ]
    inside = geometry.inside()
    x_at = "(x_from + shift * C)[:, None] + k[None, :]"
    w_at = f"w + columns_in[None, :] * (TAPS * {depth}) + tap * {depth} + k[:, None]"
    w_masked = f"tl.load({w_at}, mask=(k < {depth})[:, None], other=0)"
    masks = [f"({inside})[:, None]"] if inside else []
    exact = product.step(masked_load(x_at, " & ".join(masks), fill, product.x), f"tl.load({w_at})")
    here = "(k < CG)[None, :]"
    x_masked = masked_load(x_at, " & ".join([*masks, here]), fill, product.x)
    ragged = product.step(_only(here, x_masked, product), w_masked)
    choice = f"if CG % BK == 0:\n{indent(exact, '    ')}\nelse:\n{indent(ragged, '    ')}"
    return f"""
BLOCKS: tl.constexpr = (CG + BK - 1) // BK
for step in range(TAPS * BLOCKS):
{indent(chr(10).join(lines), "    ")}
{indent(choice if geometry.per_group == depth else ragged, "    ")}
"""


def _flat(product: Product, geometry: Geometry, depth: int, fill: int | str) -> str:
    """A step is BK elements of all taps × channels."""
    lines = [
        "k = step * BK + tl.arange(0, BK)",
        *geometry.tap_lines("(k // CG)"),
    ]
    inside = geometry.inside("[:, None]", "[None, :]")
    here = "(k < TAPS * CG)[None, :]"
    mask = " & ".join([*([inside] if inside else []), here])
    x_at = "x_from[:, None] + (shift * C + k % CG)[None, :]"
    w_at = f"w + columns_in[None, :] * {depth} + k[:, None]"
    w_masked = f"tl.load({w_at}, mask=(k < {depth})[:, None], other=0)"
    x_masked = masked_load(x_at, mask, fill, product.x)
    step = product.step(_only(here, x_masked, product), w_masked)
    return f"""
for step in range((TAPS * CG + BK - 1) // BK):
{indent(chr(10).join(lines), "    ")}
{indent(step, "    ")}
"""


def _only(here: str, x_tile: str, product: Product) -> str:
    """A tile of x whose sums count the elements of the window, and no others."""
    return f"tl.where({here}, {x_tile}, {product.x_fill})" if product.row_sums else x_tile


def configs(
    machine: Machine, x: DType, geometry: Geometry, rows: Size, columns: int, weight: int
) -> tuple[Config, ...]:
    """Candidates of the pipelined form, with steps that the channels fill."""
    item = max(x.bits // 8, 1)
    known = geometry.per_group if not is_flat(geometry) else geometry.taps * geometry.per_group
    widest = max(1 << (known - 1).bit_length(), 32 // item, 16)
    depth = geometry.taps * geometry.per_group
    found: dict[str, Config] = {}
    for tile in tiles.candidates(machine, x, rows, columns, depth, False):
        config = tiles.config(tile, x, machine, False, 0, weight)
        constants = {k: v for k, v in config.constants.items() if k != "PARTS"}
        constants["BK"] = min(constants["BK"], widest)
        one = Config(constants, config.num_warps, config.num_stages)
        found.setdefault(one.name, one)
    return tuple(found.values())


def grid(columns: int, groups: int) -> Grid:
    def programs(size: Mapping[str, int]) -> Sequence[int]:
        return (cdiv(size["M"], size["BM"]) * cdiv(columns, size["BN"]) * groups,)

    return programs
