"""The cases of the suite: small graphs of one op or a chain, and the precisions they run at.

A case is an f32 graph with inputs. Precisions:

    f32, bf16   the graph compiled with that policy
    int8        the graph quantized with static ranges, quantization of the input included
    w4          4-bit weights in groups of 32, f32 activations
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from bitwright.ir.arrays import Array
from bitwright.ir.graph import Graph
from bitwright.ops.core.builder import Builder

FLOATS = ("f32", "bf16")


@dataclass(frozen=True)
class Case:
    """One line of the suite, at several precisions."""

    suite: str
    name: str
    precisions: tuple[str, ...]
    make: Callable[[], tuple[Graph, list[dict[str, Array]]]]
    """The f32 graph and batches of inputs; the first one is timed."""
    int8: Callable[[], Graph] | None = None
    """The 8-bit form, if it is not the graph quantized."""
    is_quick: bool = True
    """Whether --quick runs it."""


def _draw(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def _graph(shape: tuple[int, ...], body: Callable[[Builder, Any], Any]) -> Callable[[], Any]:
    """The graph of a function of one input, and a few batches."""

    def make() -> tuple[Graph, list[dict[str, Array]]]:
        b = Builder("case")
        x = b.input("x", f"f32[{', '.join(map(str, shape))}]")
        return b.build(y=body(b, x)), [{"x": _draw(*shape, seed=n)} for n in range(4)]

    return make


def _product(w: Array, b: Builder, x: Any) -> Any:
    return b.matmul(x, b.constant(w))


def _convolution(w: Array, groups: int, b: Builder, x: Any) -> Any:
    """A convolution that keeps the size of its input."""
    return b.conv(x, b.constant(w), pads=(w.shape[-1] // 2,) * 4, groups=groups)


def _matmul() -> Iterator[Case]:
    shapes = ((128, 384, 384), (128, 768, 3072), (1, 2048, 2048), (512, 1024, 1024))
    for number, (rows, terms, columns) in enumerate(shapes):
        w = _draw(terms, columns, seed=1) / np.float32(terms**0.5)
        make = _graph((rows, terms), partial(_product, w))
        precisions = (*FLOATS, "int8", "w4")
        name = f"{rows}x{terms}x{columns}"
        yield Case("matmul", name, precisions, make, is_quick=number == 0)


def _conv() -> Iterator[Case]:
    for channels, size, kernel in ((64, 56, 3), (256, 14, 1), (3, 112, 3)):
        w = _draw(64 if channels < 256 else 256, channels, kernel, kernel, seed=1)
        w = w / np.float32((channels * kernel * kernel) ** 0.5)
        make = _graph((1, channels, size, size), partial(_convolution, w, 1))
        name = f"{channels}->{w.shape[0]} {size}x{size} k{kernel}"
        yield Case("conv", name, (*FLOATS, "int8"), make, is_quick=channels == 256)


def _depthwise() -> Iterator[Case]:
    for channels, size in ((96, 56), (384, 14)):
        w = _draw(channels, 1, 3, 3, seed=1) / np.float32(3)
        make = _graph((1, channels, size, size), partial(_convolution, w, channels))
        name = f"{channels} {size}x{size} k3"
        yield Case("depthwise", name, (*FLOATS, "int8"), make, is_quick=size == 14)


def _attention() -> Iterator[Case]:
    for heads, length, width in ((12, 128, 64), (12, 512, 64)):

        def make(
            int8: bool = False, shape: tuple[int, ...] = (1, heads, length, width)
        ) -> tuple[Graph, list[dict[str, Array]]]:
            b = Builder("case")
            text = f"f32[{', '.join(map(str, shape))}]"
            inputs = [b.input(name, text) for name in "qkv"]
            feeds = {name: _draw(*shape, seed=n) for n, name in enumerate("qkv")}
            return b.build(y=b.attention(*inputs, int8=int8)), [feeds]

        yield Case(
            "attention",
            f"{heads} heads {length}x{width}",
            (*FLOATS, "int8"),
            make,
            lambda make=make: make(True)[0],  # type: ignore[misc]
            is_quick=length == 128,
        )


def _rows() -> Iterator[Case]:
    scale = np.linspace(0.5, 1.5, 768).astype(np.float32)
    norm = lambda b, x: b.layer_norm(x, b.constant(scale), b.constant(scale))
    yield Case("norm", "layer_norm 512x768", FLOATS, _graph((512, 768), norm))
    rms = lambda b, x: b.rms_norm(x, b.constant(scale))
    yield Case("norm", "rms_norm 512x768", FLOATS, _graph((512, 768), rms), is_quick=False)
    softmax = lambda b, x: b.softmax(x, axis=-1)
    yield Case("softmax", "softmax 512x512", FLOATS, _graph((512, 512), softmax))


def _quantize() -> Iterator[Case]:
    shape, one = (512, 768), ("f32",)
    scale, zero = np.float32(0.03), np.uint8(128)

    def q(b: Builder, x: Any) -> Any:
        return b.quantize(x, scale, zero, to="u8")

    yield Case("quantize", "quantize u8 512x768", one, _graph(shape, q))
    pair = lambda b, x: b.dequantize(q(b, b.relu(x)), scale, zero)
    yield Case("quantize", "quantize and dequantize 512x768", one, _graph(shape, pair))
    rows = lambda b, x: b.dynamic_quantize(x, to="u8", per_token=True)[0]
    yield Case("quantize", "dynamic per token 512x768", one, _graph(shape, rows))


def _elementwise() -> Iterator[Case]:
    shape = (512, 3072)
    chain = lambda b, x: b.add(b.gelu(b.add(b.mul(x, 0.7), 0.1)), x)
    yield Case("elementwise", "gelu(0.7 x + 0.1) + x 512x3072", FLOATS, _graph(shape, chain))
    exact = lambda b, x: b.mul(b.tanh(b.exp(b.neg(b.abs(x)))), b.sigmoid(x))
    make = _graph(shape, exact)
    yield Case("elementwise", "tanh(exp(-|x|)) sigmoid(x) 512x3072", FLOATS, make, is_quick=False)


_SUITES: dict[str, Callable[[], Iterator[Case]]] = {
    "matmul": _matmul,
    "conv": _conv,
    "depthwise": _depthwise,
    "attention": _attention,
    "norm": _rows,
    "softmax": _rows,
    "quantize": _quantize,
    "elementwise": _elementwise,
}
OPS = tuple(_SUITES)
MODELS = "models"
"""The suite of the demo model."""
NAMES = (*OPS, MODELS)


def op_cases(suite: str, quick: bool) -> list[Case]:
    """The cases of a suite of ops."""
    found = [case for case in _SUITES[suite]() if case.suite == suite]
    return [case for case in found if case.is_quick or not quick]
