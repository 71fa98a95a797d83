"""Integer products and convolutions on the GPU against the CPU's bits.

    python benchmarks/gpu_exact.py 1000                       as many processes as there are cores
    python benchmarks/gpu_exact.py 40 --processes 1 --tiny    small sizes, for the interpreter

A case is a random layer at one size: a product of i8 or u8 with i8 or u8 (constant or given at run
time, one matrix or several), or a convolution (groups, strides, pads, dilations, one or two axes);
zero points that are absent, constant or given; bias; the sums themselves or scales, activation,
residual and a requantization behind them. Every kernel runs in a random form and with a random one
of its candidates, not only in those that would be chosen. A case that differs is printed with its
first wrong element.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import bitwright as bw
from bitwright.backends.gpu.codegen.source import Config, KernelSource
from bitwright.backends.gpu.kernels.matmul import tiles
from bitwright.backends.gpu.lowering.context import Machine
from bitwright.backends.gpu.runtime.tuning import Tuner

Array = np.ndarray[Any, Any]
PER_GRAPH = 8
"""Sizes that one graph runs at."""
PRELOADED = (
    "torch",
    "triton",
    "triton.compiler",
    "triton.tools.tensor_descriptor",
    "bitwright.backends.gpu.lowering.build",
    "bitwright.backends.gpu.passes",
    "bitwright.backends.cpu.lowering.build",
    "bitwright.backends.cpu.backend",
)


class Draw:
    """A random case."""

    def __init__(self, seed: int, is_tiny: bool) -> None:
        self.rng, self.is_tiny = np.random.default_rng(seed), is_tiny
        self.b = bw.Builder(f"exact{seed}")
        self.x_type, self.w_type = self.one("i8", "u8"), self.one("i8", "i8", "u8")
        self.words = [self.x_type, self.w_type]
        self.shapes: dict[str, list[Any]] = {}
        """Types and sizes of the inputs; a text is the name of a size that varies."""

    def one(self, *items: Any) -> Any:
        return items[int(self.rng.integers(len(items)))]

    def size(self, highest: int) -> int:
        """A size, in half of the cases a multiple of 16."""
        found = int(self.rng.integers(1, (highest // 6 if self.is_tiny else highest) + 1))
        return self.one(found, -(-found // 16) * 16)

    def values(self, element: str, *shape: int) -> Array:
        if element == "f32":
            return self.rng.standard_normal(shape, np.float32)
        limits = np.iinfo({"i8": np.int8, "u8": np.uint8, "i32": np.int32}[element])
        low, high = (-9999, 9999) if element == "i32" else (limits.min, limits.max)
        return self.rng.integers(low, high + 1, shape).astype(limits.dtype)

    def given(self, name: str, element: str, *shape: Any) -> Any:
        self.shapes[name] = [element, *shape]
        return self.b.input(name, f"{element}[{', '.join(map(str, shape))}]")

    def constant(self, element: str, *shape: int) -> Any:
        return self.b.constant(self.values(element, *shape))

    def graph(self) -> bw.Graph:
        return self.b.build(y=self.layer(self.one(True, False)))

    def layer(self, is_conv: bool) -> Any:
        sums, columns, rank = self.conv() if is_conv else self.product()
        if self.one(True, False):
            self.words.append("sums")
            return sums
        per_column = (columns, *(1,) * (rank - 2)) if is_conv else (columns,)
        scale = np.abs(self.values("f32", *per_column)) * np.float32(1e-3) + np.float32(1e-4)
        y = self.b.mul(self.b.cast(sums, to="f32"), self.b.constant(scale))
        if self.one(True, False):
            y = self.b.relu(self.b.add(y, self.constant("f32", *per_column)))
        if not is_conv and self.one(True, False):
            self.words.append("residual")
            y = self.b.add(y, self.given("residual", "f32", *sums.shape))
        to = self.one("i8", "u8")
        self.words.append(f"to {to}")
        zero = self.constant(to) if self.one(True, False) else None
        return self.b.requantize(self.b.mul(y, np.float32(9)), zero, to=to)

    def product(self) -> tuple[Any, int, int]:
        columns, depth = self.size(300), self.one(self.size(300), self.size(300), self.size(3000))
        is_plain = self.one(True, False)  # what TMA loads
        batch = () if is_plain else self.one((), (), (3,))
        if is_plain:
            depth, self.w_type = -(-depth // 16) * 16, "i8"
        rows = "rows"
        x = self.given("x", self.x_type, *batch, rows, depth)
        w_batch = self.one((), batch)
        is_constant = is_plain or (not w_batch and self.one(True, True, False))
        if is_constant:
            w = self.constant(self.w_type, depth, columns)
        else:
            w = self.given("w", self.w_type, *w_batch, depth, columns)
        x_zero = self.zero("x_zero", self.x_type, (*batch, rows, 1))
        w_zero = None if is_plain else self.zero("w_zero", self.w_type, (columns,))
        bias = self.constant("i32", columns) if self.one(True, False) else None
        self.words.append(
            f"product {list(batch)} of {depth}x{columns}{'' if is_constant else ' given'}"
        )
        return self.b.integer_matmul(x, w, x_zero, w_zero, bias), columns, len(batch) + 2

    def zero(self, name: str, element: str, shape: tuple[Any, ...]) -> Any:
        kinds = ("constant", "given", "given along an axis")
        kind = self.one("no", self.one(*kinds), self.one(*kinds))
        self.words.append(f"{name} {kind}")
        if kind == "no":
            return None
        if kind == "constant":
            return self.constant(element, *(shape if name == "w_zero" else ()))
        return self.given(name, element, *(shape if "axis" in kind else ()))

    def conv(self) -> tuple[Any, int, int]:
        axes = self.one(1, 2, 2)
        groups, per_group = (
            self.one(1, 1, 2, 5),
            self.one(self.size(70), self.size(70), 32, 64, 128, 3),
        )
        filters = groups * self.size(70)
        if is_depthwise := self.one(True, False, False):
            groups, per_group = self.size(70), 1
            filters = groups * self.one(1, 2)
        taps = [int(v) for v in self.rng.integers(1, 4, axes)]
        w = self.constant(self.w_type, filters, per_group, *taps)
        sizes = self.one(("h", "w"), ("h", "w"), (24, 18))
        x = self.given("x", self.x_type, "batch", groups * per_group, *sizes[:axes])
        attrs = {
            "strides": tuple(int(v) for v in self.rng.integers(1, 4, axes)),
            "dilations": tuple(int(v) for v in self.rng.integers(1, 3, axes)),
            "pads": tuple(int(v) for v in self.rng.integers(0, 3, 2 * axes)),
            "groups": groups,
        }
        x_zero = self.constant(self.x_type) if self.one(True, True, False) else None
        w_zero = self.one(None, self.constant(self.w_type))
        if w_zero is None and self.w_type == "u8":
            w_zero = self.b.constant(np.array(128, np.uint8))
        bias = self.constant("i32", filters) if self.one(True, False) else None
        kind = "depthwise" if is_depthwise else f"{groups} groups"
        self.words.append(f"conv {kind} {filters}x{per_group}x{taps} {attrs}")
        return self.b.integer_conv(x, w, x_zero, w_zero, bias, **attrs), filters, axes + 2

    def feeds(self) -> dict[str, Array]:
        """Arrays for the inputs, with new values of the sizes that vary."""
        widest = 40 if self.is_tiny else 700
        free = {"rows": self.one(1, self.size(64), self.size(widest)), "batch": self.one(1, 2, 3)}
        free |= {name: int(self.rng.integers(5, 12 if self.is_tiny else 40)) for name in ("h", "w")}
        found = {}
        for name, (element, *shape) in self.shapes.items():
            found[name] = self.values(element, *(free.get(str(n), n) for n in shape))
        return found


def run_graph(seed: int, count: int, is_tiny: bool) -> list[dict[str, Any]]:
    """The cases of one graph: what differs, or what failed."""
    try:
        draw = Draw(seed, is_tiny)
        graph = draw.graph()
        takes_tma = draw.one(True, False)
        with mock.patch.object(tiles, "prefers_tma", lambda *_: takes_tma):
            on_gpu = bw.compile(graph, target="cuda")
        on_cpu = bw.compile(graph, threads=1)
        choice = RandomChoice(on_gpu.engine.device.machine, draw.rng)
        on_gpu.engine.kernels.tuner = choice
    except Exception as error:
        return [{"seed": seed, "failed": f"{type(error).__name__}: {error}"[:300]}] * count
    rows = []
    for _ in range(count):
        feeds = draw.feeds()
        row: dict[str, Any] = {
            "seed": seed,
            "case": ", ".join(draw.words),
            "sizes": {name: array.shape for name, array in feeds.items()},
        }
        try:
            row |= difference(on_gpu.run(feeds)["y"], on_cpu.run(feeds)["y"])
            schedule = on_gpu.engine.artifact.schedule.steps
            row["kernels"] = [getattr(s, "kernel", "fallback").rpartition("_")[0] for s in schedule]
            row["fallbacks"] = [step.why for step in on_gpu.engine.fallbacks]
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {error}"[:300]
        if "wrong" in row or "failed" in row:
            row["candidates"] = [config.name for config in choice.picked.values()]
        rows.append(row)
    return rows


def difference(got: Array, want: Array) -> dict[str, Any]:
    """Nothing if two arrays are the same, else the first element that differs."""
    if got.dtype != want.dtype or got.shape != want.shape:
        return {"wrong": f"{got.dtype}{got.shape}, expected {want.dtype}{want.shape}"}
    places = np.argwhere(got != want)
    if not len(places):
        return {}
    at = tuple(int(v) for v in places[0])
    where = f"{list(at)} is {got[at]}, expected {want[at]}"
    return {"wrong": f"{len(places)} of {got.size} elements; {where}"}


class RandomChoice(Tuner):
    """Gives every kernel a random candidate, the same one at all sizes."""

    def __init__(self, machine: Machine, rng: np.random.Generator) -> None:
        super().__init__(machine)
        self._rng, self.picked = rng, dict[str, Config]()

    def candidates(self, source: KernelSource, sizes: Mapping[str, int]) -> list[Config]:
        known = self.picked
        if source.name not in known:
            known[source.name] = source.configs[int(self._rng.integers(len(source.configs)))]
        return [known[source.name]]

    def choose(self, source: KernelSource, *rest: Any) -> Config:
        return self.candidates(source, {})[0]

    def save(self) -> None:
        pass


def _start_worker(folder: str) -> None:
    os.environ["BITWRIGHT_CACHE"] = tempfile.mkdtemp(dir=folder)
    os.environ["BITWRIGHT_TUNED"] = "on"
    import warnings

    warnings.simplefilter("ignore")


def check(options: argparse.Namespace) -> int:
    """How many cases differ or failed; -1 if not all ran."""
    left, tasks, begin = options.count, [], time.perf_counter()
    while left > 0:
        tasks.append((options.seed + len(tasks), min(options.per_graph, left)))
        left -= tasks[-1][1]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for task, found in _results(tasks, options, folder):
            rows += found
            for row in found:
                if "wrong" in row or "failed" in row:
                    print(json.dumps(row, default=str), flush=True)
            if time.perf_counter() - begin > options.seconds:
                print(f"time is up at case {len(rows)} (seed {task[0]})", flush=True)
                break
    return report(rows, options.count, time.perf_counter() - begin)


def _results(tasks: list[tuple[int, int]], options: argparse.Namespace, folder: str) -> Any:
    if options.processes == 1:
        _start_worker(folder)
        for task in tasks:
            yield task, run_graph(*task, options.tiny)
        return
    for name in PRELOADED:  # the workers, which are forks, need not import it
        importlib.import_module(name)
    context = get_context("fork")
    pool = ProcessPoolExecutor(options.processes, context, _start_worker, (folder,))
    try:
        waiting = {pool.submit(run_graph, *task, options.tiny): task for task in tasks}
        for done in as_completed(waiting):
            yield waiting[done], done.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def report(rows: list[Mapping[str, Any]], count: int, seconds: float) -> int:
    wrong = sum("wrong" in row or "failed" in row for row in rows)
    families: dict[str, int] = {}
    for row in rows:
        for name in row.get("kernels", ()):
            families[name] = families.get(name, 0) + 1
    print("kernels: " + ", ".join(f"{k} {v}" for k, v in sorted(families.items())))
    reasons: dict[str, int] = {}
    for row in rows:
        for why in row.get("fallbacks", ()):
            key = why.partition(";")[0]
            reasons[key] = reasons.get(key, 0) + 1
    for why, cases in reasons.items():
        print(f"on the CPU in {cases} cases: {why}")
    print(f"{wrong} of {len(rows)} differ from the CPU ({seconds:.0f} s)", flush=True)
    return wrong if len(rows) == count else -1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("count", type=int, nargs="?", default=1000)
    parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, 16))
    parser.add_argument("--per-graph", type=int, default=PER_GRAPH, help="sizes per graph")
    parser.add_argument("--seconds", type=float, default=600, help="stop after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="small sizes")
    parser.add_argument("--json", type=Path, help="write how many differ")
    options = parser.parse_args()
    wrong = check(options)
    if options.json:
        options.json.write_text(json.dumps({"cases": options.count, "wrong": wrong}))
    return 0 if wrong == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
