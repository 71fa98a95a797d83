"""Weight bytes, activation bytes and time of a model in each precision.

    python benchmarks/precision.py model.onnx [--size batch=1 seq=128] [--threads 1,2]

Weights are counted as packed. Inputs are random; times are medians of interleaved runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import bitwright as bw
from bitwright.lir.buffer import Storage
from bitwright.lir.plan import plan
from bitwright.ops.core.interpret import bind_input
from bitwright.report.feeds import random_inputs

POLICIES = ("f32", "mixed_bf16", "f16")
ROUNDS = 30


def sizes_of(exe: Any, feeds: dict[str, Any]) -> tuple[int, int]:
    """Bytes of the constants and of the planned arena."""
    bindings: dict[str, int] = {}
    for value in exe.interface.inputs:
        bind_input(value, feeds[value.name], bindings)
    schedule = exe.engine.schedule
    held = [b.array.nbytes for b in schedule.buffers if b.storage is Storage.CONSTANT]
    return sum(held), plan(schedule, bindings).total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--size", nargs="*", default=[], metavar="NAME=N")
    parser.add_argument("--threads", default="1")
    options = parser.parse_args()
    graph = bw.load(options.model)
    sizes = {name: int(count) for name, count in (word.split("=") for word in options.size)}
    feeds = random_inputs(graph, sizes, seed=0)
    counts = [int(count) for count in options.threads.split(",")]
    print("precision".ljust(12), "weights MB".rjust(11), "arena MB".rjust(11), "of f32".rjust(7))
    arena = 0
    for policy in POLICIES:
        weights, total = sizes_of(bw.compile(graph, precision=policy), feeds)
        arena = arena or total
        numbers = f"{weights / 1e6:11.2f} {total / 1e6:11.2f} {total / max(arena, 1):7.3f}"
        print(policy.ljust(12), numbers)
    for threads in counts:
        made = {p: bw.compile(graph, precision=p, threads=threads) for p in POLICIES}
        times: dict[str, list[float]] = {policy: [] for policy in POLICIES}
        for _ in range(ROUNDS):
            for policy, exe in made.items():
                exe.run(feeds)
                begin = time.perf_counter()
                exe.run(feeds)
                times[policy].append(time.perf_counter() - begin)
        words = [f"{p} {statistics.median(times[p]) * 1e3:.3f}" for p in POLICIES]
        print(f"{threads} threads, ms:", ", ".join(words))


if __name__ == "__main__":
    main()
