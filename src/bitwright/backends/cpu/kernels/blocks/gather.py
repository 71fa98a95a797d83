"""y[i] = row indices[i] of a table in packed panels, with the bits of `BlockFormat.dequantize`."""

from __future__ import annotations

from bitwright.backends.cpu.codegen.emit import (
    Kernel,
    Module,
    Signature,
    Type,
    Value,
    bf16,
    f16,
    f32,
)
from bitwright.backends.cpu.codegen.emit.types import storage_type
from bitwright.backends.cpu.kernels.blocks.panels import COLUMNS, PanelLayout
from bitwright.backends.cpu.kernels.blocks.reader import Reader
from bitwright.backends.cpu.kernels.movement import fault as faults
from bitwright.ir.dtype import DType
from bitwright.ops.quant.block_formats import RUN, BlockFormat

_FLOATS: dict[str, Type] = {"F32": f32, "F16": f16, "BF16": bf16}


def emit_block_gather(module: Module, name: str, form: BlockFormat, index: DType) -> Signature:
    """Slots: w (panels), i, y; the number of indices and of rows, chunks (or elements) per row."""
    signature = Signature(
        ("w", "i", "y", "fault"), ("count", "size", "depth", "panel_bytes", *faults.FAULT_SLOTS)
    )
    with module.kernel(name, signature) as f:
        depth, size = f.args.size("depth"), f.args.size("size")
        begin, end = f.share(f.args.size("count"))

        def rows() -> None:
            with f.loop(begin, end) as loop:
                found = f.load(storage_type(index), f.args.pointer("i"), loop.index)
                row = faults.checked_index(f, found, size, index.is_signed)
                start = f.udiv(row, COLUMNS) * f.args.size("panel_bytes")
                panel, column = f.offset(f.args.pointer("w"), start), f.urem(row, COLUMNS)
                if form.is_float:
                    _copy(f, _FLOATS[form.name], panel, column, loop.index, depth)
                else:
                    _Row(f, form, panel, column, loop.index).emit(depth)

        faults.unless_empty(f, size, begin, end, rows)
    return signature


def _copy(f: Kernel, element: Type, panel: Value, column: Value, row: Value, depth: Value) -> None:
    y = f.gep(f32, f.args.pointer("y"), row * depth)
    with f.loop(0, depth) as loop:
        w = f.load(element, panel, loop.index * COLUMNS + column)
        f.store(f.convert(w, f32), y, loop.index)


class _Row:
    """One row: all columns of a vector are unpacked, and the lane of the row is stored."""

    def __init__(
        self, f: Kernel, form: BlockFormat, panel: Value, column: Value, row: Value
    ) -> None:
        self.f, self.form, self.panel = f, form, panel
        self.lanes = min(f.target.lanes(32), COLUMNS)
        self.layout = PanelLayout(form)
        self.reader = Reader(f, self.layout, self.lanes)
        self.v, self.lane, self.row = f.udiv(column, self.lanes), f.urem(column, self.lanes), row

    def emit(self, depth: Value) -> None:
        f, layout = self.f, self.layout
        y = f.gep(f32, f.args.pointer("y"), self.row * depth * RUN)
        with f.loop(0, depth) as loop:
            block = f.offset(self.panel, f.udiv(loop.index, layout.chunks) * layout.block_bytes)
            place = f.urem(loop.index, layout.chunks)
            chunk = f.offset(block, layout.chunks_at + place * layout.chunk_bytes)
            numbers = self.reader.block_scales(block, self.v)
            values = self.reader.elements(self.reader.load_words(chunk, self.v))
            target = f.gep(f32, y, loop.index * RUN)
            each = RUN // self.form.run
            for part in range(each):
                scale, minimum = self.reader.of_run(block, numbers, place * each + part, self.v)
                for k in range(part * self.form.run, (part + 1) * self.form.run):
                    value = values[k] * scale
                    if minimum is not None:
                        value = value - minimum
                    f.store(f.lane(value, self.lane), target, k)
