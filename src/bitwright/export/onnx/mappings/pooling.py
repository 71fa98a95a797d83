"""Pooling over windows.

With `ceil`, ONNX's shape inference before opset 22 counts a window that would start in the end
padding, which no runtime computes. If sizes are known and that happens, the exact padding is
written instead of `ceil_mode`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.export.onnx.forms import reshape, static_size
from bitwright.export.onnx.mapping import Ref, Scope, exports
from bitwright.export.onnx.mappings.windows import padded, window_attrs
from bitwright.export.onnx.sizes import sizes_tensor
from bitwright.ir.dim import Dim, Size, product
from bitwright.ir.dtype import f64, i8, u8
from bitwright.ir.types import Shape
from bitwright.ops.nn.windows import make_windows


@dataclass(frozen=True)
class Pool:
    """The attributes that all pooling ops share."""

    kernel: Sequence[int]
    strides: Sequence[int] | None
    pads: Sequence[Size] | None
    dilations: Sequence[int] | None
    ceil: bool

    def attrs(self, pads: Sequence[Size] | None, ceil: bool) -> dict[str, Any]:
        return {
            "kernel_shape": list(self.kernel),
            **window_attrs(self.strides, pads, self.dilations),
            "ceil_mode": 1 if ceil else None,
        }

    @property
    def is_symbolic(self) -> bool:
        return any(isinstance(n, Dim) for n in self.pads or ())

    def exact_pads(self, e: Scope, sizes: Sequence[Size]) -> list[int] | None:
        """The padding for which rounding down gives the windows, if rounding up gives too many."""
        if not self.ceil or self.is_symbolic:
            return None
        windows = make_windows(len(sizes), self.kernel, self.strides, self.pads, self.dilations)
        counts = windows.counts(sizes, ceil=True)
        ends, differs = [], False
        for axis, (size, count) in enumerate(zip(sizes, counts, strict=True)):
            if isinstance(size, Dim) or isinstance(count, Dim):
                continue
            begin, stride = windows.begins[axis], windows.strides[axis]
            room = size + begin + windows.ends[axis] - windows.extents[axis]
            differs |= -(-room // stride) + 1 != count
            needed = (count - 1) * stride + windows.extents[axis] - size - begin
            ends.append(max(int(needed), 0))
        if differs and len(ends) < len(sizes):
            e.needs(22, "ONNX counts windows that start in the padding before")
            return None
        return [*map(int, windows.begins), *ends] if differs else None


def _emit(e: Scope, op_type: str, x: Ref, pool: Pool, sizes: Any, fill: float, **attrs: Any) -> Ref:
    exact = pool.exact_pads(e, sizes)
    if exact is not None:
        return e.emit(op_type, [x], {**pool.attrs(exact, ceil=False), **attrs})[0]
    x, rest = padded(e, x, pool.pads, fill)
    return e.emit(op_type, [x], {**pool.attrs(rest, pool.ceil), **attrs})[0]


@exports("max_pool", "max_pool_indices")
def max_pool(e: Scope, x: Ref, storage_order: int | None = None, **shape: Any) -> Any:
    pool, sizes, element = Pool(**shape), x.shape[2:], x.element
    if element.is_integer and element not in (i8, u8):
        if element.bits > 32:
            raise e.reject(
                f"MaxPool takes no {element}, and no float type represents all its values"
            )
        x = e.cast(x, f64)
    lowest = -np.inf if x.element.is_float else x.element.min
    if storage_order is None:
        return _emit(e, "MaxPool", x, pool, sizes, lowest)
    if pool.is_symbolic:
        raise e.reject("MaxPool with indices takes no symbolic padding")
    exact = pool.exact_pads(e, sizes)
    attrs = pool.attrs(pool.pads if exact is None else exact, pool.ceil and exact is None)
    return e.emit("MaxPool", [x], {**attrs, "storage_order": storage_order}, results=2)


@exports("avg_pool")
def avg_pool(e: Scope, x: Ref, count_include_pad: bool, **shape: Any) -> Ref:
    pool, sizes = Pool(**shape), x.shape[2:]
    if not count_include_pad:
        if pool.is_symbolic:
            raise e.reject("AveragePool that leaves padding out takes no symbolic padding")
        return _emit(e, "AveragePool", x, pool, sizes, 0)
    if pool.exact_pads(e, sizes) is None:
        return _emit(e, "AveragePool", x, pool, sizes, 0, count_include_pad=1)
    # counted padding becomes part of the tensor; padding that completes a window is not counted
    pads = [static_size(e, n) for n in pool.pads or ()]
    rank = len(sizes)
    grown = e.Pad(x, e.ints([0, 0, *pads[:rank], 0, 0, *pads[rank:]]), e.scalar(0, x))
    wide = [size + pads[i] + pads[rank + i] for i, size in enumerate(sizes)]
    return _average_padded(e, grown, pool, wide, sizes)


def _average_padded(e: Scope, x: Ref, pool: Pool, wide: list[Any], sizes: Sequence[Size]) -> Ref:
    """Averages over a tensor that includes its padding, with the same number of windows."""
    exact = pool.exact_pads(e, sizes)
    assert exact is not None
    rank = len(wide)
    before = [static_size(e, n) for n in pool.pads or ()]
    ends = [exact[rank + i] - before[rank + i] for i in range(rank)]
    if any(end < 0 for end in ends):  # the windows do not cover the padding
        stops = [size + min(end, 0) for size, end in zip(wide, ends, strict=True)]
        axes = e.ints(range(2, 2 + rank))
        x = e.Slice(x, e.ints([0] * rank), e.ints(stops), axes)
    pads = [0] * rank + [max(end, 0) for end in ends]
    return e.AveragePool(x, **pool.attrs(pads, ceil=False))


@exports("lp_pool")
def lp_pool(e: Scope, x: Ref, p: int, **shape: Any) -> Ref:
    return _emit(e, "LpPool", x, Pool(**shape), x.shape[2:], 0, p=p)


@exports("max_unpool")
def max_unpool(e: Scope, x: Ref, indices: Ref, shape: Shape) -> Ref:
    """A scatter: the indices of MaxUnpool are relative to another shape than the output's."""
    count = product(list(shape))
    flat = e.ints([-1])
    zeros = e.Expand(e.scalar(0, x), sizes_tensor(e, [count]))
    filled = e.ScatterElements(zeros, e.Reshape(indices, flat), e.Reshape(x, flat), axis=0)
    return reshape(e, filled, (count,), shape)
