"""The launch of a product: which form and tiles, the kernel's source, the call.

    matrices = Matrices(x, w, batch)                     # views of [.., M, K] and [.., K, N]
    launch_product(ctx, node, matrices, y, finish, tail)

`finish` are statements on `acc` that come before the tail, such as zero points. A product runs in
the TMA form where the device has it and where addresses and strides are multiples of 16 bytes; in
the split form where it has few tiles and a long K; else in the pipelined form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from bitwright.backends.gpu.codegen.source import Descriptor, KernelSource, Work
from bitwright.backends.gpu.kernels.matmul import product, tiles
from bitwright.backends.gpu.kernels.matmul.product import Product
from bitwright.backends.gpu.lowering.context import GpuLowering, NoKernelError
from bitwright.backends.gpu.lowering.operands import At, Tail, Tiles
from bitwright.ir.dim import Size
from bitwright.ir.dim import product as multiplied
from bitwright.ir.dtype import DType, bool_, u8
from bitwright.ir.graph import Node
from bitwright.lir.buffer import View

TMA_BYTES = 16
"""What addresses and strides of TMA are multiples of."""
MANY_MATRICES = "matrices"
FEW_ROWS = 512
"""Up to so many rows, the time to bring weights from memory is worth hiding."""
LIGHT = frozenset({"add", "sub", "mul", "cast", "relu", "requantize", "maximum", "minimum", "neg"})
"""Steps of a tail that need few registers."""


@dataclass(frozen=True)
class Matrices:
    """Operands of a product: x[batch..., M, K] and w[batch..., K, N] of one batch."""

    x: View
    w: View

    @property
    def batch(self) -> tuple[Size, ...]:
        return self.x.shape[:-2]

    @property
    def rows(self) -> Size:
        return self.x.shape[-2]

    @property
    def depth(self) -> Size:
        return self.x.shape[-1]

    @property
    def columns(self) -> Size:
        return self.w.shape[-1]

    @property
    def is_single(self) -> bool:
        return all(size == 1 for size in self.batch)


@dataclass(frozen=True)
class Finish:
    """Statements between the sum and the tail, with their operands."""

    text: str = ""
    views: Mapping[str, View] = field(default_factory=dict)
    values: Mapping[str, Size] = field(default_factory=dict)
    row_sums: bool = False
    column_sums: bool = False


def place(matrices: Matrices) -> At:
    """Where the tile of a body is in the result."""
    row, line = "row", "rows.to(tl.int64)"
    if not matrices.is_single:
        row, line = f"(z * M + {row})", f"(z * M + {line})"
    flat = At(line, "columns", "rows < M", "columns < N")
    return At(row, "column", "row < M", "column < N", flat)


def launch_product(
    ctx: GpuLowering,
    node: Node,
    matrices: Matrices,
    tail: Tail,
    finish: Finish | None = None,
    why: str = "",
) -> None:
    """Append the kernel calls of a product."""
    finish = finish or Finish()
    x, w = matrices.x, matrices.w
    _require_type(ctx, x.dtype)
    batch, offsets = _batch(matrices)
    spec = Product(
        x.dtype,
        w.dtype,
        matrices.columns,
        matrices.depth,
        (_known(x.strides[-2]), _known(x.strides[-1])),
        (_known(w.strides[-2]), _known(w.strides[-1])),
        batch,
        finish.row_sums,
        finish.column_sums,
        tiles.sums_alone(x.dtype, matrices.depth),
    )
    shape = matrices.rows, matrices.columns, matrices.depth
    count = multiplied(matrices.batch)
    rows = shape[0] * count if isinstance(count, int) else shape[0]
    weight = tail_weight(tail) + (x.dtype == u8)
    tma = not batch and why_not_tma(ctx, matrices, finish) == ""
    tma = tma and tiles.prefers_tma(ctx.machine, x.dtype, *shape, weight)
    options = tiles.candidates(ctx.machine, x.dtype, rows, *shape[1:], tma, weight)
    parts = 1
    if not batch and not (finish.row_sums or finish.column_sums):
        parts = tiles.parts_of(ctx.machine, options[0], x.dtype, *shape)
    sizes = _sizes(spec, matrices) | dict(finish.values)
    given = {"x": x, "w": w}
    pieces = _tma_pieces(spec, tail) if tma and parts == 1 else {}
    loads = {name: product.tma_load(name) for name in pieces if name != tail.result}
    store = product.tma_store if tail.result in pieces else None
    written = tail.text("acc", replace(place(matrices), loads=loads), 0, store)
    end = "\n".join(part for part in (finish.text, written) if part)
    work = Work(_operations(spec, shape), _unit(x.dtype))
    if parts > 1:
        _launch_split(ctx, node, spec, given, sizes, tail, end, parts, finish, why)
        return
    if batch:
        sizes |= {**offsets, MANY_MATRICES: count}
    views = {**given, **finish.views, **tail.views}
    sizes |= tail.values
    grid = product.pipelined_grid(spec.columns, MANY_MATRICES if batch else "")
    item = max(tail.tiles.dtype(tail.result).bits // 8, 1)
    form = product.tma_body if tma else product.pipelined_body
    twin, native = bodies(spec, lambda one: form(one, end))
    is_few = isinstance(rows, int) and rows <= FEW_ROWS
    source = KernelSource(
        f"matmul_{x.dtype}{'_tma' if tma else ''}",
        twin,
        {name: view.dtype for name, view in views.items()},
        tuple(sizes),
        tuple(tiles.config(tile, x.dtype, ctx.machine, tma, 0, weight, item) for tile in options),
        product.tma_grid(spec.columns) if tma else grid,
        contracts=may_contract(tail),
        descriptors=product.tma_descriptors(spec) | pieces if tma else {},
        work=work,
        helpers=product.HALVES,
        native_body=native,
        early="" if tma or not is_few else product.early_weights(spec),
    )
    ctx.call(ctx.kernel(source), node, views, sizes, writes=tail.results, why=why)


def _launch_split(
    ctx: GpuLowering,
    node: Node,
    spec: Product,
    given: Mapping[str, View],
    sizes: Mapping[str, Size],
    tail: Tail,
    end: str,
    parts: int,
    finish: Finish,
    why: str,
) -> None:
    """Two kernels: partial sums of `parts` ranges of K, and their sum in order with the tail."""
    rows, columns = sizes["M"], spec.columns
    partial = ctx.scratch(f"{node.name}.partial", spec.sum.name, parts * rows * columns)
    options = tiles.candidates(ctx.machine, spec.x, rows, columns, spec.depth, False)
    configs = tuple(tiles.config(tile, spec.x, ctx.machine, False, parts) for tile in options)
    views = {**given, "partial": partial}
    twin, native = bodies(
        spec, lambda one: product.pipelined_body(one, product.PARTIAL, split=True)
    )
    source = KernelSource(
        f"matmul_{spec.x}_split",
        twin,
        {name: view.dtype for name, view in views.items()},
        tuple(sizes),
        configs,
        product.pipelined_grid(columns),
        contracts=True,
        work=Work(_operations(spec, (rows, columns, spec.depth)), _unit(spec.x)),
        native_body=native,
    )
    ctx.call(ctx.kernel(source), node, views, sizes, writes=("partial",), why=f"{why}, split K")
    launch_sum_of_parts(ctx, node, spec, rows, partial, tail, finish, end, parts)


def launch_sum_of_parts(
    ctx: GpuLowering,
    node: Node,
    spec: Product,
    rows: Size,
    partial: View,
    tail: Tail,
    finish: Finish,
    end: str,
    parts: int,
) -> None:
    """Append the kernel that adds the parts of a split product in order; `end` stores the sums."""
    views = {"partial": partial, **finish.views, **tail.views}
    sizes = {"M": rows, **_column_size(spec), **finish.values, **tail.values}
    source = KernelSource(
        "matmul_sum_parts",
        product.sum_parts_body(spec, end),
        {name: view.dtype for name, view in views.items()},
        tuple(sizes),
        tiles.sum_configs(parts),
        product.pipelined_grid_of_sums(spec.columns),
        contracts=may_contract(tail),
    )
    ctx.call(ctx.kernel(source), node, views, sizes, writes=tail.results, why="sum of the parts")


def tail_weight(tail: Tail) -> int:
    """How many registers a tail needs: 0 few, 1 for functions, 2 for operands of its own shape."""
    if any(all(tail.tiles.moves(name)) for name in tail.operands):
        return 2
    return int(any(step.op not in LIGHT for step in tail.expression.steps))


def bodies(spec: Product, text: Callable[[Product], str]) -> tuple[str, str]:
    """The bodies of a source: the interpreter's, and the native one ("" if it is the same)."""
    twin, native = text(replace(spec, is_twin=True)), text(spec)
    return twin, "" if twin == native else native


