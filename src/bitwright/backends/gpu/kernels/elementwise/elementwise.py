"""The kernel of an elementwise region, and of copies between views: one pass over memory.

Views are collapsed to as few axes as possible. Contiguous and scalar operands of one axis are a
flat loop of BLOCK elements per
program; otherwise a program computes a tile of ROWS × COLUMNS, where the last axis of the result
is the columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bitwright.backends.cpu.codegen.expression import Expression
from bitwright.backends.gpu.codegen.expression import render
from bitwright.backends.gpu.codegen.source import Config, KernelSource, cdiv
from bitwright.backends.gpu.lowering.operands import At, Tiles, indented
from bitwright.ir.dim import Size, product
from bitwright.ir.dtype import DType
from bitwright.lir.buffer import View

FLAT = (
    Config({"BLOCK": 1024}, 4, 1),
    Config({"BLOCK": 512}, 4, 1),
    Config({"BLOCK": 2048}, 8, 1),
    Config({"BLOCK": 4096}, 8, 1),
)
TILED = (
    Config({"ROWS": 4, "COLUMNS": 256}, 4, 1),
    Config({"ROWS": 1, "COLUMNS": 1024}, 4, 1),
    Config({"ROWS": 16, "COLUMNS": 64}, 4, 1),
    Config({"ROWS": 64, "COLUMNS": 16}, 4, 1),
    Config({"ROWS": 32, "COLUMNS": 32}, 4, 1),
)
_NARROW = 32
"""Rows shorter than this use tiles with more rows."""


def elementwise_source(
    family: str,
    expression: Expression,
    operands: Mapping[str, View],
    results: Mapping[str, View],
    element: DType | None = None,
) -> tuple[KernelSource, dict[str, View], dict[str, Size]]:
    """The kernel, and its views and sizes. All views have the shape of the results.

    `element` is the type that memory is read and written as, if it is not that of the buffers.
    """
    tiles = Tiles.of({**operands, **results}, "t", element)
    shape = tiles.grouped[0].shape
    rows, columns = product(shape[:-1]), shape[-1]
    is_flat = len(shape) == 1
    if is_flat:
        at = At("0", "i", "", "mask")
        head = flat("columns")
    else:
        at = At("row", "column", "row < rows", "column < columns")
        head = (
            "row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]\n"
            "column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]"
        )
    lines = [*head.split("\n"), *tiles.index_lines(at.row)]
    lines += [f"{name}_x = {tiles.load(name, at)}" for name in operands]
    steps, found = render(expression, [f"{name}_x" for name in operands])
    lines += steps
    for name, term in zip(results, found, strict=True):
        lines.append(tiles.store(name, term.text, at))
    sizes: dict[str, Size] = {**tiles.values, "columns": columns}
    if not is_flat:
        sizes["rows"] = rows
    source = KernelSource(
        family,
        indented(lines, 0),
        tiles.pointers,
        tuple(sizes),
        FLAT if is_flat else _tiled(columns),
        flat_grid if is_flat else _tile_grid,
    )
    return source, tiles.views, sizes


def flat(count: str = "count") -> str:
    """The first lines of a kernel over the elements of a contiguous result: `i` and `mask`."""
    return f"i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)\nmask = i < {count}"


def flat_grid(size: Mapping[str, int]) -> Sequence[int]:
    """The grid of a kernel that begins with `flat`."""
    return (cdiv(size["count" if "count" in size else "columns"], size["BLOCK"]),)


def _tile_grid(size: Mapping[str, int]) -> Sequence[int]:
    return cdiv(size["rows"], size["ROWS"]), cdiv(size["columns"], size["COLUMNS"])


def _tiled(columns: Size) -> tuple[Config, ...]:
    """Candidates, those that fit the row first."""
    if not isinstance(columns, int):
        return TILED
    most = max(_NARROW, 2 * columns)
    return tuple(sorted(TILED, key=lambda config: config.constants["COLUMNS"] > most))
