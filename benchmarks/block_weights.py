"""GB/s of products of one row with weights in the blocks of GGUF files, vs. memory bandwidth.

    python benchmarks/block_weights.py [--threads 1,2] [--rows 1] [--depth 2048] [format ...]

The weights of a format are four times the last-level cache, so that every matrix is read from
memory. Bytes are those of the stored blocks; packed panels have as many, or a little more for K
formats. Prints the best of many interleaved runs; the memory's rate is that of a sum over as much.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bitwright.backends.cpu.profile.peaks import memory_reader
from bitwright.ir.graph import Graph
from bitwright.ops.core.builder import Builder
from bitwright.ops.quant.block_formats import FORMATS
from bitwright.ops.quant.block_matmul import random_blocks
from bitwright.pipeline import compile_graph
from bitwright.target import host

ROUNDS = 20


def products(name: str, rows: int, depth: int, columns: int, nbytes: int) -> tuple[Graph, int]:
    """A graph of products that read together at least `nbytes`, and how many they read."""
    form, b, total = FORMATS[name], Builder("products"), 0
    x = b.input("x", f"f32[{rows}, {depth}]")
    elements = 32 if form.is_float else form.elements
    blocks = random_blocks(columns, form=form, blocks=depth // elements)
    while total < nbytes:
        weights = blocks.copy()
        weights[0, -1] = total // blocks.nbytes  # equal constants would be one
        y = b.block_matmul(x, b.constant(weights), format=name)
        b.output(f"y{total}", b.reduce_max(y, axes=[1]))
        total += blocks.nbytes
    return b.build(), total


def runner(graph: Graph, threads: int) -> Callable[[], Any]:
    exe = compile_graph(graph, threads=threads)
    shape = tuple(int(n) for n in graph.inputs[0].shape)  # type: ignore[arg-type]
    x = np.random.default_rng(0).standard_normal(shape, np.float32)
    return lambda: exe.run({"x": x})


def best_seconds(runs: list[Callable[[], Any]]) -> list[float]:
    """The minimum time of each; all take turns."""
    found = [float("inf")] * len(runs)
    for _ in range(ROUNDS):
        for number, run in enumerate(runs):
            begin = time.perf_counter()
            run()
            found[number] = min(found[number], time.perf_counter() - begin)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("formats", nargs="*", default=list(FORMATS))
    parser.add_argument("--threads", default="1")
    for name, value in (("rows", 1), ("depth", 2048), ("columns", 8192)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    sizes = args.rows, args.depth, args.columns, 4 * host().l3_bytes
    for name in args.formats:
        graph, nbytes = products(name, *sizes)
        for threads in map(int, args.threads.split(",")):
            runs = [runner(graph, threads), memory_reader(threads, nbytes)]
            ours, memory = (nbytes / seconds / 1e9 for seconds in best_seconds(runs))
            print(
                f"{name:8} {threads} thread(s)  {ours:6.1f} GB/s  memory {memory:6.1f} GB/s"
                f"  {100 * ours / memory:4.0f}%",
                flush=True,
            )


if __name__ == "__main__":
    main()
