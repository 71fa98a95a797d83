"""Products of 8-bit operands that are known at run time.

w is packed first, one matrix after the other, then multiplied like a constant
(`kernels.matmul.pack_rhs`). Batches of constant matrices are packed at compile time
(`kernels.matmul.constant_panels`) and multiplied by the same kernel.

Batch axes broadcast. a is read in place, and so is w, whichever of its last two axes is contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bitwright.backends.cpu.codegen import emit
from bitwright.backends.cpu.codegen.emit import Kernel
from bitwright.backends.cpu.codegen.emit import Value as Emitted
from bitwright.backends.cpu.kernels.attention.lower_attention import order_of
from bitwright.backends.cpu.kernels.matmul import pack_rhs
from bitwright.backends.cpu.kernels.matmul.constant_panels import pack_constants
from bitwright.backends.cpu.kernels.matmul.dot.dot_product import type_names
from bitwright.backends.cpu.kernels.matmul.dot.int8_dot import Int8Dot, choose_int8_dot, int8_tile
from bitwright.backends.cpu.kernels.matmul.epilogue import fused_epilogue
from bitwright.backends.cpu.kernels.matmul.matmul import row_tiles_in_cache
from bitwright.backends.cpu.kernels.matmul.register_tile import Tile
from bitwright.backends.cpu.lowering import region as regions
from bitwright.backends.cpu.lowering.context import Lowering, NoKernelError, RegionView
from bitwright.ir.dim import Size, product
from bitwright.ir.graph import Node, Value, constant_value
from bitwright.lir.buffer import View, contiguous

Array = np.ndarray[Any, Any]
ASSUMED_SIZE = 64
"""The assumed value of sizes that are not known at compile time."""


@dataclass(frozen=True)
class _Packed:
    """Panels of w and the terms of its columns; `outer` has the batch axes."""

    panels: View
    terms: dict[str, View]
    outer: View


def lower_matmul_dynamic_rhs(
    ctx: Lowering,
    node: Node,
    region: RegionView,
    values: Sequence[Value | None],
    known: Array | None = None,
) -> None:
    """Lowers a product of x, w, x_zero, w_zero and bias (`values`, in the outer graph); `known` is
    w where it is constant."""
    anchor = region.anchor
    assert anchor is not None
    x, w, x_zero, w_zero, bias = values
    assert x is not None and w is not None
    if x.rank < 2 or w.rank < 2:
        raise NoKernelError("its operands are not matrices")
    if bias is not None and bias.rank > 1:
        raise NoKernelError("its bias differs between rows")
    after = regions.split(region).after
    regions.require_elements(after.dtype)
    depth, columns = w.shape[-2:]
    # constants are packed before x_zero is known, which is then subtracted row by row
    is_late = known is not None and _scalar(x_zero) is None
    one_zero = x_zero is None or (x_zero.tensor.count == 1 and not is_late)
    extra = _scalar(w_zero) != (0 if w.dtype.is_signed else 128)
    has_sums = not one_zero and x_zero is not None
    dot = choose_int8_dot(ctx.target, x.dtype.is_signed, _known(depth, 1), extra)
    point = _scalar(x_zero) if one_zero else None
    has_offset = bias is not None or dot.shift != (0 if has_sums else point)
    dot = replace(dot, offset=has_offset)
    tile = int8_tile(ctx.target, _known(columns, ASSUMED_SIZE), dot)
    inputs = {"x_zero": x_zero if one_zero else None, "w_zero": w_zero, "bias": bias}
    needed = [("sums", has_sums), ("offset", has_offset), ("w_zero", extra)]
    terms = tuple(name for name, is_needed in needed if is_needed)
    if known is not None and _are_constant(inputs, terms):
        packed = _Packed(*pack_constants(ctx, node, known, tile, dot, inputs, terms))
    else:
        packed = _pack(ctx, node, w, tile, dot, inputs, terms)
    shape = node.outputs[0].shape
    a = regions.close(ctx, x)
    y = ctx.output(node.outputs[0], order_of(ctx, node.outputs[0]))
    others = regions.operand_views(ctx, region, after.inputs, shape)
    zeros = []
    if has_sums and x_zero is not None:
        zeros = [regions.broadcast(ctx.view(x_zero), shape)]
    outer = shape[:-2]
    a = regions.broadcast(a, (*outer, *a.shape[-2:]))
    index = regions.broadcast(packed.outer, outer)
    aligned = [
        replace(a, shape=shape, strides=(*a.strides[:-1], 0)),
        replace(index, shape=shape, strides=(*index.strides, 0, 0)),
        *(y, *zeros, *others),
    ]
    _call(ctx, node, aligned, packed, tile, dot, depth, after, len(zeros))


def _are_constant(inputs: dict[str, Value | None], terms: tuple[str, ...]) -> bool:
    """Whether the inputs of the column terms are constant."""
    needed = inputs.values() if "offset" in terms else [inputs["w_zero"]]
    return all(v is None or constant_value(v) is not None for v in needed)


def _scalar(value: Value | None) -> int | None:
    """A zero point that is one constant; 0 where there is none, None where it is not constant."""
    if value is None:
        return 0
    known = constant_value(value)
    return int(known.reshape(-1)[0]) if known is not None and known.size == 1 else None


def _known(size: Size, usual: int) -> int:
    return size if isinstance(size, int) else usual


def _pack(
    ctx: Lowering,
    node: Node,
    w: Value,
    tile: Tile,
    dot: Int8Dot,
    inputs: dict[str, Value | None],
    terms: tuple[str, ...],
) -> _Packed:
    """Packs w."""
    view = ctx.view(w)
    if view.strides[-1] != 1 and view.shape[-1] != 1 and view.strides[-2] != 1 != view.shape[-2]:
        view = ctx.contiguous(w)
    count, columns = product(view.shape[:-2]), view.shape[-1]
    results = {name: ctx.scratch(f"{node.name}.{name}", "i32", count * columns) for name in terms}
    shape = (*view.shape[:-2], columns)
    needed = {
        name: per_column(ctx.view(v), shape, name)
        for name, v in inputs.items()
        if v is not None and terms
    }
    return pack_matrices(ctx, node, view, tile, dot, needed, results)


def pack_matrices(
    ctx: Lowering,
    node: Node,
    view: View,
    tile: Tile,
    dot: Int8Dot,
    inputs: dict[str, View],
    results: dict[str, View],
) -> _Packed:
    """Calls the kernel that packs matrices […, k, n], contiguous on k or n.

    It writes the terms of columns to `results`, from `inputs` [..., n] (`PackForm`).
    """
    by_rows = view.strides[-1] == 1 or view.shape[-1] == 1
    outer, (depth, columns) = view.shape[:-2], view.shape[-2:]
    count, terms = product(outer), tuple(results)
    panels = (columns + (tile.columns - 1)) // tile.columns
    steps = (depth + (dot.group - 1)) // dot.group
    size = count * panels * steps * (tile.columns * dot.group)
    place = ctx.scratch(f"{node.name}.panels", "i8", size)
    reads = regions.Reads("r", list(inputs.values()))
    element = view.dtype
    form = pack_rhs.PackForm(
        tile, dot.group, element.is_signed, len(outer), by_rows, dot.shift, terms, tuple(inputs)
    )
    kernel = ctx.kernel(
        f"pack_rhs_{type_names(element)}",
        (form, reads.key),
        lambda m, name: pack_rhs.emit_pack_rhs(m, name, form, reads),
    )
    pointers = {"w": view, "panels": place, **reads.pointers}
    pointers |= {f"{name}.made": view for name, view in results.items()}
    sizes: dict[str, Size] = {
        **{f"size{axis}": size for axis, size in enumerate(outer)},
        "columns": columns,
        "depth": depth,
        **{f"w.{axis}": stride for axis, stride in enumerate(view.strides[:-2])},
        "step": view.strides[-2 if by_rows else -1],
        **reads.sizes,
    }
    writes = ("panels", *(f"{name}.made" for name in terms))
    ctx.call(kernel, f"{node.name}.w", pointers, sizes, writes=writes)
    return _Packed(place, results, contiguous(place.buffer, outer))


def per_column(view: View, shape: tuple[Size, ...], name: str) -> View:
    """A zero point or bias, broadcast to every column of every matrix."""
    if name == "w_zero" and len(view.shape) > 1:  # […, 1, n]
        axes = [axis for axis in range(len(view.shape)) if axis != len(view.shape) - 2]
        view = replace(
            view,
            shape=tuple(view.shape[axis] for axis in axes),
            strides=tuple(view.strides[axis] for axis in axes),
        )
    elif name == "x_zero":
        view = replace(view, shape=(1,), strides=(0,))
    return regions.broadcast(view, shape)


def _call(
    ctx: Lowering,
    node: Node,
    aligned: Sequence[View],
    packed: _Packed,
    tile: Tile,
    dot: Int8Dot,
    depth: Size,
    after: regions.Part,
    zeros: int,
) -> None:
    """Calls the kernel that multiplies, over the fewest outer axes."""
    found = regions.collapse(aligned, keep=1)
    if len(found[0].shape) == 1 or found[1].strides[-2] != 0:  # all rows share one matrix of w
        found = regions.collapse(aligned, keep=2)
    a, index, y, *more = found
    if y.strides[-1] != 1 and y.shape[-1] != 1:
        raise NoKernelError("the columns of its result are not contiguous")
    outer = len(y.shape) - 2
    points, reads = regions.Reads("z", more[:zeros]), regions.Reads("e", more[zeros:])
    emitted: list[pack_rhs.BatchedProduct] = []

    def operands(
        f: Kernel, value: Emitted, row: Emitted, column: Emitted, mask: Emitted | None
    ) -> list[Emitted]:
        place = (*emitted[-1].outer, row)
        if zeros:
            at = emitted[-1].constant_offset(column)
            sums = f.load(value.type, f.args.pointer("sums"), at, mask=mask)
            value = value - pack_rhs.load_row_zero_point(f, points, place, tile.lanes) * sums
        return [value, *reads.at(f, place, tile.lanes).load(column, mask)]

    pointers = {**points.pointers, **reads.pointers}
    if zeros:
        pointers["sums"] = packed.terms["sums"]
    strides: dict[str, Size] = {**points.sizes, **reads.sizes}
    slots = (
        pointers,
        (*pack_rhs.product_sizes(outer), *strides),
        [view.dtype for view in reads.views],
    )
    epilogue = fused_epilogue(after, operands, tile.lanes, *slots)

    def emit_product(module: emit.Module, name: str) -> emit.Signature:
        signature = emit.Signature(
            ("a", "w", "y", *dot.pointers, *epilogue.pointers),
            ("rows", "columns", "depth", "y_stride", "block", *epilogue.sizes),
        )
        with module.kernel(name, signature) as f, f.subnormals_as_zeros():
            emitted.append(pack_rhs.BatchedProduct(f, tile, epilogue, dot, outer))
            emitted[-1].emit()
        return signature

    key = (tile, dot, after.expression, reads.key, points.key, outer)
    kernel = ctx.kernel(f"batched_matmul_{dot.name}", key, emit_product)
    pointers |= {"a": a, "w": packed.panels, "y": y}
    pointers |= {name: packed.terms[name] for name in dot.pointers}
    sizes: dict[str, Size] = {
        "rows": y.shape[-2],
        "columns": y.shape[-1],
        "depth": depth,
        "y_stride": y.strides[-2],
        "block": row_tiles_in_cache(ctx.target, tile, _known(depth, ASSUMED_SIZE)),
        **{f"size{axis}": size for axis, size in enumerate(y.shape[:-2])},
        **{f"a.{axis}": stride for axis, stride in enumerate(a.strides[:-1])},
        **{f"w.{axis}": stride for axis, stride in enumerate(index.strides[:-2])},
        **{f"y.{axis}": stride for axis, stride in enumerate(y.strides[:-2])},
        **strides,
    }
    ctx.call(kernel, node, pointers, sizes, why="int8 operands known at run time, summed in i32")
