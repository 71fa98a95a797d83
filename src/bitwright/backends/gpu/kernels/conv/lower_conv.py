"""Convolutions with constant filters: pointwise ones as matrix products, depthwise ones, others.

Images are channels-last in memory: `ctx.ordered` gives the image in that order (copied where it is
not so), and the result is stored in it. Elementwise regions and pooling keep the order, so a
network changes the layout at its borders only.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from bitwright.backends.cpu.kernels.matmul.lower_int8 import Weight
from bitwright.backends.cpu.kernels.matmul.lower_matmul import optional_inputs
from bitwright.backends.cpu.lowering.region import broadcast
from bitwright.backends.gpu.codegen.source import Config, KernelSource, Work
from bitwright.backends.gpu.codegen.types import triton_type
from bitwright.backends.gpu.kernels.conv import boxes, depthwise, implicit, packed
from bitwright.backends.gpu.kernels.conv.geometry import Geometry
from bitwright.backends.gpu.kernels.conv.implicit import PAD
from bitwright.backends.gpu.kernels.conv.packed import Packing, packing_of
from bitwright.backends.gpu.kernels.matmul import tiles
from bitwright.backends.gpu.kernels.matmul.forms import (
    TMA_BYTES,
    Finish,
    Matrices,
    bodies,
    launch_product,
    may_contract,
    tail_weight,
)
from bitwright.backends.gpu.kernels.matmul.lower_integer import zero_of
from bitwright.backends.gpu.kernels.matmul.operands import packed_weight
from bitwright.backends.gpu.kernels.matmul.product import (
    HALVES,
    Product,
    accumulator,
    pipelined_grid_of_sums,
    sum_parts_body,
)
from bitwright.backends.gpu.kernels.matmul.zero_points import weight_corrections
from bitwright.backends.gpu.lowering.context import GpuLowering, NoKernelError, RegionView, lowers
from bitwright.backends.gpu.lowering.operands import At, Tail, Tiles
from bitwright.ir.dim import Size
from bitwright.ir.dim import product as multiplied
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
    conv = Convolution(ctx, node, region, x, _constant(w), "0.0")
    finish = conv.bias(bias)
    conv.launch(conv.filters, finish, f"{x.dtype} on tensor cores")


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
    zero = zero_of(ctx, x_zero)
    weight = Weight.of(_channels_last(array).reshape(len(array), -1).T, points)
    conv = Convolution(ctx, node, region, x, array, zero, weight.zero is not None)
    added = None if bias is None else _constant(bias)
    if conv.is_depthwise:
        centred = conv.filters.astype(np.int32)
        if points is not None:
            centred = centred - points.reshape(-1, *(1,) * (centred.ndim - 1)).astype(np.int32)
        finish = conv.integer_bias(added)
        conv.launch(centred, finish, "int8, summed in i32")
        return
    finish = weight_corrections(
        ctx, node.name, x.dtype, weight, zero, added, conv.shape, conv.place
    )
    filters = weight.qvalues.T.reshape(conv.filters.shape)
    conv.launch(filters, finish, "int8, summed in i32")


class Convolution:
    """The views and facts of one convolution. `filters` are [M, taps..., C/groups]."""

    def __init__(
        self,
        ctx: GpuLowering,
        node: Node,
        region: RegionView,
        x: Value,
        w: Array,
        fill: int | str | View,
        row_sums: bool = False,
    ) -> None:
        anchor = region.anchor
        assert anchor is not None
        attrs = dict(anchor.attrs)
        groups = attrs.pop("groups", 1)
        self.ctx, self.node, self.dtype = ctx, node, x.dtype
        self.fill: int | str = PAD if isinstance(fill, View) else fill
        self.pad = {f"{PAD}_at": fill} if isinstance(fill, View) else {}
        """The zero point of the image, if it is known at run time only."""
        self.has_box = ctx.machine.has_tma and not self.pad and not row_sums
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
        self.filters = _channels_last(w)
        self.geometry = Geometry(
            tuple(x.shape[2:]),
            tuple(counts),
            tuple(int(n) for n in w.shape[2:]),
            windows.strides,
            windows.begins,
            windows.ends,
            windows.dilations,
            channels,
            groups,
            any(pads),
        )
        self.rows: Size = multiplied((x.shape[0], *counts))
        self.tail = Tail.of_region(ctx, node, region, self.order)
        self.shape = (x.shape[0], *counts, len(w))
        """Of the result, channels last."""
        self.packing: Packing | None = None
        few = implicit.is_flat(self.geometry) and not self.geometry.is_pointwise
        if self.has_box and few and not self.is_depthwise:
            self.packing = packing_of(self.geometry, x.dtype)
        if self.packing is not None and not self._configs_of(self.packing.windows):
            self.packing = None
        if self.packing is not None:
            self.image = self._packed(ctx.view(x), self.packing)
            self.geometry = self.packing.windows
        else:
            self.image = ctx.ordered(x, self.order)

    @property
    def is_depthwise(self) -> bool:
        return self.geometry.per_group == 1 and self.geometry.groups > 1

    @cached_property
    def is_boxed(self) -> bool:
        """Whether TMA loads boxes of the image: the channels of a group fill a step."""
        geometry = self.geometry
        if not self.has_box or self.is_depthwise or self.dtype.bits > 16:
            return False
        if geometry.is_pointwise and geometry.groups == 1 and self.packing is None:
            return False
        aligned = geometry.channels * self.dtype.bits // 8 % TMA_BYTES == 0
        if self.packing is None and geometry.rank <= boxes.MAX_RANK:
            aligned &= boxes.least_waste(geometry, self.shape[0]) < boxes.MOST_WASTE
        return (
            aligned
            and geometry.rank <= boxes.MAX_RANK
            and boxes.depth_of(geometry, self.dtype) > 0
            and self.image.offset == 0
            and bool(self._box_configs)
        )

    @cached_property
    def _box_configs(self) -> tuple[Config, ...]:
        return self._configs_of(self.geometry)

    def _configs_of(self, geometry: Geometry) -> tuple[Config, ...]:
        """The tiles of boxes; none where the device has too little shared memory."""
        return boxes.configs(
            self.ctx.machine,
            self.dtype,
            geometry,
            self.shape[0],
            self.shape[-1] // geometry.groups,
            tail_weight(self.tail) + (self.dtype == u8),
        )

    @property
    def place(self) -> At:
        if self.is_depthwise:
            return At("row", "column", "row < M", "column < N")
        offset = "" if self.geometry.groups == 1 else "z * N + "
        here, each = "row < M", "rows < M"
        if self.is_boxed and self._parts[0] == 1:
            here, each = "inside", "rows_inside"
        flat = At("rows.to(tl.int64)", f"({offset}columns)", each, "columns < N")
        return At("row", f"({offset}column)", here, "column < N", flat)

    @cached_property
    def _parts(self) -> tuple[int, Config]:
        columns = self.shape[-1] // self.geometry.groups
        images = self.shape[0]
        machine = self.ctx.machine
        return boxes.parts_of(machine, self.geometry, self._box_configs, images, columns)

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

    def launch(self, filters: Array, finish: Finish, why: str) -> None:
        """Append the kernel call."""
        if self.is_depthwise:
            self._launch_depthwise(filters, finish)
        elif self.geometry.is_pointwise and self.geometry.groups == 1 and self.packing is None:
            depth, count = self.geometry.channels, len(filters)
            x = View(self.image.buffer, self.image.offset, (self.rows, depth), (depth, 1))
            w = packed_weight(self.ctx, filters.reshape(count, depth).T, self._weight_name)
            launch_product(self.ctx, self.node, Matrices(x, w), self.tail, finish, why=why)
        elif self.is_boxed:
            self._launch_boxes(filters, finish, why)
        else:
            self._launch_implicit(filters, finish, why)

    def _launch_boxes(self, filters: Array, finish: Finish, why: str) -> None:
        geometry, image = self.geometry, self.image
        columns = len(filters) // geometry.groups
        if self.packing is not None:
            filters = self.packing.filters(filters)
        views = {
            "x": image,
            "w": self.ctx.constant(filters.reshape(len(filters), -1), self._weight_name),
        }
        # a zero of u8 is 0 before its sign bit is turned, as that of i8 is
        has_border = geometry.is_padded and float(self.fill) != 0
        if has_border:
            rows = boxes.border(geometry, filters, int(self.fill))
            views["border"] = self.ctx.constant(rows, f"{self.node.name}.border")
        strides = boxes.dense_strides(geometry) if self.packing is None else self.packing.strides
        sizes = boxes.values(geometry, self.shape[0], strides)
        spec = self._spec(columns)
        end = "\n".join(p for p in (finish.text, self.tail.text("acc", self.place, 0)) if p)
        parts, config = self._parts
        configs = self._box_configs
        if parts > 1:
            partial = f"{self.node.name}.partial"
            count = parts * self.rows * len(filters)
            views["partial"] = self.ctx.scratch(partial, spec.sum.name, count)
            ordered = (config, *(one for one in configs if one != config))
            configs = tuple(boxes.with_parts(one, parts) for one in ordered)
        else:
            views |= {**finish.views, **self.tail.views}
            sizes |= {**finish.values, **self.tail.values}
        twin, native = bodies(
            spec, lambda one: boxes.body(one, geometry, end, has_border, parts > 1)
        )
        positions = multiplied(self.shape[1:-1])
        operations = 2.0 * geometry.taps * geometry.per_group * len(filters)
        source = KernelSource(
            f"conv_{self.dtype}_tma{'_split' if parts > 1 else ''}",
            twin,
            {name: view.dtype for name, view in views.items()},
            tuple(sizes),
            configs,
            boxes.grid(geometry, columns),
            contracts=parts > 1 or may_contract(self.tail),
            descriptors=boxes.descriptors(geometry, len(filters)),
            work=Work(
                lambda size: operations * size["IMAGES"] * _count(positions), _unit(self.dtype)
            ),
            helpers=HALVES,
            native_body=native,
        )
        writes = "partial" if parts > 1 else ""
        self._call(source, views, sizes, f"{why}, boxes of the image", writes)
        if parts > 1:
            self._sum_parts(spec, parts, views["partial"], finish, end)

    def _sum_parts(
        self, spec: Product, parts: int, partial: View, finish: Finish, end: str
    ) -> None:
        views = {"partial": partial, **finish.views, **self.tail.views}
        sizes = {"M": self.rows, **finish.values, **self.tail.values}
        source = KernelSource(
            "conv_sum_parts",
            sum_parts_body(spec, end),
            {name: view.dtype for name, view in views.items()},
            tuple(sizes),
            tiles.sum_configs(parts),
            pipelined_grid_of_sums(spec.columns),
            contracts=may_contract(self.tail),
        )
        self._call(source, views, sizes, "sum of the parts")

    def _spec(self, columns: int) -> Product:
        geometry = self.geometry
        spec = Product(self.dtype, self.dtype, columns, geometry.taps * geometry.per_group)
        return replace(spec, w=i8) if self.dtype.is_integer else spec

    def _packed(self, x: View, packing: Packing) -> View:
        """The packed image, whose channels are the rows of windows."""
        ctx, images = self.ctx, x.shape[0]
        whole = ctx.scratch(f"{self.node.name}.packed", self.dtype.name, packing.count(images))
        names = ("x_image", "x_channel", *(f"x_s{a}" for a in range(self.geometry.rank)))
        sizes = {"IMAGES": images, **dict(zip(names, x.strides, strict=True))}
        source = KernelSource(
            f"conv_pack_{self.dtype}",
            packing.body(self.fill, self.dtype, images),
            {"x": self.dtype, "y": self.dtype},
            tuple(sizes),
            packed.CONFIGS,
            packing.grid(),
        )
        views = {"x": x, "y": whole}
        ctx.call(ctx.kernel(source), self.node, views, sizes, why="rows of windows in one range")
        outer, *inner = packing.strides
        sizes_of = packing.windows.sizes
        return View(whole.buffer, 0, (images, packing.depth, *sizes_of), (outer, 1, *inner))

    def _launch_implicit(self, filters: Array, finish: Finish, why: str) -> None:
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
        spec = replace(self._spec(columns), row_sums=finish.row_sums)
        end = "\n".join(p for p in (finish.text, self.tail.text("acc", self.place, 0)) if p)
        twin, native = bodies(spec, lambda one: implicit.body(one, geometry, depth, self.fill, end))
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

    def _launch_depthwise(self, filters: Array, finish: Finish) -> None:
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
            depthwise.body(geometry, count, type_, self.fill, end),
            {name: view.dtype for name, view in views.items()},
            tuple(sizes),
            depthwise.CONFIGS,
            depthwise.grid(count),
            contracts=may_contract(self.tail),
            work=Work(lambda size: 2.0 * geometry.taps * count * size["M"], self.dtype.name),
        )
        self._call(source, views, sizes, "depthwise")

    def _call(
        self,
        source: KernelSource,
        views: dict[str, View],
        sizes: dict[str, Size],
        why: str,
        writes: str = "",
    ) -> None:
        """Append a call that writes one view, or else the results."""
        ctx, written = self.ctx, (writes,) if writes else self.tail.results
        ctx.call(ctx.kernel(source), self.node, views, sizes, writes=written, why=why)

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


def _channels_last(w: Array) -> Array:
    """Filters [M, C, taps...] as [M, taps..., C]."""
    return np.ascontiguousarray(np.moveaxis(w, 1, -1))


def _given(region: RegionView, count: int) -> list[Value | None]:
    assert region.anchor is not None
    inputs = optional_inputs(region.anchor, count)
    return [None if value is None else region.outer(value) for value in inputs]


def _constant(value: Value) -> Array:
    found = constant_value(value)
    if found is None:
        raise NoKernelError("its filters, zero points or bias are not constants")
    return found


def _count(positions: Size) -> int:
    return positions if isinstance(positions, int) else 0


def _unit(x: DType) -> str:
    return "int8" if x.is_integer else x.name
