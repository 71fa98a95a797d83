"""Matrix products on the tensor cores as Triton text, in three forms.

    tma         tiles come through TMA descriptors; programs loop over tiles (capability 9.0)
    pipelined   tiles come through pointers with any strides (`cp.async`)
    split       as pipelined; every program sums a part of K, a second kernel adds the parts

A body computes `acc` [BM, BN] for the rows `row` [BM, 1] and columns `column` [1, BN] of matrix
`z` of the batch, then runs the statements of `tail`. Integer operands are summed exactly in i32
(modulo 2**32). Elements of u8 operands enter the product as x - 128; the caller corrects for it
(`zero_points`).

Sums of fp8 products: Hopper's tensor cores keep 13 bits of a partial sum and lose up to 2**-13 of
it every 32 terms. Sums of more than `tiles.F8_SHORT_SUM` terms are therefore added in f32 every
`F8_PARTIAL` terms (`max_num_imprecise_acc`), which takes a second accumulator. In shorter ones the
loss, at most 0.4% of the largest partial sum, is small beside the rounding of the operands (3%).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import indent

from bitwright.backends.gpu.codegen.loads import masked_load
from bitwright.backends.gpu.codegen.source import Descriptor, Grid, cdiv
from bitwright.ir.dim import Size
from bitwright.ir.dtype import DType, bf16, f8e4m3fn, f8e5m2, f32, f64, i32, u8

Strides = tuple[int | None, int | None]
F8 = (f8e4m3fn, f8e5m2)
F8_PARTIAL = 128
"""The terms of an fp8 partial sum that the tensor core adds by itself."""

LINE = 128
"""Bytes of a line of the L2 cache."""
MOST_LINES = 64
"""Of a row of weights that are fetched early."""

ORDER = """
# tiles in groups of GROUP rows, so that programs that run together share operands
group = tile // (GROUP * column_tiles)
first = group * GROUP
height = tl.minimum(row_tiles - first, GROUP)
row_tile = first + (tile % (GROUP * column_tiles)) % height
column_tile = (tile % (GROUP * column_tiles)) // height
"""

PLACE = """
rows = row_tile * BM + tl.arange(0, BM)
columns = column_tile * BN + tl.arange(0, BN)
row = rows[:, None].to(tl.int64)
column = columns[None, :]
"""


PIECES = """
# the tail on SUB column ranges of the tile, so that its values fit the registers
if SUB == 1:
    pieces = (acc,)
elif SUB == 2:
    pieces = bw_halves(acc)
else:
    left, right = bw_halves(acc)
    first_piece, second_piece = bw_halves(left)
    third_piece, fourth_piece = bw_halves(right)
    pieces = (first_piece, second_piece, third_piece, fourth_piece)
