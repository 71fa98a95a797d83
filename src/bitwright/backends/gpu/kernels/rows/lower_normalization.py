"""Lowering of norms, softmax and dynamic quantization of rows, with what is fused around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from bitwright.backends.cpu.lowering.region import (
    Part,
    broadcast,
    part_before,
    part_between,
    reshaped,
    split,
)
from bitwright.backends.gpu.kernels.rows.formulas import norm_formula
from bitwright.backends.gpu.kernels.rows.row_kernel import RowKernel
from bitwright.backends.gpu.lowering.context import (
    GpuLowering,
    NoKernelError,
    RegionView,
    lowers,
)
from bitwright.backends.gpu.lowering.operands import Head, Tiles, require_part
from bitwright.ir.dim import Size, product
from bitwright.ir.dtype import DType, bf16, f8e4m3fn, f8e5m2, f16, f32, i8, u8
from bitwright.ir.graph import Node, Value
from bitwright.ir.types import normalize_axis
from bitwright.lir.buffer import View

QUANTIZED = (i8, u8, f8e4m3fn, f8e5m2)


class Rows:
    """Views of a shape as rows along an axis, or along all axes from one on."""

    def __init__(self, ctx: GpuLowering, node: Node, shape: Sequence[Size], axis: int) -> None:
        self.ctx, self.node, self.shape = ctx, node, tuple(shape)
        self.order = tuple(range(len(self.shape)))
        self.merge_from = len(self.shape)
        self.axis = axis

    @classmethod
    def along(cls, ctx: GpuLowering, node: Node, shape: Sequence[Size], axis: int) -> Rows:
        """Rows along one axis."""
        found = cls(ctx, node, shape, axis)
        rank = len(shape)
        found.order = (*(at for at in range(rank) if at != axis), axis)
        found.merge_from = rank - 1
        return found

    @classmethod
    def trailing(cls, ctx: GpuLowering, node: Node, shape: Sequence[Size], axis: int) -> Rows:
        """Rows of all axes from `axis` on."""
        found = cls(ctx, node, shape, axis)
        found.merge_from = axis
        return found

    @property
    def columns(self) -> Size:
        return product(self.shape[at] for at in self.order[self.merge_from :])

    @property
    def count(self) -> Size:
        return product(self.shape[at] for at in self.order[: self.merge_from])

    def view(self, view: View) -> View:
        """A view of the shape, with one axis of columns."""
        found = broadcast(view, self.shape).transpose(self.order)
        if self.merge_from == len(self.order) - 1:
            return found
        shape = (*found.shape[: self.merge_from], product(found.shape[self.merge_from :]))
        return reshaped(self.ctx, found, shape, self.node.name)

    def head(
        self, region: RegionView, part: Part, prefix: str, beside: Mapping[str, View] | None = None
    ) -> Head:
        require_part(self.ctx, part)
        names = {f"{prefix}{n}": value for n, value in enumerate(part.inputs)}
        views = {n: self.view(self.ctx.view(region.outer(v))) for n, v in names.items()}
        views |= {name: self.view(view) for name, view in (beside or {}).items()}
        return Head(part.expression, Tiles.of(views, prefix), tuple(names))


@lowers("layer_norm", "rms_norm", "softmax", "log_softmax", "lp_norm")
def lower_normalization(ctx: GpuLowering, node: Node, region: RegionView) -> None:
    anchor = region.anchor
    assert anchor is not None
    if quantize_node(region) is not None:
        lower_quantize_rows(ctx, node, region)
        return
    parts = split(region)
    shape = anchor.outputs[0].shape
    axis = normalize_axis(anchor.attrs["axis"], len(shape))
    is_norm = anchor.op in ("layer_norm", "rms_norm")
    rows = (Rows.trailing if is_norm else Rows.along)(ctx, node, shape, axis)
    results = [ctx.output(value) for value in node.outputs]
    shown = anchor.outputs[0] if region.body is None else region.body.outputs[-1][1]
    after = parts.after if len(results) == 1 else part_between(region, anchor.outputs[0], shown)
    kernel = RowKernel(
        f"{anchor.op}_{parts.before.dtype}",
        rows.columns,
        rows.head(region, parts.before, "x"),
        _formula(anchor, parts.before.dtype),
        _weights(ctx, region, anchor, rows),
        rows.head(region, after, "e", {"y": results[-1]}),
        stores_y=True,
    )
    if len(results) == 1:
        _call(ctx, node, kernel, rows, ("y",))
        return
    assert region.body is not None
    quantized = part_between(region, shown, region.body.outputs[0][1])
    kernel = replace(
        kernel,
        family=f"{kernel.family}_{quantized.dtype}",
        between=rows.head(region, quantized, "c"),
        quantized=Tiles.of({"q_out": rows.view(results[0])}, "q"),
    )
    _call(ctx, node, kernel, rows, ("y", "q_out"))


@lowers("dynamic_quantize")
def lower_quantize_rows(ctx: GpuLowering, node: Node, region: RegionView) -> None:
    """Rows quantized with a scale each, possibly behind a norm whose result is stored too."""
    anchor, quantize = region.anchor, quantize_node(region)
    assert anchor is not None and quantize is not None and quantize.inputs[0] is not None
    to: DType = quantize.attrs["to"]
    if to not in QUANTIZED or not quantize.attrs.get("per_token", False):
        raise NoKernelError(f"rows are quantized to i8, u8 or float8, not to {to} per tensor")
    if to == f8e4m3fn and not (ctx.machine.has_f8 or ctx.machine.interpreted):
        raise NoKernelError("the device has no float8")
    is_norm, stores_y = anchor is not quantize, len(node.outputs) > 3
    operand = quantize.inputs[0]
    shown = region.body.outputs[3][1] if region.body is not None and stores_y else operand
    before = part_before(region)
    if before.dtype not in (f32, f16, bf16):
        raise NoKernelError(f"there is no kernel that quantizes rows of {before.dtype}")
    source = anchor.outputs[0] if is_norm else operand
    shape = operand.shape
    axis = normalize_axis(anchor.attrs["axis"], len(shape)) if is_norm else len(shape) - 1
    if axis != len(shape) - 1:
        raise NoKernelError("the rows of the norm are not those that are quantized")
    rows = Rows.along(ctx, node, shape, axis)
    results = [ctx.output(value) for value in node.outputs]
    kernel = RowKernel(
        f"{f'{anchor.op}_' if is_norm else ''}dynamic_quantize_{to}",
        rows.columns,
        rows.head(region, before, "x"),
        _formula(anchor, f32) if is_norm else None,
        _weights(ctx, region, anchor, rows) if is_norm else None,
        rows.head(
            region,
            part_between(region, source, shown),
            "e",
            {"y": results[3]} if stores_y else None,
        ),
        stores_y,
        rows.head(region, part_between(region, shown, operand), "c"),
        to,
        quantize.outputs[0].dtype,
        Tiles.of({"q_out": rows.view(results[0])}, "q"),
    )
    extra = {"scale_out": results[1], "zero_out": results[2]}
    writes = ("q_out", "scale_out", "zero_out", *(["y"] if stores_y else []))
    _call(ctx, node, kernel, rows, writes, extra)


def _call(
    ctx: GpuLowering,
    node: Node,
    kernel: RowKernel,
    rows: Rows,
    writes: Sequence[str],
    extra: Mapping[str, View] | None = None,
) -> None:
    views: dict[str, View] = dict(extra or {})
    for part in kernel.parts:
        views |= part.views
    sizes = {**kernel.values, "rows": rows.count, "columns": rows.columns}
    source = kernel.source()
    why = "rows in registers" if kernel.is_whole else "rows read once per pass"
    own = {name: sizes[name] for name in source.sizes}
    ctx.call(ctx.kernel(source), node, views, own, writes=writes, why=why)


def _formula(anchor: Node, element: DType):  # type: ignore[no-untyped-def]
    number = anchor.attrs.get("eps", anchor.attrs.get("p", 0))
    if anchor.op == "lp_norm" and number not in (1, 2):
        raise NoKernelError(f"there is no kernel for the norm of order {number}")
    return norm_formula(anchor.op, number, element)


def _weights(ctx: GpuLowering, region: RegionView, anchor: Node, rows: Rows) -> Tiles | None:
    """Scale and bias of a norm."""
    given: dict[str, Value] = {
        name: value
        for name, value in zip("wb", anchor.inputs[1:], strict=False)
        if value is not None
    }
    if not given:
        return None
    ctx.require(*(value.dtype for value in given.values()))
    views = {name: rows.view(ctx.view(region.outer(value))) for name, value in given.items()}
    return Tiles.of(views, "w")


def quantize_node(region: RegionView) -> Node | None:
    """The `dynamic_quantize` node of a region, if any."""
    nodes = [region.anchor] if region.body is None else region.body.nodes
    return next((n for n in nodes if n is not None and n.op == "dynamic_quantize"), None)
