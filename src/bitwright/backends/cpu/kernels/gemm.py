"""y[r, c] = epilogue(Σ_k a[r, k] w[k, c]) in f32, for rows that lie in a matrix or in an image.

A tile holds rows × columns sums in registers through the whole of k: per k it loads a panel's
vectors once and one number of a for each row, which it broadcasts. Weights are packed in panels
[columns / tile][k][tile], the last one padded with zeros. The sums go through a small scratch tile
to the epilogue, which is emitted once for all tile heights and masked at the right edge.

Rows of a matrix lie `a_stride` apart. Rows of an image are its result's pixels, row after row:

    address(r) = (r // (oh·ow))·image + (r // ow mod oh)·line + (r mod ow)·pixel

The sum over k runs through `run` neighbouring numbers and, for a convolution, through up to two
levels of windows: k = (i, j, inner) reads a at i·step1 + j·step2 + inner. So a convolution whose
channels lie innermost is a product of matrices that never exist.

Threads share out (row block, panel) pairs. Each sum is formed in the order of k by one thread, so
results do not depend on how many there are.
"""

from __future__ import annotations

from dataclasses import dataclass

from bitwright.backends.cpu.emit import Kernel, Module, Signature, Value, f32
from bitwright.backends.cpu.kernels.matmul import NO_EPILOGUE, Epilogue, Tile

_UNROLL = 4
"""Steps of k per turn of the inner loop."""


@dataclass(frozen=True)
class Gemm:
    """What shapes the code."""

    tile: Tile
    is_image: bool = False
    levels: int = 0
    """Levels of windows around the inner run: 0, 1 or 2."""
    epilogue: Epilogue = NO_EPILOGUE

    @property
    def signature(self) -> Signature:
        rows = ("ow", "oh", "pixel", "line", "image") if self.is_image else ("a_stride",)
        windows = tuple(
            f"{what}{n}" for n in range(1, self.levels + 1) for what in ("count", "step")
        )
        return Signature(
            ("a", "w", "y", *self.epilogue.pointers),
            ("rows", "columns", "run", "block", "y_stride", *rows, *windows, *self.epilogue.sizes),
        )


def emit_gemm(module: Module, name: str, gemm: Gemm) -> Signature:
    """The kernel; `block` is the number of tile rows whose part of a stays in the cache."""
    with module.kernel(name, gemm.signature) as f:
        _Emitter(f, gemm).emit()
    return gemm.signature


