"""Microseconds per kernel of norms, attention, reductions, pooling and indexing on a GPU.

    python benchmarks/gpu_rows.py [--tiny] [--rounds N] [WORD ...]

Runs the cases whose name contains one of the words. A kernel is timed as a CUDA graph of its
launches on several sets of operands, together at least twice the L2 cache, so that data is cold.
`TB/s` counts every operand once; `of copy` is its share of the bandwidth of a large copy, measured
first. Attention has TFLOP/s beside those of torch's scaled_dot_product_attention. `--tiny` runs
small sizes; without a GPU it needs TRITON_INTERPRET=1 and runs every kernel once, untimed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch.nn import functional

import bitwright as bw
from bitwright.ir.dim import evaluate
from bitwright.ir.graph import Graph
from bitwright.lir.schedule import KernelStep

RNG = np.random.default_rng(0)
MAX_COPIES = 16


@dataclass(frozen=True)
class Case:
    name: str
    graph: Graph
    operations: float = 0.0
    peer: Callable[[], Any] | None = None


def feeds_of(graph: Graph) -> dict[str, Any]:
    """Random inputs; indices are below 7."""
    found = {}
    for value in graph.inputs:
        shape, element = value.shape, value.dtype
        if element.is_integer:
            found[value.name] = RNG.integers(0, 7, shape).astype(element.numpy)
        else:
            found[value.name] = RNG.standard_normal(shape, np.float32).astype(element.numpy)
    return found


def case(name: str, make: Callable[[Any], Any], **rest: Any) -> Case:
    b = bw.Builder("case")
    made = make(b)
    results = made if isinstance(made, tuple) else (made,)
    return Case(name, b.build(**{f"y{n}": v for n, v in enumerate(results)}), **rest)


def rows(tiny: bool) -> Iterator[Case]:
    for count, width in ((8192, 384), (4096, 768), (4096, 4096), (1, 1536)):
        yield from rows_of(min(count, 8), min(width, 48)) if tiny else rows_of(count, width)


def rows_of(count: int, width: int) -> Iterator[Case]:
    weights = [np.ones(width, np.float32), np.zeros(width, np.float32)]
    half = [w.astype(ml_dtypes.bfloat16) for w in weights]
    at, given = f"{count}x{width}", f"bf16[{count}, {width}]"

    def norm(b: Any, to: str = "") -> Any:
        x, r = (b.input(n, f"f32[{count}, {width}]") for n in "xr")
        y = b.layer_norm(b.add(x, r), *weights)
        return (y, *b.dynamic_quantize(y, to=to, per_token=True)) if to else y

    yield case(f"residual + layer_norm f32 {at}", norm)
    yield case(f"residual + layer_norm + u8 {at}", lambda b: norm(b, "u8"))
    yield case(f"residual + layer_norm + f8 {at}", lambda b: norm(b, "f8e4m3fn"))
    yield case(f"layer_norm bf16 {at}", lambda b: b.layer_norm(b.input("x", given), *half))
    yield case(f"rms_norm bf16 {at}", lambda b: b.rms_norm(b.input("x", given), half[0]))
    yield case(f"softmax bf16 {at}", lambda b: b.softmax(b.input("x", given)))


def attention(tiny: bool) -> Iterator[Case]:
    for element, batch, heads, kv_heads, queries, keys, features, causal in (
        ("bf16", 1, 12, 12, 128, 128, 32, False),
        ("bf16", 64, 12, 12, 128, 128, 32, False),
        ("bf16", 32, 12, 12, 128, 128, 64, False),
        ("bf16", 4, 16, 16, 4096, 4096, 64, True),
        ("bf16", 4, 16, 16, 4096, 4096, 128, True),
        ("f32", 32, 12, 12, 128, 128, 64, False),
        ("bf16", 1, 12, 2, 1, 1024, 128, False),
        ("bf16", 32, 12, 2, 1, 1024, 128, False),
    ):
        if tiny:
            batch, queries, keys = min(batch, 2), min(queries, 17), min(keys, 33)
        sizes = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
        shapes = [(batch, h, s, features) for h, s in sizes]

        def make(
            b: Any, shapes: Any = shapes, element: str = element, causal: bool = causal
        ) -> Any:
            given = [
                b.input(n, f"{element}[{', '.join(map(str, shape))}]")
                for n, shape in zip("qkv", shapes, strict=True)
            ]
            return b.attention(*given, causal=causal)

        kind = torch.bfloat16 if element == "bf16" else torch.float32

        def peer(shapes: Any = shapes, kind: Any = kind, causal: bool = causal) -> Any:
            q, k, v = (torch.randn(shape, device="cuda", dtype=kind) for shape in shapes)
            return lambda: functional.scaled_dot_product_attention(
                q, k, v, is_causal=causal, enable_gqa=True
            )

        operations = 4.0 * batch * heads * queries * keys * features * (0.5 if causal else 1)
        name = f"attention {element} {batch}x{heads}/{kv_heads} {queries}x{keys}x{features}"
        name += " causal" if causal else ""
        yield case(name, make, operations=operations, peer=peer)


def others(tiny: bool) -> Iterator[Case]:
    n = 2 if tiny else 64
    wide = 32 if tiny else 384
    words = 50 if tiny else 151936
    image = f"f16[{n}, 64, 16, 16]" if tiny else f"f16[{n}, 64, 112, 112]"
    yield case(
        f"mean over tokens bf16 {n}x128x{wide}",
        lambda b: b.reduce_mean(b.input("x", f"bf16[{n}, 128, {wide}]"), axes=(1,)),
    )
    yield case(
        "sum of all f32", lambda b: b.reduce_sum(b.input("x", f"f32[{n * 64}, 1024]"), axes=(0, 1))
    )
    yield case(
        "argmax of a vocabulary", lambda b: b.argmax(b.input("x", f"bf16[1, {words}]"), axis=-1)
    )
    yield case("cumsum f32", lambda b: b.cumsum(b.input("x", f"f32[{n * 16}, 1024]"), axis=1))
    yield case("top_k f32", lambda b: b.top_k(b.input("x", f"f32[{n}, 1000]"), k=5, axis=-1))
    window = {"kernel": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1)}
    yield case("max_pool 3x3 NCHW", lambda b: b.max_pool(b.input("x", image), **window))
    yield case("pixel mean NCHW", lambda b: b.reduce_mean(b.input("x", image), axes=(2, 3)))
    yield case(
        "embedding bf16",
        lambda b: b.gather(
            b.input("t", f"bf16[{words}, {wide}]"), b.input("i", f"i64[{n}, 128]"), axis=0
        ),
    )
    yield case(
        "cache write",
        lambda b: b.tensor_scatter(
            b.input("t", f"bf16[{n}, 2, 64, 128]"),
            b.input("u", f"bf16[{n}, 2, 1, 128]"),
            b.input("i", f"i64[{n}]"),
            axis=2,
        ),
    )
    tables = [b"c", b"s"]
    yield case(
        "rotary bf16",
        lambda b: b.rotary(
            b.input("x", f"bf16[{n}, 12, 128, 64]"),
            *(b.input(t.decode(), "bf16[128, 32]") for t in tables),
        ),
    )
    yield case(
        "resize linear f32",
        lambda b: b.resize(
            b.input("x", f"f32[{n}, 8, 28, 28]"), mode="linear", sizes=(n, 8, 56, 56)
        ),
    )


def bytes_of(step: KernelStep, bindings: dict[str, int]) -> float:
    """Every operand once; a repeated axis counts once."""
    total = 0.0
    for view in step.pointers.values():
        count = 1
        for size, stride in zip(view.shape, view.strides, strict=True):
            count *= evaluate(size, bindings) if evaluate(stride, bindings) else 1
        total += count * view.dtype.numpy.itemsize
    return total


def collected(engine: Any, feeds: dict[str, Any]) -> tuple[list[tuple[Any, Any]], dict[str, int]]:
    """The steps of a run and the functions that launch them again."""
    found: list[tuple[Any, Any]] = []

    def around(step: Any, call: Callable[[], None]) -> None:
        found.append((step, call))
        call()

    engine.run_steps(feeds, around)  # a first run chooses and compiles kernels
    return found, engine.run_steps(feeds, around)


def graph_time(calls: list[Callable[[], Any]], rounds: int) -> float:
    """Microseconds of one call, as the median of replays of a CUDA graph of all calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times[2:])


