"""The cases of gpu_kernels.py: graphs, inputs, the results in float64, and the library's peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton

import bitwright as bw
from bitwright.ir.dtype import DTYPES

NATIVE = torch.cuda.is_available() and not triton.knobs.runtime.interpret
DEVICE = "cuda" if NATIVE else "cpu"
PRODUCTS = (
    (4096, 2304, 768),
    (4096, 3072, 768),
    (4096, 768, 3072),
    (8192, 1536, 384),
    (4096, 4096, 4096),
)
SMALL = ((128, 1152, 384), (128, 1536, 384), (128, 384, 1536))
ROWS = (
    # columns, depth, weights
    (4096, 2048, "i8"),
    (4096, 4096, "i4"),
    (8192, 8192, "i8"),
    (16384, 8192, "i4"),
    (17920, 1536, "i8"),
    (17920, 1536, "i4"),
    (1536, 8960, "i4"),
    (151936, 1536, "i4"),
)
CONVS = (
    # batch, channels, size, filters, kernel, stride
    (64, 3, 224, 64, 7, 2),
    (64, 64, 56, 64, 3, 1),
    (64, 256, 56, 64, 1, 1),
    (64, 128, 28, 128, 3, 1),
    (64, 256, 14, 256, 3, 1),
    (1, 256, 14, 256, 3, 1),
)
Array = np.ndarray[Any, Any]


@dataclass
class Case:
    group: str
    name: str
    graph: Any
    feeds: dict[str, Array]
    wanted: Callable[[Mapping[str, Any]], Any]
    """The result in float64, from feeds as tensors on the device."""
    tolerance: float
    peers: dict[str, Callable[[], Any]] = field(default_factory=dict)
    """Functions that make a function of one launch, on operands of its own."""
    bytes: float = 0.0
    operations: float = 0.0


def random(rng: np.random.Generator, element: str, *shape: int) -> Array:
    found = DTYPES[element]
    if found.is_integer:
        low, high = max(int(found.min), -127), int(found.max)
        return rng.integers(low, high + 1, shape).astype(found.numpy)
    return rng.standard_normal(shape, np.float32).astype(found.numpy)


def tensor(array: Array) -> Any:
    """An array on the device in float64, exact."""
    wide = array.astype(np.float32)
    return torch.from_numpy(np.ascontiguousarray(wide)).to(DEVICE).double()


def product_case(m: int, n: int, k: int, kind: str, tail: str) -> Case:
    """Per-row and per-column scales and bias; `tail` is "" (bf16 result) or "gelu" (int8)."""
    rng = np.random.default_rng(0)
    element = {"int8": "i8", "fp8": "f8e4m3fn", "bf16": "bf16"}[kind]
    x, w = random(rng, element, m, k), random(rng, element, k, n)
    row = (0.5 + rng.random((m, 1))).astype(np.float32)
    column = ((0.5 + rng.random(n)) / (k**0.5 * (5000 if kind == "int8" else 1))).astype(np.float32)
    bias = rng.standard_normal(n, np.float32)
    b = bw.Builder("product")
    given = b.input("x", f"{element}[{m}, {k}]")
    feeds = {"x": x}
    if kind == "bf16":
        y = b.add(b.matmul(given, b.constant(w)), b.constant(bias.astype(w.dtype)))
    else:
        op = b.integer_matmul if kind == "int8" else b.f8_matmul
        y = op(given, b.constant(w))
        y = b.cast(y, to="f32") if kind == "int8" else y
        y = b.mul(b.mul(y, b.input("s", f"f32[{m}, 1]")), b.constant(column))
        y = b.add(y, b.constant(bias))
        feeds["s"] = row
    if tail:
        y = b.gelu(y)
        y = b.requantize(b.mul(y, np.float32(30)), to="i8")
    elif kind != "bf16":
        y = b.cast(y, to="bf16")

    def wanted(_: Any) -> Any:
        y = tensor(x) @ tensor(w)
        if kind != "bf16":
            y = y * tensor(row) * tensor(column)
        y = y + tensor(bias if kind != "bf16" else bias.astype(w.dtype))
        if not tail:
            return y
        return (torch.nn.functional.gelu(y) * 30).round().clamp(-128, 127)

    label = f"{m}x{n}x{k} {kind}{' + gelu + int8' if tail else ''}"
    size = float(x.nbytes + w.nbytes + m * n * (1 if tail else 2))
    peers = library_peers(m, n, k) if NATIVE and not tail else {}
    error = 1.01 if tail else 2e-2  # one step of an 8-bit result; half a digit of bf16
    return Case("products", label, b.build(y=y), feeds, wanted, error, peers, size, 2.0 * m * n * k)


def library_peers(m: int, n: int, k: int) -> dict[str, Callable[[], Any]]:
    """The bare products of the library, on operands that rotate."""

    def bf16() -> Any:
        x, w = (
            torch.randn(m, k, device=DEVICE).bfloat16(),
            torch.randn(n, k, device=DEVICE).bfloat16(),
        )
        y = torch.empty(m, n, device=DEVICE, dtype=torch.bfloat16)
        return lambda: torch.mm(x, w.t(), out=y)

    def int8() -> Any:
        x, w = (
            torch.randint(-127, 128, s, device=DEVICE, dtype=torch.int8) for s in ((m, k), (n, k))
        )
        return lambda: torch._int_mm(x, w.t())

    def fp8() -> Any:
        x, w = (torch.randn(s, device=DEVICE).to(torch.float8_e4m3fn) for s in ((m, k), (n, k)))
        scales = torch.ones(m, 1, device=DEVICE), torch.ones(1, n, device=DEVICE)
        return lambda: torch._scaled_mm(
            x, w.t(), scale_a=scales[0], scale_b=scales[1], out_dtype=torch.bfloat16
        )

    return {"cuBLAS bf16": bf16, "_int_mm": int8, "_scaled_mm": fp8}


def row_case(n: int, k: int, kind: str, rows: int = 1, element: str = "bf16") -> Case:
    """One row (or a few) times weights with a scale per 128 (4 bits) or per column (8 bits)."""
    rng = np.random.default_rng(1)
    block = k if kind == "i8" else 128
    q = random(rng, kind, n, k)
    scale = ((0.5 + rng.random((n, -(-k // block)))) / k).astype(np.float16)
    x = random(rng, element, rows, k)
    b = bw.Builder("row")
    given = b.input("x", f"{element}[{rows}, {k}]")
    y = b.dequant_matmul(given, b.constant(q), b.constant(scale), block=block)
    spread = np.repeat(scale, block, 1)[:, :k]
    size = q.size * DTYPES[kind].bits / 8 + scale.nbytes

    def wanted(_: Any) -> Any:
        return tensor(x) @ (tensor(q) * tensor(spread)).t()

    def peer() -> Any:
        one, w = (
            torch.randn(rows, k, device=DEVICE).bfloat16(),
            torch.randn(n, k, device=DEVICE).bfloat16(),
        )
        return lambda: torch.mm(one, w.t())

    label = f"{rows} row(s) x [{n}, {k}] {kind} ({size / 1e6:.0f} MB)"
    peers = {"cuBLAS bf16": peer} if NATIVE else {}
    graph = b.build(y=y)
    return Case("rows", label, graph, {"x": x}, wanted, 1e-2, peers, size, 2.0 * rows * n * k)


def conv_case(
    batch: int, c: int, size: int, filters: int, kernel: int, stride: int, kind: str
) -> Case:
    rng = np.random.default_rng(2)
    element = {"int8": "i8", "f16": "f16"}[kind]
    x, w = (
        random(rng, element, batch, c, size, size),
        random(rng, element, filters, c, kernel, kernel),
    )
    pad, taps = kernel // 2, c * kernel * kernel
    window = {"strides": (stride, stride), "pads": (pad,) * 4}
    scale = np.full((filters, 1, 1), 1 / (taps**0.5 * (5000 if kind == "int8" else 1)), np.float32)
    b = bw.Builder("conv")
    given = b.input("x", f"{element}[{batch}, {c}, {size}, {size}]")
    if kind == "int8":
        y = b.cast(b.integer_conv(given, b.constant(w), **window), to="f32")
        y = b.requantize(b.mul(b.relu(b.mul(y, b.constant(scale))), np.float32(40)), to="i8")
    else:
        y = b.relu(b.conv(given, b.constant(w), **window))

    def wanted(_: Any) -> Any:
        y = torch.nn.functional.conv2d(tensor(x), tensor(w), stride=stride, padding=pad)
        if kind != "int8":
            return y.relu()
        return ((y * tensor(scale)).relu() * 40).round().clamp(-128, 127)

    def peer() -> Any:
        like = {"memory_format": torch.channels_last}
        one = torch.randn(batch, c, size, size, device=DEVICE, dtype=torch.float16).to(**like)
        other = torch.randn(filters, c, kernel, kernel, device=DEVICE, dtype=torch.float16).to(
            **like
        )
        return lambda: torch.nn.functional.conv2d(one, other, stride=stride, padding=pad)

    out = ((size + 2 * pad - kernel) // stride + 1) ** 2 * batch
    label = f"{batch}x{c}x{size}x{size} {filters} of {kernel}x{kernel} / {stride} {kind}"
    peers = {"cuDNN f16": peer} if NATIVE else {}
    moved = float(x.nbytes + w.nbytes + out * filters * x.itemsize)
    tolerance = 1.01 if kind == "int8" else 2e-2
    return Case(
        "convs",
        label,
        b.build(y=y),
        {"x": x},
        wanted,
        tolerance,
        peers,
        moved,
        2.0 * out * filters * taps,
    )


def cases(groups: Sequence[str], tiny: bool) -> Iterator[Case]:
    if "products" in groups:
        for m, n, k in ((33, 48, 64), (17, 32, 48)) if tiny else (*PRODUCTS, *SMALL):
            for kind in ("int8", "fp8", "bf16"):
                yield product_case(m, n, k, kind, "")
            for kind in ("int8", "fp8"):
                yield product_case(m, n, k, kind, "gelu")
    if "rows" in groups:
        for n, k, kind in ((48, 256, "i8"), (40, 256, "i4")) if tiny else ROWS:
            for rows in (1,) if n * k < 1 << 25 and not tiny else (1, 4):
                yield row_case(n, k, kind, rows)
    if "convs" in groups:
        for sizes in ((2, 3, 12, 8, 7, 2), (1, 16, 6, 8, 3, 1)) if tiny else CONVS:
            for kind in ("int8", "f16"):
                yield conv_case(*sizes, kind)