class _Emitter:
    def __init__(self, f: Kernel, gemm: Gemm) -> None:
        self.f, self.gemm, self.tile = f, gemm, gemm.tile
        self.rows, self.columns, self.run = (
            f.args.size(name) for name in ("rows", "columns", "run")
        )
        self.vector = f32.vector(self.tile.lanes)
        self.scratch = f.scratch(self.vector, self.tile.rows * self.tile.vectors)

    def emit(self) -> None:
        """Blocks of rows, within them panels of columns, within them tiles."""
        f, tile = self.f, self.tile
        depth = self.run
        for level in range(1, self.gemm.levels + 1):
            depth = depth * f.args.size(f"count{level}")
        panels = f.udiv(self.columns + (tile.columns - 1), tile.columns)
        height = self._block_height(panels)
        blocks = f.udiv(self.rows + (height - 1), height)
        begin, end = f.share(blocks * panels)
        with f.loop(begin, end) as pairs:
            block = f.udiv(pairs.index, panels)
            panel = pairs.index - block * panels
            w = f.gep(f32, f.args.pointer("w"), panel * depth * tile.columns)
            top = block * height
            bottom = f.min(top + height, self.rows)
            with f.loop(top, bottom, tile.rows) as loop:
                self._tile(loop.index, bottom, panel * tile.columns, w)

    def _block_height(self, panels: Value) -> Value:
        """Rows of a block: what fits the cache, but enough blocks for every thread."""
        f, tile = self.f, self.tile
        tiles = f.udiv(self.rows + (tile.rows - 1), tile.rows)
        wanted = f.udiv(f.threads * 4 + (panels - 1), f.max(panels, 1))
        fair = f.max(f.udiv(tiles + (wanted - 1), f.max(wanted, 1)), 1)
        return f.min(f.args.size("block"), fair) * tile.rows

    def _tile(self, row: Value, bottom: Value, column: Value, w: Value) -> None:
        """Sums of one tile by the lowest height that holds its rows, then the epilogue."""
        left = self.f.min(bottom - row, self.tile.rows)
        self._choose(list(self.tile.heights), left, row, w)
        self._store(row, left, column)

    def _choose(self, heights: list[int], left: Value, row: Value, w: Value) -> None:
        f = self.f
        if len(heights) == 1:
            self._sums(heights[0], left, row, w)
            return
        # the full height first: it is what nearly every tile takes
        with f.if_(f.gt(left, heights[-2])) as branch:
            self._sums(heights[-1], left, row, w)
        with branch.else_():
            self._choose(heights[:-1], left, row, w)

    def _address(self, row: Value) -> Value:
        """Where a row of a begins."""
        f = self.f
        base = f.args.pointer("a")
        if not self.gemm.is_image:
            return f.gep(f32, base, row * f.args.size("a_stride"))
        width, height = f.args.size("ow"), f.args.size("oh")
        line = f.udiv(row, width)
        image = f.udiv(line, height)
        offset = (
            (row - line * width) * f.args.size("pixel")
            + (line - image * height) * f.args.size("line")
            + image * f.args.size("image")
        )
        return f.gep(f32, base, offset)

    def _sums(self, height: int, left: Value, row: Value, w: Value) -> None:
        f, tile = self.f, self.tile
        # rows beyond the last repeat it: computed, never stored
        rows = [self._address(f.min(row + i, row + (left - 1))) for i in range(height)]
        sums = [f.const(self.vector, 0.0)] * (height * tile.vectors)
        sums = self._level(1, rows, w, sums)[1]
        for number, total in enumerate(sums):
            f.store(total, self.scratch, number * tile.lanes, align=self.vector.total_bytes)

    def _level(
        self, level: int, rows: list[Value], w: Value, sums: list[Value]
    ) -> tuple[Value, list[Value]]:
        """The sum over the windows from this level on; gives where the weights go on."""
        f = self.f
        if level > self.gemm.levels:
            return self._run(rows, w, sums)
        step = f.args.size(f"step{level}")
        with f.loop(0, f.args.size(f"count{level}"), carry=[w, *sums]) as loop:
            moved = [f.gep(f32, pointer, loop.index * step) for pointer in rows]
            after, inner = self._level(level + 1, moved, loop.carried[0], list(loop.carried[1:]))
            loop.next(after, *inner)
        return loop.results[0], list(loop.results[1:])

    def _run(self, rows: list[Value], w: Value, sums: list[Value]) -> tuple[Value, list[Value]]:
        """The sum over neighbouring numbers."""
        f, tile = self.f, self.tile
        whole = self.run - f.urem(self.run, _UNROLL)
        with f.loop(0, whole, _UNROLL, carry=sums) as loop:
            turned = list(loop.carried)
            for step in range(_UNROLL):
                self._multiply(rows, w, loop.index + step, turned)
            loop.next(*turned)
        with f.loop(whole, self.run, carry=loop.results) as rest:
            turned = list(rest.carried)
            self._multiply(rows, w, rest.index, turned)
            rest.next(*turned)
        return f.gep(f32, w, self.run * tile.columns), list(rest.results)

    def _multiply(self, rows: list[Value], w: Value, k: Value, sums: list[Value]) -> None:
        """One step of k into all sums."""
        f, tile = self.f, self.tile
        panel = [
            f.load(self.vector, w, k * tile.columns + v * tile.lanes) for v in range(tile.vectors)
        ]
        for i, pointer in enumerate(rows):
            number = f.splat(f.load(f32, pointer, k), tile.lanes)
            for v, part in enumerate(panel):
                at = i * tile.vectors + v
                sums[at] = f.fma(number, part, sums[at])

    def _store(self, row: Value, left: Value, column: Value) -> None:
        f, tile = self.f, self.tile
        stride = f.args.size("y_stride")
        masks = [
            f.mask(self.columns - column - v * tile.lanes, tile.lanes) for v in range(tile.vectors)
        ]
        with f.loop(0, left, nonempty=True) as loop:
            y = f.gep(f32, f.args.pointer("y"), (row + loop.index) * stride + column)
            for v, mask in enumerate(masks):
                at = (loop.index * tile.vectors + v) * tile.lanes
                value = f.load(self.vector, self.scratch, at, align=self.vector.total_bytes)
                here = column + v * tile.lanes
                value = self.gemm.epilogue.emit(f, value, row + loop.index, here, mask)
                f.store(value, y, v * tile.lanes, mask=mask)
