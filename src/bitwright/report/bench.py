"""`bw.bench`: times bitwright and other runtimes on the same model and inputs.

    result = bw.bench("model.onnx", against=("onnxruntime",), threads=(1, 2), sizes={"batch": 8})
    for row in result.rows: print(row.engine, row.threads, row.milliseconds, row.times_best_peer)

Every engine has its own process (`report.bench_worker`). Rounds are interleaved: each engine runs
once per round, one at a time, after a pause in which the previous engine's spinning threads stop.
Load from other processes so affects all engines. Ratios are per round: `times_best_peer` is the
median over rounds of (best peer / this engine), above 1 if this engine is faster. The row of an
engine that is missing or fails has the error.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bitwright import system
from bitwright.errors import BitwrightError
from bitwright.frontend.load import load
from bitwright.ir.feeds import check_sizes
from bitwright.ir.graph import Graph
from bitwright.report.bench_worker import ENGINES
from bitwright.report.feeds import random_inputs, read_inputs

OURS = "bitwright"
PEERS = tuple(name for name in ENGINES if name != OURS)
PAUSE_SECONDS = 0.03


@dataclass
class Row:
    """One engine at one number of threads; unknown figures are None."""

    engine: str
    threads: int
    version: str = ""
    milliseconds: float | None = None
    """The median over rounds."""
    quartiles: tuple[float, float] | None = None
    """The first and third quartile over rounds."""
    times_best_peer: float | None = None
    ready_seconds: float | None = None
    """From the model file to the first result, imports included."""
    memory_bytes: int | None = None
    """Growth of the resident set since before the import of the engine, after warm-up."""
    difference: float | None = None
    """Largest difference from bitwright's outputs, relative to their largest magnitude."""
    error: str = ""
    seconds: list[float] = field(default_factory=list)
    """The time of each round."""


@dataclass
class Bench:
    model: str
    inputs: dict[str, str]
    """Element type and shape by name."""
    rounds: int
    rows: list[Row]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def bench(
    model: Any,
    *,
    against: Iterable[str] = PEERS,
    threads: Sequence[int] | None = None,
    rounds: int = 15,
    sizes: Mapping[str, int] | None = None,
    feeds: Mapping[str, Any] | str | Path | None = None,
    precision: str = "f32",
    target: str = "cpu",
) -> Bench:
    """Time a model (a path or a graph) against other runtimes.

    Without `feeds` (arrays by name, or the path of an .npz or .npy file) inputs are random; free
    sizes are `sizes` or 1. `threads` defaults to the number of cores. `precision` is the policy to
    compile with; peers that accept a precision hint get that of compute ops. With `target`
    "cuda" bitwright runs on the GPU, with inputs and results there; peers run on the CPU.
    """
    engines = _engines(against)
    counts = list(threads or (system.cores(),))
    if rounds < 1 or min(counts) < 1:
        raise BitwrightError("rounds and threads must be at least 1", found=(rounds, counts))
    graph = load(model)
    check_sizes(sizes or {}, (s.name for s in graph.input_symbols), f"graph {graph.name!r}")
    if isinstance(feeds, (str, Path)):
        feeds = read_inputs(feeds, graph)
    given = dict(feeds) if feeds is not None else random_inputs(graph, sizes or {}, seed=0)
    arrays: dict[str, Any] = {name: np.asarray(value) for name, value in given.items()}
    with tempfile.TemporaryDirectory() as folder:
        paths, faults = _files(model, graph, Path(folder), engines)
        np.savez(Path(folder) / "feeds.npz", **arrays)
        rows = [
            row
            for count in counts
            for row in _interleaved(
                engines, (count, precision, target), rounds, Path(folder), paths, faults
            )
        ]
    inputs = {name: f"{a.dtype} {list(a.shape)}" for name, a in arrays.items()}
    return Bench(graph.name, inputs, rounds, rows)


def _engines(against: Iterable[str]) -> list[str]:
    peers = list(dict.fromkeys(against))
    for name in peers:
        if name not in PEERS:
            raise BitwrightError(f"no engine is named {name!r}", expected=", ".join(PEERS))
    return [OURS, *peers]