def copy_bandwidth(rounds: int) -> float:
    """Bytes per microsecond of a large copy, read and written."""
    x = torch.randn(1 << 28, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.numel() * 4 / graph_time([lambda: y.copy_(x)], rounds)


def measure(one: Case, rounds: int, bandwidth: float) -> None:
    exe = bw.compile(one.graph, target="cuda")
    missing = [f"{s.op.op}: {s.why}" for s in exe.engine.fallbacks]  # type: ignore[attr-defined]
    if missing:
        print(f"{one.name:48s} on the CPU: {missing}")
        return
    feeds, on_gpu = feeds_of(one.graph), torch.cuda.is_available()
    if not on_gpu:
        steps, _ = collected(exe.engine, feeds)
        print(f"{one.name:48s} {len(steps)} kernels ran")
        return
    steps, bindings = collected(exe.engine, feeds)
    moved = sum(bytes_of(step, bindings) for step, _ in steps)
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    copies = max(2, min(MAX_COPIES, int(2 * cache // max(moved, 1)) + 1))
    engines = [exe.engine, *(exe.engine.copy() for _ in range(copies - 1))]
    sets = [collected(engine, feeds)[0] for engine in engines]
    total = 0.0
    for number, (step, _) in enumerate(steps):
        taken = graph_time([calls[number][1] for calls in sets], rounds)
        total += taken
        if len(steps) > 1:
            rate = bytes_of(step, bindings) / taken
            print(f"    {step.kernel[:44]:44s} {taken:9.2f} us {rate / 1e6:6.2f} TB/s")
    rate = moved / total
    line = f"{one.name:48s} {total:9.2f} us {rate / 1e6:6.2f} TB/s {rate / bandwidth:6.0%} of copy"
    if one.operations:
        line += f" {one.operations / total / 1e6:7.1f} TFLOP/s"
    if one.peer is not None:
        theirs = graph_time([one.peer() for _ in range(copies)], rounds)
        line += f"   torch {theirs:8.2f} us, {theirs / total:.2f}x"
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("words", nargs="*")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args()
    bandwidth = 1.0
    if torch.cuda.is_available():
        bandwidth = copy_bandwidth(given.rounds)
        print(f"copy of 1 GiB: {bandwidth / 1e6:.2f} TB/s")
    for family in (rows, attention, others):
        for one in family(given.tiny):
            if not given.words or any(word in one.name for word in given.words):
                try:
                    measure(one, given.rounds, bandwidth)
                except Exception as error:  # the other cases go on
                    print(f"{one.name:48s} {type(error).__name__}: {str(error)[:300]}", flush=True)


if __name__ == "__main__":
    main()
