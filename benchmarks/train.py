"""Times and memory of training steps: bitwright beside PyTorch, eager and compiled.

    python benchmarks/train.py [mlp resnet20 transformer lstm] [--threads 1,2] [--rounds 7]

Each side is a process of its own. The sides take turns, a few steps at a time, and the medians of
all steps are compared. A step is forward, backward and optimizer on one batch, from numpy arrays.
`ratio` is the time of the faster PyTorch side divided by ours. `MB` is what training adds: the
largest resident size during steps, less the resident size when only the model and data are there.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from training.recipes import RECIPES, Recipe

WARM_UP = 3
SIDES = ("bitwright", "eager", "compiled")
IMPORTED = (
    "torch._inductor.compile_fx",
    "bitwright.train.trainer",
    "bitwright.backends.cpu.lowering.registered",
)
"""What the sides import when they start, so that no side counts imports."""


def _status(field: str) -> float:
    """A field of the process's status in MB; 0 where the system has no such file."""
    path = Path("/proc/self/status")
    lines = path.read_text().splitlines() if path.exists() else []
    found = [line.split()[1] for line in lines if line.startswith(field)]
    return float(found[0]) / 1024 if found else 0.0


def _reset_peak() -> None:
    path = Path("/proc/self/clear_refs")
    if path.exists():
        path.write_text("5")


def _work(connection: Connection, side: str, name: str, threads: int, precision: str) -> None:
    from training.sides import make_side

    recipe = RECIPES[name]
    batches = _batches(recipe)
    trained = make_side(side, recipe, threads, seed=0, precision=precision)
    for module in IMPORTED:
        importlib.import_module(module)
    before = _status("VmRSS")
    trained.start()
    for batch in batches[:WARM_UP]:
        trained.step(batch, recipe.rate_at(0))
    _reset_peak()
    connection.send(None)
    while count := connection.recv():
        times = []
        for number in range(count):
            start = time.perf_counter()
            trained.step(batches[number % len(batches)], 1e-3)
            times.append(time.perf_counter() - start)
        connection.send((times, _status("VmHWM") - before))


def _batches(recipe: Recipe) -> list[Any]:
    made = recipe.batches(0, 0)
    return [next(made) for _ in range(WARM_UP)]


class _Side:
    def __init__(self, side: str, name: str, threads: int, precision: str) -> None:
        context = get_context("spawn")
        self.connection, other = context.Pipe()
        given = other, side, name, threads, precision
        self.process = context.Process(target=_work, args=given, daemon=True)
        self.process.start()
        other.close()
        self.connection.recv()
        self.times: list[float] = []
        self.memory = 0.0

    def turn(self, steps: int) -> None:
        self.connection.send(steps)
        times, self.memory = self.connection.recv()
        self.times += times

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    def close(self) -> None:
        self.connection.send(0)
        self.process.join()


def compare(name: str, threads: int, rounds: int, seconds: float, given: Any) -> str:
    sides = {side: _Side(side, name, threads, given.precision) for side in given.sides}
    for side in sides.values():
        side.turn(2)
        side.times.clear()
    for _ in range(rounds):
        for side in sides.values():
            side.turn(max(1, round(seconds / statistics.median(side.times or [0.1]))))
    cells = [f"{side} {1e3 * s.median:8.2f} ms {s.memory:6.0f} MB" for side, s in sides.items()]
    for side in sides.values():
        side.close()
    text = f"{name:12} {threads} threads  " + "  ".join(cells)
    peers = [s.median for side, s in sides.items() if side != SIDES[0]]
    if peers and SIDES[0] in sides:
        text += f"  ratio {min(peers) / sides[SIDES[0]].median:.2f}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description="Time training steps beside PyTorch.")
    parser.add_argument("models", nargs="*", default=list(RECIPES))
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each turn")
    parser.add_argument("--sides", type=lambda text: text.split(","), default=SIDES)
    parser.add_argument("--precision", default="f32", choices=["f32", "bf16"])
    given = parser.parse_args()
    print(f"numpy {np.__version__}; medians of {given.rounds} turns of {given.seconds} s")
    for name in given.models:
        for threads in map(int, given.threads.split(",")):
            print(compare(name, threads, given.rounds, given.seconds, given), flush=True)


if __name__ == "__main__":
    main()
