"""Convolutions with constant filters: pointwise ones as matrix products, depthwise ones, others.

Images are channels-last in memory: `ctx.ordered` gives the image in that order (copied where it is
not so), and the result is stored in it. Elementwise regions and pooling keep the order, so a
network changes the layout at its borders only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from bitwright.backends.cpu.kernels.matmul.lower_int8 import Weight
from bitwright.backends.cpu.kernels.matmul.lower_matmul import optional_inputs
from bitwright.backends.cpu.lowering.region import broadcast, split
from bitwright.backends.gpu.codegen.source import KernelSource, Work
from bitwright.backends.gpu.codegen.types import triton_type
from bitwright.backends.gpu.kernels.conv import depthwise, implicit
from bitwright.backends.gpu.kernels.conv.geometry import Geometry
from bitwright.backends.gpu.kernels.conv.implicit import PAD
from bitwright.backends.gpu.kernels.matmul.forms import (
    Finish,
    Matrices,
    bodies,
    launch_product,
    may_contract,
    tail_weight,
)
from bitwright.backends.gpu.kernels.matmul.lower_integer import zero_of
from bitwright.backends.gpu.kernels.matmul.operands import packed_weight
from bitwright.backends.gpu.kernels.matmul.product import HALVES, Product, accumulator
from bitwright.backends.gpu.kernels.matmul.zero_points import weight_corrections
from bitwright.backends.gpu.lowering.context import GpuLowering, NoKernelError, RegionView, lowers
from bitwright.backends.gpu.lowering.operands import At, Tail, Tiles
from bitwright.ir.dim import Size, product
from bitwright.ir.dtype import DType, bf16, f16, f32, f64, i8, u8
from bitwright.ir.graph import Node, Value, constant_value
from bitwright.lir.buffer import View
from bitwright.ops.nn.windows import make_windows

Array = np.ndarray[Any, Any]
FLOATS = (f64, f32, f16, bf16)
PACK_BYTES = 16


@lowers("conv")
def lower_conv(ctx: GpuLowering, node: Node, region: RegionView) -> None:
    x, w, bias = _given(region, 3)
    assert x is not None and w is not None
    if x.dtype not in FLOATS or x.dtype != w.dtype:
        if x.dtype in (i8, u8) and w.dtype in (i8, u8):
            _lower_integers(ctx, node, region, [x, w, None, None, bias])
            return
        raise NoKernelError(f"there is no convolution of {x.dtype} with {w.dtype}")
    conv = Convolution(ctx, node, region, x, _constant(w))
    finish = conv.bias(bias)
    conv.launch(conv.filters, "0.0", finish, f"{x.dtype} on tensor cores")


@lowers("integer_conv")
def lower_integer_conv(ctx: GpuLowering, node: Node, region: RegionView) -> None:
    _lower_integers(ctx, node, region, _given(region, 5))


def _lower_integers(
    ctx: GpuLowering, node: Node, region: RegionView, given: list[Value | None]
) -> None:
    x, w, x_zero, w_zero, bias = given
    assert x is not None and w is not None
    array = _constant(w)
    points = None if w_zero is None else _constant(w_zero)
    conv = Convolution(ctx, node, region, x, array)
    weight = Weight.of(conv.filters.reshape(len(array), -1).T, points)
    zero = zero_of(ctx, x_zero)
    fill: int | str = PAD
    if isinstance(zero, int):
        fill = zero
    else:
        conv.pad = {f"{PAD}_at": zero}
    added = None if bias is None else _constant(bias)
    if conv.is_depthwise:
        centred = conv.filters.astype(np.int32)
        if points is not None:
            centred = centred - points.reshape(-1, *(1,) * (centred.ndim - 1)).astype(np.int32)
        finish = conv.integer_bias(added)
        conv.launch(centred, fill, finish, "int8, summed in i32")
        return
    finish = weight_corrections(
        ctx, node.name, x.dtype, weight, zero, added, conv.shape, conv.place
    )
    filters = weight.qvalues.T.reshape(conv.filters.shape)
    conv.launch(filters, fill, finish, "int8, summed in i32")


class Convolution:
    """The views and facts of one convolution. `filters` are [M, taps..., C/groups]."""

    def __init__(
        self, ctx: GpuLowering, node: Node, region: RegionView, x: Value, w: Array
    ) -> None:
        anchor = region.anchor
        assert anchor is not None
        attrs = dict(anchor.attrs)
        groups = attrs.pop("groups", 1)
        self.ctx, self.node, self.dtype = ctx, node, x.dtype
        self.pad: dict[str, View] = {}
        """The zero point of the image, if it is known at run time only."""
        windows = make_windows(
            x.rank - 2,
            w.shape[2:],
            *(attrs.get(name) for name in ("strides", "pads", "dilations")),
        )
        pads = (*windows.begins, *windows.ends)
        if not all(isinstance(pad, int) for pad in pads):
            raise NoKernelError("its padding is known at run time only")
        counts = anchor.outputs[0].shape[2:]
        channels = x.shape[1]
        if not isinstance(channels, int) or 0 in w.shape:
            raise NoKernelError("it has no channels, or their number is known at run time only")
        self.order = (0, *range(2, x.rank), 1)
        self.filters = np.ascontiguousarray(w.transpose(self.order))
        self.geometry = Geometry(
            tuple(x.shape[2:]),
            tuple(counts),
            tuple(int(n) for n in w.shape[2:]),
            windows.strides,
            windows.begins,
            windows.dilations,
            channels,
            groups,
            any(pads),
        )
        self.image = ctx.ordered(x, self.order)
        self.rows: Size = product((x.shape[0], *counts))
        self.tail = Tail.of(
            ctx, region, split(region).after, ctx.output(node.outputs[0], self.order), self.order
        )
        self.shape = (x.shape[0], *counts, len(w))
        """Of the result, channels last."""

    @property
    def is_depthwise(self) -> bool:
        return self.geometry.per_group == 1 and self.geometry.groups > 1

    @property
    def place(self) -> At:
        if self.is_depthwise:
            return At("row", "column", "row < M", "column < N")
        offset = "" if self.geometry.groups == 1 else "z * N + "
        flat = At("rows.to(tl.int64)", f"({offset}columns)", "rows < M", "columns < N")
        return At("row", f"({offset}column)", "row < M", "column < N", flat)

    def bias(self, value: Value | None) -> Finish:
        if value is None:
            return Finish()
        return self._added(self.ctx.view(value))

    def integer_bias(self, array: Array | None) -> Finish:
        if array is None:
            return Finish()
        return self._added(self.ctx.constant(array.astype(np.int32), f"{self.node.name}.bias"))

    def _added(self, view: View) -> Finish:
        found = Tiles.of({"bias": broadcast(view, self.shape)}, "b_row")
        lines = [*found.index_lines("row"), f"acc = acc + {found.load('bias', self.place)}"]
        return Finish("\n".join(lines), found.views, found.values)

    def launch(self, filters: Array, fill: int | str, finish: Finish, why: str) -> None:
        """Append the kernel call."""
        if self.is_depthwise:
            self._launch_depthwise(filters, fill, finish)
        elif self.geometry.is_pointwise and self.geometry.groups == 1:
            depth, count = self.geometry.channels, len(filters)
            x = View(self.image.buffer, self.image.offset, (self.rows, depth), (depth, 1))
            w = packed_weight(self.ctx, filters.reshape(count, depth).T, self._weight_name)
            launch_product(self.ctx, self.node, Matrices(x, w), self.tail, finish, why=why)
        else:
            self._launch_implicit(filters, fill, finish, why)

    def _launch_implicit(self, filters: Array, fill: int | str, finish: Finish, why: str) -> None:
        geometry = self.geometry
        columns = len(filters) // geometry.groups
        packed, depth = self._pack(filters)
        views = {
            "x": self.image,
            "w": self.ctx.constant(packed, self._weight_name),
            **self.pad,
            **finish.views,
            **self.tail.views,
        }
        sizes = {"M": self.rows, **geometry.values, **finish.values, **self.tail.values}
        spec = Product(self.dtype, self.dtype, columns, geometry.taps * geometry.per_group)
        if self.dtype.is_integer:
            spec = replace(spec, w=i8, row_sums=finish.row_sums)
        end = "\n".join(p for p in (finish.text, self.tail.text("acc", self.place, 0)) if p)
        twin, native = bodies(spec, lambda one: implicit.body(one, geometry, depth, fill, end))
        operations = 2.0 * geometry.taps * geometry.per_group * len(filters)
        source = KernelSource(
            f"conv_{self.dtype}",
            twin,
            {name: view.dtype for name, view in views.items()},
            tuple(sizes),
            implicit.configs(
                self.ctx.machine,
                self.dtype,
                geometry,
                self.rows,
                columns,
                tail_weight(self.tail) + (self.dtype == u8),
            ),
            implicit.grid(columns, geometry.groups),
            contracts=may_contract(self.tail),
            work=Work(lambda size: operations * size["M"], _unit(self.dtype)),
            helpers=HALVES,
            native_body=native,
        )
        self._call(source, views, sizes, why)

    def _launch_depthwise(self, filters: Array, fill: int | str, finish: Finish) -> None:
        geometry, count = self.geometry, len(filters)
        whole = np.ascontiguousarray(filters.reshape(count, geometry.taps).T)
        views = {
            "x": self.image,
            "w": self.ctx.constant(whole, self._weight_name),
            **self.pad,
            **finish.views,
            **self.tail.views,
        }
        sizes = {"M": self.rows, **geometry.values, **finish.values, **self.tail.values}
        end = "\n".join(p for p in (finish.text, self.tail.text("acc", self.place, 0)) if p)
        type_ = triton_type(accumulator(self.dtype))
        source = KernelSource(
            f"conv_{self.dtype}_depthwise",
            depthwise.body(geometry, count, type_, fill, end),
            {name: view.dtype for name, view in views.items()},
            tuple(sizes),
            depthwise.CONFIGS,
            depthwise.grid(count),
            contracts=may_contract(self.tail),
            work=Work(lambda size: 2.0 * geometry.taps * count * size["M"], self.dtype.name),
        )
        self._call(source, views, sizes, "depthwise")

    def _call(
        self, source: KernelSource, views: dict[str, View], sizes: dict[str, Size], why: str
    ) -> None:
        ctx = self.ctx
        result = (self.tail.result,)
        ctx.call(ctx.kernel(source), self.node, views, sizes, writes=result, why=why)

    def _pack(self, filters: Array) -> tuple[Array, int]:
        """Filters [M, taps × padded channels] or [M, padded taps × channels]; the padded length."""
        geometry, count = self.geometry, len(filters)
        step = max(PACK_BYTES // filters.dtype.itemsize, 1)
        if implicit.is_flat(geometry):
            rows = filters.reshape(count, geometry.taps * geometry.per_group)
        else:
            rows = filters.reshape(count * geometry.taps, geometry.per_group)
        depth = -(-rows.shape[1] // step) * step
        padded = np.zeros((len(rows), depth), filters.dtype)
        padded[:, : rows.shape[1]] = rows
        return padded.reshape(count, -1), depth

    @property
    def _weight_name(self) -> str:
        return f"{self.node.name}.weight"


def _given(region: RegionView, count: int) -> list[Value | None]:
    assert region.anchor is not None
    inputs = optional_inputs(region.anchor, count)
    return [None if value is None else region.outer(value) for value in inputs]


def _constant(value: Value) -> Array:
    found = constant_value(value)
    if found is None:
        raise NoKernelError("its filters, zero points or bias are not constants")
    return found


def _unit(x: DType) -> str:
    return "int8" if x.is_integer else x.name