def why_not_tma(ctx: GpuLowering, matrices: Matrices, finish: Finish) -> str:
    """Why a single product does not take the TMA form, or ""."""
    if not ctx.machine.has_tma:
        return "the device has no TMA"
    if finish.row_sums or finish.column_sums:
        return "sums of operands need masks"
    if matrices.depth == 0:
        return "it sums over no elements"
    if matrices.x.dtype.bits > 16:
        return "the element type has no tensor-core form"
    for name, view, row in (("x", matrices.x, -2), ("w", matrices.w, -1)):
        item = view.dtype.bits // 8
        stride, unit = view.strides[row], view.strides[-3 - row]
        if unit != 1 or not _is_aligned(stride, item) or not stride:
            return f"{name} has strides {list(view.strides)}"
        if not _is_aligned(view.offset, item):
            return f"{name} starts at {view.offset}"
    return ""


def _tma_pieces(spec: Product, tail: Tail) -> dict[str, Descriptor]:
    """Descriptors of the result, and of operands of its shape, that TMA can move in pieces."""
    tiles, found = tail.tiles, {}
    shape = ("M", spec.columns if isinstance(spec.columns, int) else "N")
    for name in (*tail.operands, tail.result) if tiles.rank == 2 else ():
        view, dtype = tiles.views[name], tiles.dtype(name)
        row, unit = view.strides
        item = dtype.bits // 8
        if dtype == bool_ or item not in (1, 2, 4) or unit != 1:
            continue
        if all(_is_aligned(size, item) for size in (row, view.offset)) and row:
            assert isinstance(row, int)
            found[name] = Descriptor(shape, (row, 1), ("BM", "PIECE"))
    return found


