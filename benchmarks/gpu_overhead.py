"""What a run costs on a GPU besides its kernels: the host's part, copies, the first result.

    python benchmarks/gpu_overhead.py [minilm|bert|resnet50] [--batch 1] [--recipe int8] [--tiny]

Prints the seconds of `compile`, the first and the second run (tuning apart), then microseconds:

    host     of `exe.run`, and of its parts, while the device is busy with earlier runs
    device   of a run, of its CUDA graph alone, and of the graph with a copy before or after it
    latency  from the call to the end of the run, with an idle device

`--tiny` runs small sizes; without a GPU it needs TRITON_INTERPRET=1 and gives no times.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import gpu_models
import torch

import bitwright as bw

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
QUEUED = 12
"""Runs that the host puts in the queue of an idle device; it accepts many more without waiting."""


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def host(call: Callable[[], Any], rounds: int = 20) -> float:
    """Microseconds of a call on the host."""
    times = []
    for _ in range(rounds):
        synchronize()
        begin = time.perf_counter()
        for _ in range(QUEUED):
            call()
        times.append((time.perf_counter() - begin) / QUEUED * 1e6)
    synchronize()
    return statistics.median(times)


def latency(call: Callable[[], Any], rounds: int = 50) -> float:
    """Microseconds from a call to the end of its work."""
    times = []
    for _ in range(rounds):
        synchronize()
        begin = time.perf_counter()
        call()
        synchronize()
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times)


def device(call: Callable[[], Any], rounds: int = 50) -> float:
    """Microseconds on the device; the L2 cache is overwritten before each call."""
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    for begin, end in events:
        flush.zero_()
        begin.record()
        call()
        end.record()
    synchronize()
    return statistics.median(begin.elapsed_time(end) * 1e3 for begin, end in events)


def seconds(call: Callable[[], Any]) -> tuple[Any, float]:
    begin = time.perf_counter()
    found = call()
    synchronize()
    return found, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("model", nargs="?", default="minilm")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--recipe", default="")
    parser.add_argument("--precision", default="mixed_bf16")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    graph, feeds = gpu_models.graph_of(given.model, given.batch, given.recipe, given.tiny)
    tensors = {name: torch.from_numpy(array).to(DEVICE) for name, array in feeds.items()}
    synchronize()
    exe, compiling = seconds(lambda: bw.compile(graph, target="cuda", precision=given.precision))
    engine: Any = exe.engine
    _, first = seconds(lambda: exe.run(tensors))
    _, second = seconds(lambda: exe.run(tensors))
    tuning = engine.kernels.tuner.seconds_spent
    print(
        f"{given.model} {given.batch}: compile {compiling:.2f} s, first run {first - tuning:.2f} s"
    )
    print(f"  tuning {tuning:.2f} s, second run {second:.3f} s")
    exe.run(tensors)
    if not ON_GPU:
        return
    calls: dict[str, Callable[[], Any]] = {"run": lambda: exe.run(tensors)}
    direct = next(iter(engine.direct_runs), None)
    if direct is not None:
        calls |= {
            "graph alone": direct.replay,
            "copies in": lambda: direct.fill([*tensors.values()]),
        }
        calls["copies out"] = direct.results
        calls["copies in, graph"] = lambda: (direct.fill([*tensors.values()]), direct.replay())
    for name, call in calls.items():
        print(f"  {name:18s} host {host(call):7.1f} us   device {device(call):7.1f} us")
    print(f"  {'latency':18s} {latency(calls['run']):7.1f} us")


if __name__ == "__main__":
    main()
