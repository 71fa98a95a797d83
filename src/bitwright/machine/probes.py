"""Small products of each element type, as models contain them.

    f64, f32, f16, bf16    matmul(x, w)
    int8, uint8, binary    integer_matmul(x, w) of 8-bit values, summed in i32, times a scale
    int16, uint16          matmul(dequantize(x), dequantize(w))
    the other types        dequant_matmul(x, q): f32 times quantized weights

Weights are normal, with a scale per channel, because the kernel may depend on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.errors import BitwrightError
from bitwright.ir import quant_types
from bitwright.ir.dtype import DTYPES, DType
from bitwright.ir.dtype import dtype as element_type
from bitwright.ir.graph import Graph
from bitwright.ops.core.builder import Builder

Array = np.ndarray[Any, Any]
FLOATS = ("f64", "f32", "f16", "bf16")
BYTES = ("int8", "uint8", "binary")
WORDS = ("int16", "uint16")
WEIGHTS = ("int4", "uint4", "int2", "uint2", "f8e4m3fn", "f8e5m2", "f4e2m1")
TYPES = (*FLOATS, *BYTES, *WORDS, *WEIGHTS)
DEPTH, COLUMNS = 512, 256
BLOCK = 32
_SPREAD = 3.5
"""The largest of a channel's normal weights, in standard deviations."""


@dataclass(frozen=True)
class SampleProduct:
    """A product x[rows, depth] · w[depth, columns]."""

    dtype: str
    graph: Graph
    element: DType
    """The element type of x."""
    depth: int
    columns: int

    def feeds(self, rows: int) -> dict[str, Array]:
        draw = np.random.default_rng(1).normal(size=(rows, self.depth))
        if self.element.is_integer:
            low, high = float(self.element.min), float(self.element.max)
            draw = np.clip((low + high) / 2 + draw * (high - low) / 8, low, high).round()
        return {"x": draw.astype(self.element.numpy)}

    def operations(self, rows: int) -> int:
        return 2 * rows * self.depth * self.columns


def type_name(dtype: str | quant_types.QuantType | DType) -> str:
    """The name in `TYPES` of an element type, also for i8, u4 and the like."""
    name = str(dtype)
    if name not in TYPES and name in DTYPES and DTYPES[name].is_integer:
        word = "int" if DTYPES[name].is_signed else "uint"
        name = f"{word}{DTYPES[name].bits}"
    if name not in TYPES:
        raise BitwrightError(
            "no product of this type is known", expected=", ".join(TYPES), found=name
        )
    return name


def probe(
    dtype: str, depth: int = DEPTH, columns: int = COLUMNS, block: int = BLOCK
) -> SampleProduct:
    """The product of an element type in `TYPES`."""
    b = Builder(f"product_{dtype}")
    w = np.random.default_rng(0).normal(size=(depth, columns))
    if dtype in FLOATS:
        element = element_type(dtype)
        x = b.input("x", f"{dtype}[rows, {depth}]")
        y = b.matmul(x, b.constant(w.astype(element.numpy)))
        return SampleProduct(dtype, b.build(y=y), element, depth, columns)
    kind = quant_types.get(dtype)
    if dtype in BYTES:
        element = element_type("u8" if dtype == "uint8" else "i8")
        x = b.input("x", f"{element}[rows, {depth}]")
        q = np.sign(w) if dtype == "binary" else _quantized(w, 127)
        sums = b.integer_matmul(x, b.constant(q.astype(np.int8)))
        scale = b.constant(np.full(columns, 1e-3, np.float32))
        return SampleProduct(
            dtype, b.build(y=b.mul(b.cast(sums, to="f32"), scale)), element, depth, columns
        )
    element, unit = kind.element, b.constant(np.float32(1e-3))
    if dtype in WORDS:
        x = b.input("x", f"{element}[rows, {depth}]")
        q = _quantized(w, 32767) + (0 if kind.is_signed else 32768)
        held = b.dequantize(b.constant(q.astype(element.numpy)), unit)
        y = b.matmul(b.dequantize(x, unit), held)
        return SampleProduct(dtype, b.build(y=y), element, depth, columns)
    x = b.input("x", f"f32[rows, {depth}]")
    top = min(float(kind.max), 448.0)
    q = _quantized(w, top) if kind.is_signed else np.clip(_quantized(w, top / 2) + top / 2, 0, top)
    blocks = -(-depth // block)
    scales = b.constant(np.full((columns, blocks), 1e-3, np.float32))
    y = b.dequant_matmul(x, b.constant(q.T.astype(element.numpy)), scales, block=block)
    return SampleProduct(dtype, b.build(y=y), element_type("f32"), depth, columns)


def _quantized(w: Array, top: float) -> Array:
    return np.clip(np.round(w * top / _SPREAD), -top, top)
