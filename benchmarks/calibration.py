"""Time and memory of calibration for a transformer of MiniLM's size, or a given model.

    python benchmarks/calibration.py --batches 32,320,3200
    python benchmarks/calibration.py --batches 32,320,3200 --quantize
    python benchmarks/calibration.py --model model.onnx --data folder

Memory is the growth of the process since before the first batch: observed values, statistics, the
compiled model. It must not grow with the number of batches. --quantize runs the calibration of
`bw.quantize`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np

import bitwright as bw
from bitwright import system
from bitwright.passes.manager import run_passes
from bitwright.pipeline import INFERENCE
from bitwright.quant import Batches, Calibrator
from bitwright.quant.calibration.blas import products_on_one_thread
from bitwright.quant.calibration.observed import observed_values
from bitwright.quant.calibration.stats import StatsBuilder
from bitwright.quant.model.points import find_points

Array = np.ndarray[Any, Any]


def encoder(layers: int = 6, width: int = 384, inner: int = 1536, heads: int = 12) -> bw.Graph:
    """Attention and feed-forward blocks with layer norms and random weights."""
    rng = np.random.default_rng(0)
    b = bw.Builder("encoder")
    x = b.input("x", f"f32[batch, tokens, {width}]")

    def linear(x: Any, columns: int, name: str) -> Any:
        rows = x.shape[-1]
        weight = rng.normal(size=(rows, columns)).astype(np.float32) / np.sqrt(np.float32(rows))
        return b.matmul(x, b.parameter(name, weight))

    def norm(x: Any, name: str) -> Any:
        ones = b.parameter(f"{name}.scale", np.ones(width, np.float32))
        zeros = b.parameter(f"{name}.bias", np.zeros(width, np.float32))
        return b.layer_norm(x, ones, zeros, name=name)

    def split_heads(x: Any) -> Any:
        parts = b.reshape(x, shape=[*x.shape[:2], heads, width // heads])
        return b.transpose(parts, perm=[0, 2, 1, 3])

    for layer in range(layers):
        q, k, v = (split_heads(linear(x, width, f"{part}{layer}")) for part in "qkv")
        attended = b.transpose(b.attention(q, k, v), perm=[0, 2, 1, 3])
        joined = b.reshape(attended, shape=list(x.shape))
        x = norm(b.add(x, linear(joined, width, f"o{layer}")), f"norm{layer}")
        hidden = b.gelu(linear(x, inner, f"up{layer}"))
        x = norm(b.add(x, linear(hidden, width, f"down{layer}")), f"ffn_norm{layer}")
    return b.build(hidden=x)


def random_batches(count: int, tokens: int = 128, width: int = 384) -> Iterator[dict[str, Array]]:
    rng = np.random.default_rng(1)
    for _ in range(count):
        yield {"x": rng.normal(size=(1, tokens, width)).astype(np.float32)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", default="32,320", help="numbers of batches at which to print")
    parser.add_argument("--model", help="a model file instead of the transformer")
    parser.add_argument("--data", help="folder of .npz or .npy files for the model")
    parser.add_argument("--quantize", action="store_true", help="the calibration of bw.quantize")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    if bool(args.model) != bool(args.data):
        parser.error("--model needs --data, and --data needs --model")
    begin = time.perf_counter()
    graph = run_passes(bw.load(args.model) if args.model else encoder(), INFERENCE)
    stops = [int(stop) for stop in args.batches.split(",")]
    data: Any = args.data or random_batches(max(stops))
    steps: Calibrator | StatsBuilder
    if args.quantize:
        steps = StatsBuilder(graph, find_points(graph), count=max(stops), threads=args.threads)
        count = len(steps.points)
    else:
        names, _ = observed_values(graph)
        steps = Calibrator(graph, names, threads=args.threads, simplify=False)
        count = len(names)
    held = system.resident_bytes() or 0
    print(f"{count} values; prepared in {time.perf_counter() - begin:.2f} s")
    begin, number = time.perf_counter(), 0
    with products_on_one_thread() if args.quantize else nullcontext():
        for number, batch in enumerate(Batches(data, graph), 1):
            steps.step(batch)
            if number in stops:
                _show(number, steps, held, time.perf_counter() - begin)
    if number not in stops:
        _show(number, steps, held, time.perf_counter() - begin)


def _show(number: int, steps: Calibrator | StatsBuilder, held: int, seconds: float) -> None:
    more = ((system.resident_bytes() or 0) - held) / 1e6
    print(
        f"{number:6} batches {seconds:8.2f} s {seconds / number * 1e3:8.2f} ms each "
        f"{more:8.1f} MB more, {_nbytes(steps) / 1e6:.1f} MB of it statistics",
        flush=True,
    )


def _nbytes(steps: Calibrator | StatsBuilder) -> int:
    if isinstance(steps, Calibrator):
        return steps.ranges.nbytes
    samples = [s for stats in steps.stats.values() for s in stats.samples.values()]
    held = ((s.first, s.gram, s.total, *s.rows, *s.waiting) for s in samples)
    return sum(int(array.nbytes) for arrays in held for array in arrays)


if __name__ == "__main__":
    main()
