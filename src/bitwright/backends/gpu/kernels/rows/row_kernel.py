"""The text of row kernels: a prologue, a norm, an epilogue, and quantization of the row.

    x = prologue(operands)      n = norm(x) * w + b      y = epilogue(n)      q = quantize(part(y))

The quantization is dynamic, or (without `to`) the part itself, which ends in an 8-bit type.

A row of known length up to MAX_COLUMNS stays in registers (`whole`): memory is read and written
once. Other rows are read once per pass, in blocks of columns.

There is one configuration per shape, because the order of a sum depends on the number of warps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bitwright.backends.gpu.codegen.expression import as_stored
from bitwright.backends.gpu.codegen.source import Config, Grid, KernelSource, Work, cdiv
from bitwright.backends.gpu.codegen.types import triton_type
from bitwright.backends.gpu.kernels.rows.formulas import (
    Formula,
    Pass,
    quantize_passes,
    quantized_lines,
)
from bitwright.backends.gpu.lowering.operands import At, Head, Tiles
from bitwright.ir.dim import Size
from bitwright.ir.dtype import DType, f32, f64

MAX_COLUMNS = 16384
"""Longer rows do not fit the registers of 16 warps."""
BLOCK = 2048


@dataclass(frozen=True)
class RowKernel:
    family: str
    columns: Size
    before: Head
    formula: Formula | None
    weights: Tiles | None
    """Views w and b, of those that exist."""
    after: Head
    """Its tiles include the result `y`, if that is stored."""
    stores_y: bool
    between: Head | None = None
    """Of a quantization: computes what is quantized from the epilogue's result."""
    to: DType | None = None
    stored: DType | None = None
    """The type that `to` is stored in."""
    quantized: Tiles | None = None
    """The view `q` of the quantized rows; `scale` and `zero` are contiguous, one per row."""

    @property
    def is_whole(self) -> bool:
        return isinstance(self.columns, int) and self.columns <= MAX_COLUMNS

    @property
    def width(self) -> int:
        """Columns of a tile."""
        if not self.is_whole:
            return BLOCK
        assert isinstance(self.columns, int)
        return max(16, 1 << max(self.columns - 1, 0).bit_length())

    @property
    def fits(self) -> bool:
        """Whether the row fills its tile, so that columns need no mask."""
        return self.is_whole and self.width == self.columns

    @property
    def at(self) -> At:
        return At("row", "column", "row < rows", "" if self.fits else "column < columns")

    @property
    def config(self) -> Config:
        """Short rows take a warp, which needs no barriers; long ones all warps."""
        width = self.width
        if width <= 512:
            return Config({"ROWS": 2, "COLUMNS": width}, 1, 1)
        rows = 2 if width <= 1024 else 1
        warps = 4 if width <= 4096 else 8 if width <= 8192 else 16
        return Config({"ROWS": rows, "COLUMNS": width}, warps, 1)

    @property
    def parts(self) -> list[Head | Tiles]:
        found = (self.before, self.weights, self.after, self.between, self.quantized)
        return [part for part in found if part is not None]

    @property
    def pointers(self) -> dict[str, DType]:
        found: dict[str, DType] = {}
        for part in self.parts:
            found |= part.pointers
        if self.to is not None:
            found |= {"scale_out": f32}
            found |= {"zero_out": self.stored or self.to}
        return found

    @property
    def values(self) -> dict[str, Size]:
        found: dict[str, Size] = {}
        for part in self.parts:
            found |= part.values
        return found

    # text

    @property
    def _type(self) -> str:
        return "tl.float64" if self.before.dtype == f64 else "tl.float32"

    def _load(self) -> list[str]:
        lines, (x,) = self.before.lines([], self.at)
        return [*lines, f"x = {x}"]

    def _finish(self) -> list[str]:
        """From x to y, and to v of a quantization."""
        lines = [f"n = {self.formula.result}" if self.formula is not None else "n = x"]
        if self.weights is not None:
            lines += self.weights.index_lines("row")
            for name, sign in (("w", "*"), ("b", "+")):
                if name in self.weights.names:
                    lines.append(f"n = n {sign} {self.weights.load(name, self.at)}")
        steps, (y,) = self.after.lines(["n"], self.at)
        lines += [*steps, f"y_value = {y}"]
        if self.between is not None:
            steps, (v,) = self.between.lines(["y_value"], self.at)
            lines += [*steps, f"v = {v}"]
        return lines

    def _pass(self, one: Pass, number: int, value: Sequence[str]) -> list[str]:
        """A reduction of the row; `value` computes x or v where the row is read again."""
        masked = f"tl.where(column < columns, {one.value}, {one.masked})"
        if self.fits:
            masked = one.value
        if self.is_whole:
            return [f"total = tl.{one.reduction}({masked}, axis=1)[:, None]", *one.after]
        name = f"sums{number}"
        join = f"{name} + part" if one.reduction == "sum" else f"tl.maximum({name}, part)"
        return [
            f"{name} = tl.full([ROWS, COLUMNS], {one.masked}, {self._type})",
            *self._loop([*value, f"part = {masked}", f"{name} = {join}"]),
            f"total = tl.{one.reduction}({name}, axis=1)[:, None]",
            *one.after,
        ]

    def _loop(self, lines: Sequence[str]) -> list[str]:
        head = "column = start + tl.arange(0, COLUMNS)[None, :]"
        inside = [f"    {line}" for line in (head, *lines)]
        return ["for start in range(0, columns, COLUMNS):", *inside]

    def _quantized(self, is_twin: bool) -> Sequence[str]:
        if self.to is None:
            return ["q = v"]
        return quantized_lines(self.to, self.stored or self.to, is_twin)

    def _stores(self, is_twin: bool) -> list[str]:
        lines: list[str] = []
        if self.stores_y:
            value = as_stored("y_value", self.after.tiles.dtype("y"))
            where = f"y + {self.after.tiles.offset('y', 'row', 'column')} + row * 0"
            lines.append(f"tl.store({where}, {value}, {self.at.mask()})")
        if self.quantized is not None:
            lines += self._quantized(is_twin)
            lines += self.quantized.index_lines("row")
            where = f"q_out + {self.quantized.offset('q_out', 'row', 'column')} + row * 0"
            lines.append(f"tl.store({where}, q, {self.at.mask()})")
        return lines

    def body(self, is_twin: bool) -> str:
        known = isinstance(self.columns, int)
        lines = [f"columns: tl.constexpr = {self.columns}"] if known else []
        lines += [
            "row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]",
            "column = tl.arange(0, COLUMNS)[None, :]",
        ]
        norm = self.formula.passes if self.formula is not None else ()
        quantize = quantize_passes(self.to) if self.to is not None else ()
        lines += self._load() if self.is_whole else []
        for number, one in enumerate(norm):
            lines += self._pass(one, number, self._load())
        lines += self._finish() if self.is_whole else []
        for number, one in enumerate(quantize, len(norm)):
            lines += self._pass(one, number, [*self._load(), *self._finish()])
        if self.is_whole:
            lines += self._stores(is_twin)
        else:
            lines += self._loop([*self._load(), *self._finish(), *self._stores(is_twin)])
        if self.to is not None:
            lines.append("tl.store(scale_out + row, scale, row < rows)")
            zero = "zero" if self.to.is_integer else "scale - scale"
            type_ = triton_type(self.stored or self.to)
            lines.append(f"tl.store(zero_out + row, ({zero}).to({type_}), row < rows)")
        return "\n".join(lines)

    def source(self) -> KernelSource:
        known = self.columns if isinstance(self.columns, int) else None
        sizes = (*self.values, "rows", *(() if known is not None else ("columns",)))
        twin, native = self.body(True), self.body(False)
        bits = sum(dtype.bits for name, dtype in self.pointers.items() if name not in ("w", "b"))
        work = Work(
            lambda size: 8.0 * size["rows"] * size.get("columns", known or 0),
            "f32",
            lambda size: size["rows"] * size.get("columns", known or 0) * bits / 8,
        )
        return KernelSource(
            self.family,
            twin,
            self.pointers,
            sizes,
            (self.config,),
            _GRID,
            work=work,
            native_body=native if native != twin else "",
        )


def _grid(size: Mapping[str, int]) -> Sequence[int]:
    return (cdiv(size["rows"], size["ROWS"]),)


_GRID: Grid = _grid
