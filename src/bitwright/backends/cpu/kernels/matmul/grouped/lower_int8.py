"""Products of quantized rows with the constant weights of their expert."""

from __future__ import annotations

from dataclasses import replace

from bitwright.backends.cpu.codegen import emit
from bitwright.backends.cpu.codegen.emit import Kernel
from bitwright.backends.cpu.codegen.emit import Value as Emitted
from bitwright.backends.cpu.kernels.matmul.constant_panels import pack_constants
from bitwright.backends.cpu.kernels.matmul.dot.int8_dot import choose_int8_dot, int8_tile
from bitwright.backends.cpu.kernels.matmul.epilogue import Epilogue
from bitwright.backends.cpu.kernels.matmul.grouped.int8 import GROUPED_SIZES, GroupedProduct
from bitwright.backends.cpu.kernels.matmul.lower_matmul import constant_matrix, unit_rows
from bitwright.backends.cpu.kernels.matmul.matmul import matmul_sizes, row_tiles_in_cache
from bitwright.backends.cpu.lowering.context import Lowering, NoKernelError, RegionView, lowers
from bitwright.backends.cpu.lowering.region import broadcast
from bitwright.ir.dim import Size
from bitwright.ir.graph import Node, constant_value
from bitwright.lir.buffer import View


@lowers("integer_grouped_matmul")
def lower_integer_grouped(ctx: Lowering, node: Node, region: RegionView) -> None:
    x, w, counts, scale, x_zero = (*node.inputs, None)[:5]
    assert x is not None and w is not None and counts is not None and scale is not None
    weight, scales = constant_matrix(w), constant_value(scale)
    if weight is None or scales is None:
        raise NoKernelError("its weight is not a constant")
    experts, depth, columns = weight.shape
    known = None if x_zero is None else constant_value(x_zero)
    is_late = x_zero is not None and (known is None or known.size != 1)
    dot = choose_int8_dot(ctx.target, x.dtype.is_signed, depth)
    point = 0 if known is None or is_late else int(known.reshape(-1)[0])
    dot = replace(dot, offset=dot.shift != point)
    tile = int8_tile(ctx.target, columns, dot)
    inputs = {"x_zero": None if is_late else x_zero, "w_zero": None, "bias": None}
    terms = ("sums",) * is_late + ("offset",) * dot.offset
    panels, results, _ = pack_constants(ctx, node, weight, tile, dot, inputs, terms)
    more: dict[str, View] = {"scale": ctx.constant(scales, f"{node.name}.scale")}
    sizes: dict[str, Size] = {}
    if is_late:
        assert x_zero is not None
        points = broadcast(ctx.view(x_zero), (x.shape[0], 1))
        more |= {"sums": results["sums"], "x_zero": points}
        sizes["x_zero.0"] = points.strides[0]
    emitted: list[GroupedProduct] = []
    element = x.dtype

    def finish(
        f: Kernel, value: Emitted, row: Emitted, column: Emitted, mask: Emitted | None
    ) -> Emitted:
        product = emitted[-1]
        at = product.constant_offset(column)
        if is_late:
            place = f.mul(product.first + row, f.args.size("x_zero.0"))
            stored = f.load(emit.storage_type(element), f.args.pointer("x_zero"), place)
            zero = f.convert(stored, emit.i32, element.is_signed)
            value = value - zero * f.load(value.type, f.args.pointer("sums"), at, mask=mask)
        real = emit.f32.vector(tile.lanes)
        return f.convert(value, emit.f32) * f.load(real, f.args.pointer("scale"), at, mask=mask)

    epilogue = Epilogue(finish, tuple(more), tuple(sizes))

    def emit_grouped(module: emit.Module, name: str) -> emit.Signature:
        signature = emit.Signature(
            ("a", "w", "y", "counts", "fault", *dot.pointers, *epilogue.pointers),
            (*GROUPED_SIZES, *epilogue.sizes),
        )
        with module.kernel(name, signature) as f, f.subnormals_as_zeros():
            emitted.append(GroupedProduct(f, tile, epilogue, dot))
            emitted[-1].emit()
        return signature

    kernel = ctx.kernel(f"grouped_matmul_{dot.name}", (tile, dot, element, is_late), emit_grouped)
    a = unit_rows(ctx, x)
    pointers = {"a": a, "w": panels, "y": ctx.output(node.outputs[0]), "fault": ctx.fault()}
    pointers |= {"counts": ctx.contiguous(counts)} | more
    pointers |= {name: results[name] for name in dot.pointers}
    block = row_tiles_in_cache(ctx.target, tile, depth)
    sizes |= matmul_sizes(x.shape[0], columns, depth, a.strides[0], block)
    sizes |= {"experts": experts, "node": ctx.number(node)}
    ctx.call(kernel, node, pointers, sizes, why="int8 rows by expert, summed in i32")
