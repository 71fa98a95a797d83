"""Speedup of a model with threads, vs. ONNX Runtime and OpenVINO if installed.

    python benchmarks/thread_scaling.py MODEL.onnx [--batch 32] [--threads 1,2,4,8,16]
        [--size seq=128] [--rounds 7] [--json OUT]

The batch is the first free size of the first input. All engines run interleaved at every number of
threads, each in its own process (`bitwright bench`). Prints medians, and the speedup of each engine
over its smallest number of threads. Thread counts above the number of cores are left out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import bitwright as bw
from bitwright import system
from bitwright.errors import BitwrightError
from bitwright.ir.graph import Graph
from bitwright.report.bench import Bench, Row, bench


def batch_name(graph: Graph) -> str:
    """The name of the first free size of the first input."""
    for value in graph.inputs:
        for size in value.tensor.shape[:1]:
            if not isinstance(size, int):
                return str(size)
    raise BitwrightError("the model's batch size is fixed", found=graph.inputs)


def measure(options: argparse.Namespace) -> Bench:
    graph = bw.load(options.model)
    sizes = dict(item.split("=") for item in options.size)
    sizes = {name: int(number) for name, number in sizes.items()}
    counts = [int(text) for text in options.threads.split(",")]
    return bench(
        options.model,
        threads=[count for count in counts if count <= system.cores()],
        rounds=options.rounds,
        sizes={batch_name(graph): options.batch, **sizes},
    )


def lines(result: Bench) -> list[str]:
    inputs = ", ".join(f"{name}: {what}" for name, what in result.inputs.items())
    text = [f"{result.model} ({inputs}), medians of {result.rounds} rounds"]
    text += [f"{'threads':>7}  {'engine':12} {'ms':>9} {'quartiles':>19} {'gain':>6} {'x peer':>6}"]
    first: dict[str, float] = {}
    for row in result.rows:
        text.append(f"{row.threads:7}  {row.engine:12} {cells(row, first)}")
    return text


def cells(row: Row, first: dict[str, float]) -> str:
    if row.milliseconds is None or row.quartiles is None:
        return row.error
    gain = first.setdefault(row.engine, row.milliseconds) / row.milliseconds
    spread = f"{row.quartiles[0]:.2f} - {row.quartiles[1]:.2f}"
    peer = "" if row.times_best_peer is None else f"{row.times_best_peer:.2f}"
    return f"{row.milliseconds:9.2f} {spread:>19} {gain:6.2f} {peer:>6}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", default="1,2,4,8,16")
    parser.add_argument("--size", action="append", default=[], help="NAME=NUMBER of a free size")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", help="file for all figures")
    options = parser.parse_args()
    result = measure(options)
    print("\n".join(lines(result)))
    if options.json:
        Path(options.json).write_text(json.dumps(result.as_json(), indent=1) + "\n")


if __name__ == "__main__":
    main()
