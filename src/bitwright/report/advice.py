"""`bw.advise`: precision, threads and batch size for a model on this machine, each measured.

    print(bw.advise("model.onnx", data="calibration/"))

The model is compiled in f32, in int8 and, where the machine multiplies it, in bf16. All of them are
timed with the same inputs, interleaved, at several numbers of threads and batch sizes. With data,
`bw.quantize` makes the int8 model, and errors are measured on the last batch, which is held out.
Without data, inputs are random: the int8 model is then a stand-in with the same structure, and only
its times have a meaning.

The budget limits the time: what was not measured within it is left out, and the advice says so. A
compilation that has begun is finished. Quantization gets a part of the budget; beyond it, it is
replaced by a quick one.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from bitwright import system
from bitwright.backends.cpu.backend import BACKEND
from bitwright.backends.cpu.runtime.program import Program
from bitwright.errors import BitwrightError, RunError
from bitwright.executable import Executable
from bitwright.frontend.load import load
from bitwright.ir.feeds import check_sizes
from bitwright.ir.graph import Graph
from bitwright.machine.facts import hardware
from bitwright.machine.memory import arena_bytes, constant_bytes
from bitwright.machine.preferences import thread_counts
from bitwright.machine.timing import LEAST_CALLS, Timing, time_sides
from bitwright.pipeline import compile_graph
from bitwright.quant.calibration.time_limit import OutOfTimeError, time_limit
from bitwright.quant.core.measure import quality
from bitwright.quant.data.batches import Batches
from bitwright.quant.model.quantize import Quantized, quantize
from bitwright.report.batch_axis import (
    Feeds,
    batch_symbol,
    bound_sizes,
    samples_in,
    with_batch,
)
from bitwright.report.feeds import random_inputs
from bitwright.report.profile import QUANTIZED_OPS
from bitwright.warn import DataWarning

BATCHES = (1, 4, 16)
_MOST_BATCHES, _RANDOM_BATCHES = 32, 4
_FASTER, _THREAD_SLACK, _BATCH_SHARE = 1.05, 1.05, 0.9
_BUSY = 1.5
"""Times whose quartiles differ by this factor are called unsteady."""
_QUANTIZE_SHARE = 0.5
"""The most of the remaining budget for quantization."""
_GROUP_SECONDS = 1.5
"""The most measuring time of one number of threads and one batch size."""


@dataclass(frozen=True)
class AdviceRow:
    """One precision at one number of threads and one batch size."""

    precision: str
    threads: int
    batch: int
    milliseconds: float
    quartiles: tuple[float, float]
    times_f32: float
    """The speed, relative to f32 with the same threads and batch."""
    samples_per_second: float
    memory_bytes: int
    """Of weights, constants and intermediate values."""


@dataclass
class Advice:
    model: str
    sizes: dict[str, int]
    batch_name: str
    """The symbolic size that is the batch; empty if the batch is fixed."""
    measured_on: str
    """What the inputs are."""
    precision: str = "f32"
    threads: int = 1
    batch: int = 1
    milliseconds: float = math.nan
    memory_bytes: int = 0
    sqnr_db: dict[str, float] = field(default_factory=dict)
    """The smallest SQNR of an output by precision, where data was given."""
    rows: list[AdviceRow] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)
    """The measured reasons."""

    def as_json(self) -> dict[str, Any]:
        found = asdict(self)
        found["sqnr_db"] = {k: v if math.isfinite(v) else None for k, v in self.sqnr_db.items()}
        return found

    def __str__(self) -> str:
        lines = [
            f"{row.precision:5} {row.threads:3} threads  batch {row.batch:3}  "
            f"{row.milliseconds:9.3f} ms ({row.quartiles[0]:.3f}-{row.quartiles[1]:.3f})  "
            f"{row.times_f32:5.2f} times f32  {row.samples_per_second:9.1f}/s  "
            f"{row.memory_bytes / 1e6:8.2f} MB"
            for row in self.rows
        ]
        return "\n".join([*lines, *self.sentences])


def advise(
    model: Any,
    data: Any = None,
    *,
    sizes: Mapping[str, int] | None = None,
    threads: Sequence[int] | None = None,
    batches: Sequence[int] = BATCHES,
    budget: float = 60.0,
    min_sqnr_db: float = 20.0,
) -> Advice:
    """Advice for a model (what `bw.load` accepts) on this machine, within `budget` seconds.

    `data` is what `bw.quantize` accepts. Without it, inputs are random, with `sizes` for symbolic
    dimensions (default 1). `threads` defaults to 1, 2, 4 and so on to the number of cores. A
    precision is advised only if its outputs on the data reach `min_sqnr_db`.
    """
    if budget <= 0 or (threads is not None and (not threads or min(threads) < 1)):
        raise BitwrightError("budget and threads must be positive", found=(budget, threads))
    if not batches or min(batches) < 1:
        raise BitwrightError("batch sizes must be at least 1", found=list(batches))
    study = _Study(load(model), data, sizes or {}, time.perf_counter() + budget)
    study.build()
    study.measure(list(threads or thread_counts(system.cores())), batches)
    study.conclude(min_sqnr_db)
    return study.advice


class _Study:
    """What is compiled and measured for one advice."""

    def __init__(self, graph: Graph, data: Any, sizes: Mapping[str, int], stop: float) -> None:
        check_sizes(sizes, (s.name for s in graph.input_symbols), f"graph {graph.name!r}")
        self.graph, self.stop = graph, stop
        self.samples: list[Feeds] = []
        if data is not None:
            self.samples = list(Batches(data, graph, subset=_MOST_BATCHES))
        self.has_data = bool(self.samples)
        if not self.samples:
            self.samples = [random_inputs(graph, sizes, seed=n) for n in range(_RANDOM_BATCHES)]
        self.feeds = self.samples[-1]
        self.calibration = self.samples[:-1] or self.samples
        measured_on = f"{len(self.samples)} batches of data" if self.has_data else "random inputs"
        bound = bound_sizes(graph, self.feeds)
        self.advice = Advice(graph.name, bound, batch_symbol(graph), measured_on)
        self.built: dict[str, Executable] = {}
        others = [f"{name}={size}" for name, size in bound.items() if name not in sizes]
        others = [text for text in others if not text.startswith(f"{self.advice.batch_name}=")]
        if others and not self.has_data:
            self.say(f"measured at {', '.join(others)}: give data or sizes for other lengths")

    @property
    def is_over(self) -> bool:
        return time.perf_counter() >= self.stop

    def say(self, sentence: str) -> None:
        self.advice.sentences.append(sentence)

    def build(self) -> None:
        """Compile every precision that makes sense here and has time."""
        self.built["f32"] = compile_graph(self.graph, precision="f32")
        try:
            self.built["f32"].run(self.feeds)
        except BitwrightError as error:
            if self.has_data:
                raise
            raise RunError(
                f"the model does not run on random inputs: {error}",
                hint="Give data, or sizes for the symbolic dimensions.",
            ) from None
        half = hardware(measure=False).accelerated("bf16")
        if half:
            self._add("bf16", lambda: compile_graph(self.graph, precision="mixed_bf16"))
        else:
            self.say(f"bf16 is not accelerated here: {half.reason}")
        if any(node.op in QUANTIZED_OPS for _, node in self.graph.walk()):
            self.say("the model is quantized already: f32 stands for the model as it is")
        else:
            self._add("int8", self._int8)

    def _add(self, name: str, build: Any) -> None:
        if self.is_over:
            return self.say(f"{name} was not measured: the budget was used up")
        try:
            exe = build()
            if exe is None:
                return None
            found = exe.run(self.feeds)
        except BitwrightError as error:
            return self.say(f"{name} was not measured: {str(error).splitlines()[0]}")
        self.built[name] = exe
        if self.has_data:
            exact = self.built["f32"].run(self.feeds)
            self.advice.sqnr_db[name] = _worst_sqnr(exact, found)
        return None

    def _int8(self) -> Executable | None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DataWarning)
            found = self._quantized()
        if not any(layer.scheme != "float" for layer in found.report.layers):
            self.say("int8: the model has no layer that bw.quantize changes")
            return None
        return compile_graph(found.graph)

    def _quantized(self) -> Quantized:
        """The int8 model; made quickly if the usual way exceeds its part of the time."""
        now = time.perf_counter()
        try:
            with time_limit(now + _QUANTIZE_SHARE * (self.stop - now)):
                return quantize(self.graph, self.calibration, "int8", progress=False)
        except OutOfTimeError:
            self.say(
                "int8: weights are rounded to nearest and ranges are those of one batch, because "
                "the usual quantization exceeds the budget: bw.quantize is more accurate"
            )
        quick = {"base": "int8", "rounding": "nearest", "ranges": "peak", "attention": "float"}
        return quantize(self.graph, self.calibration[:1], quick, progress=False)

    def measure(self, threads: Sequence[int], batches: Sequence[int]) -> None:
        """Time all precisions at each number of threads and batch size."""
        own = self.advice.sizes.get(self.advice.batch_name, 0)
        counts = list(dict.fromkeys((own, *batches))) if self.advice.batch_name else [0]
        groups = [(n, batch) for batch in counts for n in sorted(threads, reverse=True)]
        for number, (count, batch) in enumerate(groups):
            left = self.stop - time.perf_counter()
            if self.advice.rows and self._expected_seconds(batch) > left:
                self.say(
                    "the budget was used up: not every number of threads and batch was measured"
                )
                break
            seconds = left / (len(groups) - number)
            self._measure_group(count, batch, min(_GROUP_SECONDS, max(0.05, seconds)))

    def _expected_seconds(self, batch: int) -> float:
        """The shortest time of measuring a batch, from the rows so far."""
        last = self.advice.rows[-len(self.built) :]
        scale = max(1.0, batch / max(last[0].batch, 1))
        return LEAST_CALLS * scale * sum(1e-3 * row.milliseconds for row in last)

    def _measure_group(self, threads: int, batch: int, seconds: float) -> None:
        feeds = with_batch(self.graph, self.feeds, self.advice.batch_name, batch)
        try:
            runs = {name: _on_threads(exe, threads) for name, exe in self.built.items()}
            sides = {name: partial(run, feeds) for name, run in runs.items()}
            timings = time_sides(sides, seconds)
        except BitwrightError as error:
            return self.say(f"batch {batch} does not run: {str(error).splitlines()[0]}")
        sizes = self.advice.sizes | ({self.advice.batch_name: batch} if batch else {})
        samples = batch or samples_in(self.graph, feeds)
        for name, timing in timings.items():
            exe = self.built[name]
            memory = constant_bytes(exe) + (arena_bytes(exe, sizes) or 0)
            row = _row(name, threads, samples, timing, timings["f32"], memory)
            self.advice.rows.append(row)
        return None

    def conclude(self, min_sqnr_db: float) -> None:
        advice, rows = self.advice, self.advice.rows
        first = rows[0].batch
        own = [row for row in rows if row.batch == first]
        most = max(row.threads for row in own)
        speeds = {row.precision: row for row in own if row.threads == most}
        self._explain_precisions(speeds, most, min_sqnr_db)
        allowed = [
            row
            for name, row in speeds.items()
            if name == "f32"
            or (row.times_f32 >= _FASTER and advice.sqnr_db.get(name, min_sqnr_db) >= min_sqnr_db)
        ]
        advice.precision = min(allowed, key=lambda row: row.milliseconds).precision
        mine = sorted(
            (row for row in own if row.precision == advice.precision), key=lambda row: row.threads
        )
        best = min(row.milliseconds for row in mine)
        chosen = next(row for row in mine if row.milliseconds <= _THREAD_SLACK * best)
        advice.threads = chosen.threads
        self._explain_threads(mine, chosen)
        chosen = self._choose_batch(chosen)
        advice.batch, advice.milliseconds = chosen.batch, chosen.milliseconds
        advice.memory_bytes = chosen.memory_bytes
        low, high = chosen.quartiles
        if high > _BUSY * low:
            self.say(
                f"times vary between {low:.3f} and {high:.3f} ms (quartiles): other processes may "
                "use the cores"
            )
        self.say(
            f"advice: {advice.precision}, {advice.threads} thread{'s' * (advice.threads > 1)}, "
            f"batch {advice.batch}: {advice.milliseconds:.3f} ms, "
            f"{advice.memory_bytes / 1e6:.2f} MB"
        )

    def _explain_precisions(
        self, speeds: Mapping[str, AdviceRow], threads: int, min_sqnr_db: float
    ) -> None:
        at = f"at {threads} thread{'s' * (threads > 1)}"
        for name, row in speeds.items():
            if name == "f32":
                continue
            sqnr = self.advice.sqnr_db.get(name)
            text = f"{name}: {row.times_f32:.2f} times f32 {at}"
            if sqnr is not None:
                data = "held-out" if len(self.samples) > 1 else "calibration"
                text += f", outputs have an SQNR of {sqnr:.1f} dB on {data} data"
                text += f", under the {min_sqnr_db:.1f} dB required" * (sqnr < min_sqnr_db)
            elif name == "int8":
                text += (
                    "; a stand-in quantized on random inputs, for timing only: its accuracy is "
                    "unknown without data"
                )
            else:
                text += "; its error is unknown without data"
            self.say(text)

    def _explain_threads(self, mine: Sequence[AdviceRow], chosen: AdviceRow) -> None:
        alone = next((row for row in mine if row.threads == 1), None)
        if alone is not None and len(mine) > 1:
            fastest = min(mine, key=lambda row: row.milliseconds)
            ratio = alone.milliseconds / fastest.milliseconds
            self.say(
                f"threads: {fastest.threads} threads are {ratio:.2f} times as fast as 1"
                if fastest.threads > 1
                else "threads: more than 1 is no faster"
            )

    def _choose_batch(self, chosen: AdviceRow) -> AdviceRow:
        """The row of the smallest batch near the best throughput."""
        if not self.advice.batch_name:
            self.say("batch: fixed by the model")
            return chosen
        rows = [
            row
            for row in self.advice.rows
            if (row.precision, row.threads) == (chosen.precision, chosen.threads)
        ]
        best = max(row.samples_per_second for row in rows)
        good = [row for row in rows if row.samples_per_second >= _BATCH_SHARE * best]
        found = min(good, key=lambda row: row.batch)
        rates = ", ".join(
            f"{row.batch}: {row.samples_per_second:.0f}/s"
            for row in sorted(rows, key=lambda row: row.batch)
        )
        self.say(f"batch ({self.advice.batch_name}): {rates}")
        return found


def _row(
    name: str, threads: int, samples: int, timing: Timing, plain: Timing, memory: int
) -> AdviceRow:
    low, high = timing.quartiles
    return AdviceRow(
        name,
        threads,
        samples,
        1e3 * timing.median,
        (1e3 * low, 1e3 * high),
        timing.times_faster_than(plain),
        samples / max(timing.median, 1e-9),
        memory,
    )


def _on_threads(exe: Executable, threads: int) -> Any:
    """The run of the same code on another number of threads."""
    engine = exe.engine
    if not isinstance(engine, Program):
        return exe.run
    return BACKEND.load(engine.graph, engine.artifact, threads).run


def _worst_sqnr(exact: Mapping[str, Any], found: Mapping[str, Any]) -> float:
    """The smallest SQNR of the float outputs; infinite if there are none."""
    values = [
        quality(array, found[name]).sqnr
        for name, array in exact.items()
        if isinstance(array, np.ndarray) and array.dtype.kind == "f" and array.size
    ]
    return min(values, default=math.inf)