def _is_aligned(size: Size, item: int) -> bool:
    return isinstance(size, int) and size * item % TMA_BYTES == 0


def may_contract(tail: Tail) -> bool:
    """Whether a tail may fuse multiplies and adds: not where it rounds to integers."""
    return tail.dtype.is_float and all(step.op != "requantize" for step in tail.expression.steps)


def _require_type(ctx: GpuLowering, x: DType) -> None:
    if x in product.F8 and not ctx.machine.has_f8:
        raise NoKernelError(f"compute capability {ctx.machine.capability} has no fp8")


def _batch(matrices: Matrices) -> tuple[tuple[str, ...], dict[str, Size]]:
    """Statements that compute the offsets of matrix z, and the sizes that they use."""
    if matrices.is_single:
        return (), {}
    parts = {"x": matrices.x, "w": matrices.w}
    views = {
        name: View(v.buffer, v.offset, (*v.shape[:-2], 1), (*v.strides[:-2], 0))
        for name, v in parts.items()
    }
    found = Tiles.of(views, "b")
    lines = found.index_lines("z.to(tl.int64)")
    row = "z.to(tl.int64)"
    return (
        *lines,
        *(f"{name}_batch = {found.offset(name, row, '0')}" for name in parts),
    ), found.values


def _sizes(spec: Product, matrices: Matrices) -> dict[str, Size]:
    known = {
        "M": matrices.rows,
        "N": matrices.columns,
        "K": matrices.depth,
        "x_row": matrices.x.strides[-2],
        "x_k": matrices.x.strides[-1],
        "w_k": matrices.w.strides[-2],
        "w_column": matrices.w.strides[-1],
    }
    return {name: known[name] for name in spec.sizes}


def _column_size(spec: Product) -> dict[str, Size]:
    return {} if isinstance(spec.columns, int) else {"N": spec.columns}


def _known(stride: Size) -> int | None:
    """A stride that is part of the text; None for a run-time size."""
    return stride if isinstance(stride, int) else None


def _operations(
    spec: Product, shape: tuple[Size, Size, Size]
) -> Callable[[Mapping[str, int]], float]:
    known = {"N": shape[1], "K": shape[2]}

    def operations(size: Mapping[str, int]) -> float:
        n, k = (v if isinstance(v, int) else size[name] for name, v in known.items())
        return 2.0 * size["M"] * n * k * size.get(MANY_MATRICES, 1)

    return operations


def _unit(x: DType) -> str:
    return "int8" if x.is_integer else x.name