def _files(
    model: Any, graph: Graph, folder: Path, engines: Sequence[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """The model file per engine, and the reason if there is none: peers read ONNX only."""
    own = str(model)
    if not isinstance(model, (str, Path)):
        own = str(folder / "model.bw")
        graph.save(own)
    if Path(own).suffix == ".onnx":
        return dict.fromkeys(engines, own), {}
    peers = [name for name in engines if name != OURS]
    exported = str(folder / "model.onnx")
    try:
        if peers:
            graph.save(exported)
    except BitwrightError as error:
        return {OURS: own}, dict.fromkeys(peers, f"the model cannot be written as ONNX: {error}")
    return {OURS: own, **dict.fromkeys(peers, exported)}, {}


class _Process:
    """A worker process; if it has died, the answer is an error."""

    def __init__(
        self, engine: str, options: tuple[int, str, str], model: str, folder: Path
    ) -> None:
        threads, precision, target = options
        self.outputs = folder / f"{engine}-{threads}.npz"
        self._log = open(folder / f"{engine}-{threads}.log", "w+")  # noqa: SIM115 (see close)
        command = [sys.executable, "-m", "bitwright.report.bench_worker", engine, model]
        self._process = subprocess.Popen(
            [
                *command,
                str(folder / "feeds.npz"),
                str(self.outputs),
                str(threads),
                precision,
                target,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def ask(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(f"{command}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return {"error": self._exit_message()}
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"error": self._exit_message()}

    def _exit_message(self) -> str:
        status = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return f"the process exited with status {status}" + (f": {lines[-1]}" if lines else "")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()


def _interleaved(
    engines: Sequence[str],
    options: tuple[int, str, str],
    rounds: int,
    folder: Path,
    paths: Mapping[str, str],
    faults: Mapping[str, str],
) -> list[Row]:
    """The rows of one number of threads at one precision, on one target."""
    threads = options[0]
    rows = {name: Row(name, threads, error=faults.get(name, "")) for name in engines}
    live: dict[str, _Process] = {}
    with ExitStack() as stack:
        for name in engines:
            if name not in paths:
                continue
            process = _Process(name, options, paths[name], folder)
            stack.callback(process.close)
            if _record(rows[name], process.ask("start")):
                live[name] = process
        for _ in range(rounds):
            for name, process in list(live.items()):
                time.sleep(PAUSE_SECONDS)
                if not _record(rows[name], process.ask("time")):
                    del live[name]
    _summarize([rows[name] for name in live])
    if OURS in live:
        for name in live.keys() - {OURS}:
            rows[name].difference = _difference(live[OURS].outputs, live[name].outputs)
    return list(rows.values())


def _record(row: Row, answer: Mapping[str, Any]) -> bool:
    """Write a worker's answer into its row; returns whether it is not an error."""
    row.error = answer.get("error", "")
    for name in ("version", "ready_seconds", "memory_bytes"):
        if name in answer:
            setattr(row, name, answer[name])
    if "seconds" in answer:
        row.seconds.append(answer["seconds"])
    return not row.error


def _summarize(rows: Sequence[Row]) -> None:
    for row in rows:
        times = [1e3 * seconds for seconds in row.seconds]
        row.milliseconds = statistics.median(times)
        low, high = np.quantile(times, (0.25, 0.75))
        row.quartiles = float(low), float(high)
        peers = [other.seconds for other in rows if other.engine != OURS and other is not row]
        if peers:
            row.times_best_peer = statistics.median(
                min(theirs) / own for own, *theirs in zip(row.seconds, *peers, strict=True)
            )


def _difference(ours: Path, theirs: Path) -> float | None:
    """The largest relative difference between outputs; None if none can be compared."""
    found: list[float] = []
    with np.load(ours) as a, np.load(theirs) as b:
        for name in set(a.files) & set(b.files):
            x, y = a[name], b[name]
            if x.shape != y.shape:
                found.append(float("inf"))
            elif x.size and x.dtype.kind in "biuf" and y.dtype.kind in "biuf":
                x, y = (np.nan_to_num(side.astype(np.float64)) for side in (x, y))
                found.append(float(np.abs(x - y).max() / (np.abs(x).max() or 1)))
    return max(found, default=None)
