"""Gop/s of products, attention and convolutions in each precision, vs. PyTorch if installed.

    python benchmarks/half_precision.py [--threads 1,4] [--seconds 0.2] [products attention …]
    BITWRIGHT_TILES=off python benchmarks/half_precision.py   without AMX, on a machine that has it

The fastest of many runs, with operands and results in that precision; `u8` are quantized
convolutions with quantized inputs and outputs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import bitwright as bw
from bitwright.ir.dtype import dtype
from bitwright.ir.graph import Graph
from bitwright.target import host

try:
    import torch
except ImportError:  # an optional peer
    torch = None  # type: ignore[assignment]

Case = tuple[str, float, Callable[[str], tuple[Graph, dict[str, Any]]], Callable[[Any], Any]]
ELEMENTS = ("f32", "bf16", "f16")
RATES = 1e-9
rng = np.random.default_rng(0)


def draw(element: str, *shape: int) -> Any:
    """Random values aligned to a cache line, as intermediate values of a model are."""
    numbers = rng.normal(size=shape).astype(dtype(element).numpy)
    room = np.empty(numbers.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    found = room[start : start + numbers.nbytes].view(numbers.dtype).reshape(shape)
    found[...] = numbers
    return found


def products() -> Iterator[Case]:
    for m, k, n in ((1, 384, 1536), (16, 384, 1536), (128, 384, 1536), (1024, 1024, 1024)):

        def ours(element: str, m: int = m, k: int = k, n: int = n) -> tuple[Graph, dict[str, Any]]:
            b = bw.Builder("product")
            x = b.input("x", f"{element}[{m}, {k}]")
            graph = b.build(y=b.matmul(x, b.parameter("w", draw(element, k, n))))
            return graph, {"x": draw(element, m, k)}

        def peer(kind: Any, m: int = m, k: int = k, n: int = n) -> Any:
            x, w = torch.randn(m, k, dtype=kind), torch.randn(k, n, dtype=kind)
            return lambda: torch.matmul(x, w)

        yield f"{m} x {k} x {n}", 2.0 * m * k * n, ours, peer


def attention() -> Iterator[Case]:
    for h, s, d in ((12, 128, 32), (12, 128, 64), (32, 512, 64)):

        def ours(element: str, h: int = h, s: int = s, d: int = d) -> tuple[Graph, dict[str, Any]]:
            b = bw.Builder("attention")
            parts = [b.input(name, f"{element}[1, {h}, {s}, {d}]") for name in "qkv"]
            return b.build(y=b.attention(*parts)), {
                name: draw(element, 1, h, s, d) for name in "qkv"
            }

        def peer(kind: Any, h: int = h, s: int = s, d: int = d) -> Any:
            parts = [torch.randn(1, h, s, d, dtype=kind) for _ in "qkv"]
            return lambda: torch.nn.functional.scaled_dot_product_attention(*parts)

        yield f"{h} heads, {s} x {d}", 4.0 * h * s * s * d, ours, peer


SHAPES = ((16, 32, 3), (64, 56, 3), (128, 28, 3), (256, 14, 3), (512, 7, 3), (64, 56, 1))


def convolutions() -> Iterator[Case]:
    for c, size, taps in SHAPES:
        pads = [taps // 2] * 4

        def ours(
            element: str, c: int = c, size: int = size, taps: int = taps, pads: Any = pads
        ) -> tuple[Graph, dict[str, Any]]:
            b = bw.Builder("conv")
            shape, filters = (1, size, size, c), (c, c, taps, taps)
            image = b.input("x", f"{element}[{', '.join(map(str, shape))}]")
            x = b.transpose(image, perm=(0, 3, 1, 2))
            if element == "u8":
                feeds: dict[str, Any] = {"x": np.full(shape, 3, np.uint8)}
                y = quantized_conv(b, x, filters, pads)
            else:
                feeds = {"x": draw(element, *shape)}
                y = b.relu(b.conv(x, b.parameter("w", draw(element, *filters)), pads=pads))
            return b.build(y=b.transpose(y, perm=(0, 2, 3, 1))), feeds

        def peer(kind: Any, c: int = c, size: int = size, taps: int = taps) -> Any:
            last = torch.channels_last
            x = torch.randn(1, c, size, size, dtype=kind).to(memory_format=last)
            w = torch.randn(c, c, taps, taps, dtype=kind).to(memory_format=last)
            return lambda: torch.nn.functional.conv2d(x, w, padding=taps // 2)

        yield f"{c} -> {c}, {size}², {taps} x {taps}", 2.0 * (c * size * taps) ** 2, ours, peer


def quantized_conv(b: Any, x: Any, filters: tuple[int, ...], pads: list[int]) -> Any:
    w = b.constant(rng.integers(-127, 128, filters, dtype=np.int8))
    bias = b.constant(rng.integers(-999, 999, filters[0], dtype=np.int32))
    total = b.integer_conv(x, w, b.constant(np.uint8(3)), None, bias, pads=pads)
    factor = b.constant(rng.uniform(1e-4, 1e-3, (filters[0], 1, 1)).astype(np.float32))
    return b.requantize(b.mul(b.cast(total, to="f32"), factor), b.constant(np.uint8(33)), to="u8")


def peers() -> dict[str, Any]:
    """PyTorch types that the machine has instructions for; others take minutes."""
    if torch is None:
        return {}
    found = {"f32": torch.float32}
    found |= {"bf16": torch.bfloat16} if host().has("avx512bf16") else {}
    return found | ({"f16": torch.float16} if host().has("avx512fp16") else {})


def best(call: Callable[[], Any], seconds: float) -> float:
    found, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        found = min(found, time.perf_counter() - begin)
    return found


def ours_seconds(made: tuple[Graph, dict[str, Any]], threads: int, seconds: float) -> float:
    graph, feeds = made
    exe = bw.compile(graph, threads=threads)
    return best(lambda: exe.run(feeds), seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", default=["products", "attention", "convolutions"])
    parser.add_argument("--threads", default="1")
    parser.add_argument("--seconds", type=float, default=0.2)
    options = parser.parse_args()
    known = [name for name in ("amx-bf16", "avx512bf16", "avx512fp16", "f16c") if host().has(name)]
    print(f"{host().cpu}: {', '.join(known) or 'no half-precision instructions'}")
    for kind in options.kinds:
        elements = (*ELEMENTS, "u8") if kind == "convolutions" else ELEMENTS
        kinds = peers()
        names = [*elements, *(f"torch {name}" for name in kinds)]
        for threads in map(int, options.threads.split(",")):
            print(f"{kind}, {threads} threads".ljust(26), *(name.rjust(10) for name in names))
            for name, count, ours, peer in globals()[kind]():
                times = [ours_seconds(ours(e), threads, options.seconds) for e in elements]
                if torch is not None:
                    torch.set_num_threads(threads)
                times += [best(peer(each), options.seconds) for each in kinds.values()]
                rates = (f"{count / found * RATES:10.1f}" for found in times)
                print(name.ljust(26), *rates, flush=True)


if __name__ == "__main__":
    main()
