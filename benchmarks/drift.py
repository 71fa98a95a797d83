"""The cost of a monitor (`exe.monitor`): one observed run, and runs with a monitor attached.

    python benchmarks/drift.py [--threads 1] [--runs 2000] [MODEL.onnx DATA ...]

The models are quantized; DATA is a folder of batches that they run on. Without arguments it is the
demo model with batches of 8. Times are of the process (CPU time), so that other processes disturb
them little; plain and monitored rounds alternate, and medians count.

    plain         microseconds of a run without a monitor
    count         microseconds of counting one run
    every=100     count / (100 plain), and the measured difference with the monitor attached
    budget=0.01   the same with the default monitor, and the runs that it observed
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitwright as bw
from bitwright import demo
from bitwright.quant.data.batches import Batches

ROUNDS = 9
HEADER = (
    "model",
    "tensors",
    "plain us",
    "count us",
    "every=100",
    "measured",
    "budget=0.01",
    "runs",
)


def seconds(call: Callable[[], Any], count: int) -> float:
    begin = time.process_time()
    for _ in range(count):
        call()
    return (time.process_time() - begin) / count


def measure(name: str, exe: Any, batch: Any, runs: int) -> tuple[str, ...]:
    run = lambda: exe.run(batch)
    counter = exe.monitor(every=1)
    counter.close()
    seconds(run, 20), seconds(lambda: counter.observe(batch), 20)
    times: dict[str, list[float]] = {"plain": [], "count": []}
    for _ in range(ROUNDS):
        times["plain"].append(seconds(run, 50))
        times["count"].append(seconds(lambda: counter.observe(batch), 50))
    plain, count = (statistics.median(times[key]) for key in times)
    measured, observed = [], 0
    for options in ({"every": 100}, {}):
        monitor = exe.monitor(**options)
        seconds(run, 50)  # a budget is measured on the first runs
        ratios = []
        for _ in range(ROUNDS):
            monitor.close()
            before = seconds(run, max(runs // ROUNDS, 100))
            monitor.attach(exe)
            ratios.append(seconds(run, max(runs // ROUNDS, 100)) / before - 1)
        monitor.close()
        measured.append(statistics.median(ratios))
        observed = monitor.observed
    figures = f"{1e6 * plain:.0f}", f"{1e6 * count:.0f}", f"{count / plain / 100:.2%}"
    budget = f"{measured[1]:.2%}"
    return name, str(len(counter.tensors)), *figures, f"{measured[0]:.2%}", budget, str(observed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="pairs of a quantized model and its data")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=int, default=2000)
    given = parser.parse_args()
    rows = [HEADER]
    if not given.models:
        quantized = bw.quantize(demo.model_path(), demo.calibration(8), threads=given.threads)
        exe = bw.compile(quantized, threads=given.threads)
        rows.append(measure("demo, 8 images", exe, demo.calibration(8)[0], given.runs))
    for model, data in zip(given.models[::2], given.models[1::2], strict=True):
        exe = bw.compile(model, threads=given.threads)
        batch = next(iter(Batches(data, exe.graph)))
        rows.append(measure(Path(model).stem, exe, batch, given.runs))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


if __name__ == "__main__":
    main()