for piece in tl.static_range(SUB):
    acc = pieces[piece]
    columns = column_tile * BN + piece * (BN // SUB) + tl.arange(0, BN // SUB)
    column = columns[None, :]
"""

HALVES = """
@triton.jit
def bw_halves(acc):
    # the left and the right half of a tile, without a move between threads
    parts = tl.reshape(acc, (acc.shape[0], 2, acc.shape[1] // 2))
    return tl.split(tl.permute(parts, (0, 2, 1)))
"""


def accumulator(x: DType) -> DType:
    """The type that products of this type are summed in."""
    return i32 if x.is_integer else f64 if x == f64 else f32


@dataclass(frozen=True)
class Product:
    """y[z, m, n] = Σ_k x[z, m, k] w[z, k, n]."""

    x: DType
    w: DType
    columns: Size
    depth: Size
    x_strides: Strides = (None, 1)
    """Of rows and of K, in elements; None stands for a run-time size, such as `x_row`."""
    w_strides: Strides = (1, None)
    """Of K and of columns."""
    batch: tuple[str, ...] = ()
    """Statements that compute `x_batch` and `w_batch`, the offsets of matrix z; empty for one."""
    row_sums: bool = False
    """Whether `row_sums` [BM], the sums of x over K, is computed too."""
    column_sums: bool = False
    sums_alone: bool = False
    """Whether sums of float8 products are left to the tensor cores (`tiles.sums_alone`)."""
    is_twin: bool = False
    """Whether the text is for Triton's interpreter, whose `tl.dot` has no bf16."""

    @property
    def sum(self) -> DType:
        return accumulator(self.x)

    @property
    def head(self) -> str:
        """Sizes that are known are constants of the kernel."""
        known = {"N": self.columns, "K": self.depth}
        return "\n".join(f"{k}: tl.constexpr = {v}" for k, v in known.items() if isinstance(v, int))

    @property
    def sizes(self) -> tuple[str, ...]:
        """Run-time sizes: M, unknown ones of N and K, strides."""
        unknown = [k for k, v in (("N", self.columns), ("K", self.depth)) if not isinstance(v, int)]
        names = (("x_row", "x_k"), ("w_k", "w_column"))
        for pair, strides in zip(names, (self.x_strides, self.w_strides), strict=True):
            unknown += [name for name, stride in zip(pair, strides, strict=True) if stride is None]
        return ("M", *unknown)

    def step(self, x_tile: str, w_tile: str) -> str:
        """Statements that add the product of a tile x[BM, BK] with w[BK, BN]."""
        lines = [f"x_tile = {_signed(x_tile, self.x)}", f"w_tile = {_signed(w_tile, self.w)}"]
        if self.is_twin and self.x == bf16:
            lines = [f"{line}.to(tl.float32)" for line in lines]
        options = "out_dtype=tl.int32" if self.sum == i32 else ""
        if self.x in F8:
            options = "" if self.sums_alone else f"max_num_imprecise_acc={F8_PARTIAL}"
        elif self.x == f32:
            options = 'input_precision="ieee"'
        elif self.x == f64:
            options = "out_dtype=tl.float64"
        lines.append(f"acc = tl.dot(x_tile, w_tile, acc{', ' if options else ''}{options})")
        if self.row_sums:
            lines.append("row_sums += tl.sum(x_tile.to(tl.int32), 1)")
        if self.column_sums:
            lines.append("column_sums += tl.sum(w_tile.to(tl.int32), 0)")
        return "\n".join(lines)

    @property
    def x_fill(self) -> int | str:
        """The value of x beyond K. Where one operand counts as 0 there, that of the other is free;
        128 is what counts as 0 in u8, and its load takes one instruction more."""
        needed = self.x == u8 and (self.row_sums or self.w == u8)
        return 128 if needed else 0 if self.x.is_integer else "0.0"

    @property
    def w_fill(self) -> int | str:
        needed = self.w == u8 and self.column_sums
        return 128 if needed else 0 if self.w.is_integer else "0.0"

    @property
    def zeros(self) -> str:
        type_ = {i32: "tl.int32", f64: "tl.float64"}.get(self.sum, "tl.float32")
        lines = [f"acc = tl.zeros((BM, BN), {type_})"]
        lines += ["row_sums = tl.zeros((BM,), tl.int32)"] * self.row_sums
        lines += ["column_sums = tl.zeros((BN,), tl.int32)"] * self.column_sums
        return "\n".join(lines)


def tma_body(product: Product, tail: str) -> str:
    """The body with descriptors: `x` and `w` of [M, K] and [N, K], perhaps those of the tail.

    With PERSISTENT a program loops over tiles, so that the loads of the next tile run beside the
    tail of this one; without it a program has one tile, and several of them share a
    multiprocessor.
    """
    step = product.step("x.load([row_tile * BM, k * BK])", "w.load([column_tile * BN, k * BK]).T")
    one = f"""
{ORDER.strip()}
{product.zeros}
for k in range(steps):
{_in(step)}
{PLACE.strip()}
{in_pieces(tail)}
"""
    return f"""
{product.head}
row_tiles = tl.cdiv(M, BM)
column_tiles = tl.cdiv(N, BN)
steps = tl.cdiv(K, BK)
tiles = row_tiles * column_tiles
z = 0
if PERSISTENT:
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
{_in(one, 8)}
else:
    tile = tl.program_id(0)
{_in(one)}
"""


CORNER = "[row_tile * BM, column_tile * BN + piece * (BN // SUB)]"
"""Where a piece of the tail is."""


def tma_store(name: str, value: str) -> str:
    """The statement of a tail that stores a piece through the descriptor of its result."""
    return f"{name}.store({CORNER}, {value})"


def tma_load(name: str) -> str:
    """The expression of a tail that loads a piece of an operand of the result's shape."""
    return f"{name}.load({CORNER})"


def in_pieces(tail: str) -> str:
    """The tail as a loop over SUB column ranges of `acc`."""
    return f"{PIECES.strip()}\n{_in(tail)}"


def tma_descriptors(product: Product) -> dict[str, Descriptor]:
    depth = product.depth if isinstance(product.depth, int) else "K"
    columns = product.columns if isinstance(product.columns, int) else "N"
    return {
        "x": Descriptor(("M", depth), (_text(product.x_strides[0], "x_row"), 1), ("BM", "BK")),
        "w": Descriptor(
            (columns, depth), (_text(product.w_strides[1], "w_column"), 1), ("BN", "BK")
        ),
    }


def tma_grid(columns: Size) -> Grid:
    """One program per tile, or PERSISTENT programs that loop over tiles."""

    def grid(size: Mapping[str, int]) -> Sequence[int]:
        tiles = _tiles(size, columns)
        return (min(tiles, size["PERSISTENT"]) if size["PERSISTENT"] else tiles,)

    return grid


def pipelined_body(product: Product, tail: str, split: bool = False) -> str:
    """One tile per program; with `split`, program axis 1 is the part of K that it sums."""
    batch = "\n".join(product.batch)
    count = "row_tiles * column_tiles"
    first = "part * per_part * BK" if split else "0"
    parts = (
        "part = tl.program_id(1)\nper_part = tl.cdiv(tl.cdiv(K, BK), PARTS)"
        if split
        else "part = 0\nper_part = tl.cdiv(K, BK)"
    )
    x_at = _offset(("rows_in[:, None]", "k[None, :]"), product.x_strides, ("x_row", "x_k"))
    w_at = _offset(("k[:, None]", "columns_in[None, :]"), product.w_strides, ("w_k", "w_column"))
    whole = "(K % (BK * PARTS) == 0)" if split else "(K % BK == 0)"
    loads = [
        (f"tl.load({source})", masked_load(source, mask, fill, dtype))
        for source, mask, fill, dtype in (
            (f"x_from + ({x_at})", "k[None, :] < K", product.x_fill, product.x),
            (f"w_from + ({w_at})", "k[:, None] < K", product.w_fill, product.w),
        )
    ]
    plain, masked = (product.step(x, w) for x, w in zip(*loads, strict=True))
    known = isinstance(product.depth, int)
    head = f"""
{product.head}
row_tiles = tl.cdiv(M, BM)
column_tiles = tl.cdiv(N, BN)
tile = tl.program_id(0) % ({count})
z = tl.program_id(0) // ({count})
{parts}
{ORDER}
{PLACE}
rows_in = tl.minimum(rows, M - 1).to(tl.int64)
columns_in = tl.minimum(columns, N - 1).to(tl.int64)
{batch}
x_from = x{" + x_batch" if batch else ""}
w_from = w{" + w_batch" if batch else ""}
{product.zeros}
"""
    loop = "for step in range(per_part):\n    k = {first} + step * BK + tl.arange(0, BK)\n{body}"
    with_mask = loop.format(first=first, body=_in(masked))
    if not (split or product.column_sums):
        tail = in_pieces(tail)
    if not known:
        return f"{head}\n{with_mask}\n{tail}\n"
    without = loop.format(first=first, body=_in(plain))
    return f"{head}\nif {whole}:\n{_in(without)}\nelse:\n{_in(with_mask)}\n{tail}\n"


def early_weights(product: Product) -> str:
    """Statements that bring the weights of a program's tile to the L2 cache before the kernel
    before ends; "" where a tile has too many lines."""
    item = max(product.w.bits // 8, 1)
    row = product.w_strides[1]
    if product.batch or product.w_strides[0] != 1 or not isinstance(product.depth, int):
        return ""
    lines = -(-product.depth * item // LINE)
    if not isinstance(row, int) or not 0 < lines <= MOST_LINES:
        return ""
    lines = 1 << (lines - 1).bit_length()
    columns = product.columns if isinstance(product.columns, int) else "N"
    return f"""
row_tiles = tl.cdiv(M, BM)
column_tiles = tl.cdiv({columns}, BN)
tile = tl.program_id(0)
{ORDER}
line = tl.arange(0, BN * {lines})
w_row = tl.minimum(column_tile * BN + line // {lines}, {columns} - 1)
w_line = tl.minimum((line % {lines}) * {LINE // item}, {product.depth} - 1)
bw_prefetch(w + w_row.to(tl.int64) * {row} + w_line)
"""


def pipelined_grid(columns: Size, matrices: str = "") -> Grid:
    """One program per tile and matrix; `matrices` is the size that counts them."""

    def grid(size: Mapping[str, int]) -> Sequence[int]:
        tiles = _tiles(size, columns) * (size[matrices] if matrices else 1)
        return (tiles, size["PARTS"]) if "PARTS" in size else (tiles,)

    return grid


PARTIAL = """
tl.store(
    partial + (part * M + row) * N + column, acc, mask=(row < M) & (column < N)
)
"""
"""The tail of a split product."""


def sum_parts_body(product: Product, tail: str) -> str:
    """The second kernel of a split product: adds the parts of every element in order."""
    return f"""
{product.head}
column_tiles = tl.cdiv(N, BN)
row_tile = tl.program_id(0) // column_tiles
column_tile = tl.program_id(0) % column_tiles
z = 0
{PLACE}
here = (row < M) & (column < N)
at = partial + row * N + column
acc = tl.load(at, mask=here, other=0)
for part in range(1, PARTS):
    acc += tl.load(partial + (part * M + row) * N + column, mask=here, other=0)
{tail}
"""


def pipelined_grid_of_sums(columns: Size) -> Grid:
    """One program per tile of the second kernel of a split product."""

    def grid(size: Mapping[str, int]) -> Sequence[int]:
        return (_tiles(size, columns),)

    return grid


def _tiles(size: Mapping[str, int], columns: Size) -> int:
    wide = columns if isinstance(columns, int) else size["N"]
    return cdiv(size["M"], size["BM"]) * cdiv(wide, size["BN"])


def _signed(text: str, dtype: DType) -> str:
    """An operand of the tensor core; u8 is moved by 128."""
    if dtype == u8:
        return f"({text} ^ 128).to(tl.int8, bitcast=True)"
    if dtype.is_integer and dtype.bits < 8:  # one element per byte, whose other bits are undefined
        shift = 8 - dtype.bits
        signed = f"({text}.to(tl.int8, bitcast=True) << {shift})"
        return (
            f"({signed} >> {shift})" if dtype.is_signed else f"({text} & {dtype.max}).to(tl.int8)"
        )
    return text


def _offset(indices: tuple[str, str], strides: Strides, names: tuple[str, str]) -> str:
    terms = []
    for index, stride, name in zip(indices, strides, names, strict=True):
        if stride != 0:
            terms.append(index if stride == 1 else f"{index} * {_text(stride, name)}")
        else:
            terms.append(f"{index} * 0")
    return " + ".join(terms)


def _in(text: str, width: int = 4) -> str:
    return indent(text.strip("\n"), " " * width)


def _text(stride: int | None, name: str) -> str | int:
    return name if stride is None else stride
