"""Matmul and convolution of quantized tensors by compiled integer kernels.

    acc          Σ (x - x_zero)(w - w_zero) + bias, in i32        t    f32(acc) * m
    quantized    saturate(rne(t) + zero_point), for a quantized result

The result is bit-identical to numpy (see `arithmetic` for the rules). A program is compiled for a
weight, which it packs, at the weight's second use, or at once for a large product. It supports any
number of rows or image size, any x scale and zero point, and is freed with the weight. Types wider
than 8 bits, scales or zero points that vary by row, and sums that could overflow 32 bits are not
supported (None).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from bitwright.executable import Executable
from bitwright.ir.arrays import Array
from bitwright.ir.dtype import DType, i8, i16, u8, u16
from bitwright.ir.graph import Graph
from bitwright.ir.quant_params import QuantParams
from bitwright.ir.quant_types import BINARY, Scheme
from bitwright.ops.core.builder import Builder
from bitwright.quant.core.quantize_values import spread_scale, spread_zero_point
from bitwright.quant.tensor.arithmetic import Result, is_integer_quantized, is_linear
from bitwright.quant.tensor.tensor import QuantizedTensor

MIN_TERMS = 1 << 18
"""Products with fewer terms are faster in numpy."""
TERMS_AT_ONCE = 1 << 28
"""Products with more terms take longer in numpy than compiling a program."""
_LIMIT = 2**31
INTEGER_TYPES = (i8, u8, i16, u16)


@dataclass
class _Weight:
    """Use count, bound and programs of a weight."""

    uses: int = 0
    largest: int = 0
    """The largest Σ |w - w_zero| of an output channel."""
    programs: dict[Any, Executable] = field(default_factory=dict)


_WEIGHTS: WeakKeyDictionary[QuantizedTensor, _Weight] = WeakKeyDictionary()


@dataclass(frozen=True)
class Product:
    """x · w; `scale` is the unit of its sums, `bias` is in that unit for each output channel."""

    op: str
    x: QuantizedTensor
    w: QuantizedTensor
    attrs: Mapping[str, Any]
    shape: tuple[int, ...]
    """Shape of the result."""
    scale: Array
    bias: Array | None
    output: QuantParams | None

    @property
    def is_matmul(self) -> bool:
        return self.op == "integer_matmul"

    @property
    def channels(self) -> int:
        return self.shape[-1 if self.is_matmul else 1]

    def per_channel(self, values: Array) -> Array | None:
        """Values that broadcast to the result, as [channels]; None if they vary otherwise."""
        if values.size == 1:
            return np.broadcast_to(values.reshape(()), (self.channels,))
        axis = len(self.shape) - 1 if self.is_matmul else 1
        place = axis - (len(self.shape) - values.ndim)
        fits = place >= 0 and values.size == values.shape[place] == self.channels
        return values.reshape(-1) if fits else None


def compiled(product: Product) -> Result | None:
    """The result; None if numpy must compute it."""
    x, w, output = product.x, product.w, product.output
    if not (is_narrow(x) and is_narrow(w)) or w.ndim != (2 if product.is_matmul else 4):
        return None
    terms = math.prod(product.shape) * (w.size // max(1, product.channels))
    if not terms or terms < MIN_TERMS:
        return None
    known = _WEIGHTS.setdefault(w, _Weight())
    known.uses += 1
    if known.uses < 2 and terms < TERMS_AT_ONCE:
        return None
    zero = spread_zero_point(x.parameters, x.shape) if _has_zero(x) else None
    if zero is not None and zero.size != 1:
        return None
    if output is not None and not (is_linear(output) and output.dtype.element in INTEGER_TYPES):
        return None
    unit = product.scale
    point: Array | None = None
    if output is not None:
        output.validate(product.shape)
        unit = unit / spread_scale(output, product.shape).astype(np.float64)
        point = np.unique(spread_zero_point(output, product.shape))
        if point.size != 1:
            return None
    factor = product.per_channel(unit.astype(np.float32))
    if factor is None or not _fits(product, known, zero):
        return None
    to = None if output is None else output.dtype.element
    feeds = {"x": int8_values(x), "m": np.ascontiguousarray(factor)}
    if zero is not None:
        feeds["x_zero"] = zero.reshape(1).astype(feeds["x"].dtype)
    if product.bias is not None:
        feeds["bias"] = product.bias.reshape(-1).astype(np.int32)
    if to is not None and point is not None:
        feeds["y_zero"] = point.reshape(1).astype(to.numpy)
    key = (str(feeds["x"].dtype), x.ndim, tuple(feeds), to, tuple(product.attrs.items()))
    if key not in known.programs:
        known.programs[key] = program_of(_graph(product, feeds, to))
    y = known.programs[key].run(feeds)["y"]
    if output is None:
        return np.asarray(y)
    return QuantizedTensor.from_qvalues(np.asarray(y), output)


def is_narrow(tensor: QuantizedTensor) -> bool:
    """Whether values are integers of at most 8 bits, of one width."""
    parameters = tensor.parameters
    return is_integer_quantized(parameters) and parameters.dtype.bits <= 8 and not parameters.widths


def _has_zero(tensor: QuantizedTensor) -> bool:
    return tensor.parameters.scheme is Scheme.asymmetric


def int8_values(tensor: QuantizedTensor) -> Array:
    """Quantized values as i8 or u8; `binary` becomes -1 and 1."""
    qvalues = tensor.qvalues()
    if tensor.parameters.dtype == BINARY:
        return 2 * qvalues.astype(np.int8) - np.int8(1)
    return qvalues.astype(np.int8 if tensor.parameters.dtype.is_signed else np.uint8, copy=False)


def _fits(product: Product, known: _Weight, zero: Array | None) -> bool:
    """Whether no sum can overflow 32 bits, for any x."""
    if not known.largest:
        known.largest = _largest(product.w, product.is_matmul)
    kind = product.x.parameters.dtype
    low, high = (-1, 1) if kind == BINARY else (int(kind.min), int(kind.max))
    centre = 0 if zero is None else int(zero.reshape(-1)[0])
    bound = known.largest * max(high - centre, centre - low)
    if product.bias is not None:
        bound += int(np.abs(product.bias.astype(np.int64)).max(initial=0))
    return bound < _LIMIT


def _largest(w: QuantizedTensor, is_matmul: bool) -> int:
    distance = int8_values(w).astype(np.int32)
    if _has_zero(w):
        distance = distance - spread_zero_point(w.parameters, w.shape).astype(np.int32)
    axes = (0,) if is_matmul else (1, 2, 3)
    return int(np.abs(distance).sum(axis=axes, dtype=np.int64).max(initial=0)) or 1


def program_of(graph: Graph) -> Executable:
    from bitwright.pipeline import compile_graph  # slow to import

    return compile_graph(graph)


def _graph(product: Product, feeds: Mapping[str, Array], to: DType | None) -> Graph:
    """The product as a graph with the weight as its only constant."""
    b, w = Builder("product"), product.w
    qvalues = int8_values(w)
    element = "u8" if feeds["x"].dtype == np.uint8 else "i8"
    channels = product.channels
    if product.is_matmul:
        outer = ", ".join(f"m{axis}" for axis in range(product.x.ndim - 1))
        x = b.input("x", f"{element}[{outer}, {qvalues.shape[0]}]")
        place: tuple[int, ...] = (channels,)
    else:
        x = b.input("x", f"{element}[n, {product.x.shape[1]}, h, w]")
        place = (channels, 1, 1)
    zero = b.input("x_zero", f"{element}[1]") if "x_zero" in feeds else None
    points = None
    if _has_zero(w):
        held = spread_zero_point(w.parameters, w.shape).astype(qvalues.dtype)
        points = b.constant(held.reshape(-1))
    sums = b.node(product.op, [x, b.constant(qvalues), zero, points], dict(product.attrs), [])
    total = sums.outputs[0]
    if "bias" in feeds:
        bias = b.input("bias", f"i32[{channels}]")
        total = b.add(total, b.reshape(bias, shape=place))
    factor = b.input("m", f"f32[{channels}]")
    y = b.mul(b.cast(total, to="f32"), b.reshape(factor, shape=place))
    if to is not None:
        point = b.reshape(b.input("y_zero", f"{to}[1]"), shape=())
        y = b.requantize(y, point, to=to)
    return b.build(y=y)
