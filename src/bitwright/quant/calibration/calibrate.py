"""Run a model over data and keep statistics of its values.

    calibrator = Calibrator(graph, ["x", "r"])       ranges = bw.calibrate(model, batches)
    for batch in batches:
        calibrator.step(batch)

Statistics are streaming and use constant memory. One pass serves all calibration methods
(`methods`). The model runs compiled, with its taps as extra outputs (`intermediate_outputs`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.errors import CalibrationError
from bitwright.frontend.load import load
from bitwright.ir.arrays import Array
from bitwright.ir.calibration import CalibrationRecord
from bitwright.ir.graph import Graph
from bitwright.ir.quant_params import whole_axis
from bitwright.ir.quant_types import QuantType, Scheme
from bitwright.passes.manager import run_passes
from bitwright.pipeline import INFERENCE
from bitwright.quant.calibration.intermediate_outputs import IntermediateOutputs
from bitwright.quant.calibration.interrupt import interrupt_between_steps, saved_on_interrupt
from bitwright.quant.calibration.methods import Method
from bitwright.quant.calibration.observed import observed_values
from bitwright.quant.calibration.progress import progress_bar
from bitwright.quant.calibration.ranges import Ranges
from bitwright.quant.calibration.statistics import Statistics
from bitwright.quant.data.batches import Batches, Transform
from bitwright.quant.data.traced import with_graph
from bitwright.target import host

NONFINITE = ("error", "ignore")
MIN_SHARE = 1 << 17
"""Values per thread; with fewer, starting the thread takes longer than the work."""
TOLERANCE = 0.01
"""A range that grows by less than this fraction of its width counts as unchanged."""


class Calibrator:
    """Accumulates statistics of chosen values (taps) of a graph over batches.

    A tap is the name of a value, or its path if it is inside a body. `axes` maps taps to the axis
    of per-channel statistics. `nonfinite` is "error" (NaN and infinities raise) or "ignore" (they
    are skipped and reported). A rejected batch leaves statistics, values and states unchanged.
    `simplify=False` is for graphs that the inference passes have already processed.
    `keep_values=False` saves the memory of `values()`.
    """

    def __init__(
        self,
        graph: Graph,
        taps: Iterable[str],
        *,
        axes: Mapping[str, int] | None = None,
        nonfinite: str = "error",
        threads: int | None = None,
        budget: int | None = None,
        simplify: bool = True,
        keep_values: bool = True,
    ) -> None:
        if nonfinite not in NONFINITE:
            raise CalibrationError(
                "nonfinite has an unknown value", expected=" or ".join(NONFINITE), found=nonfinite
            )
        taps = tuple(taps) if isinstance(taps, Iterable) and not isinstance(taps, str) else taps
        self._taps = IntermediateOutputs(
            graph, taps, threads=threads, budget=budget, simplify=simplify
        )
        self.graph, self.taps = graph, tuple(taps)
        axes = axes or {}
        if not isinstance(axes, Mapping):
            raise CalibrationError("axes is not a dict", expected="{tap: axis}", found=repr(axes))
        if unknown := set(axes) - set(self.taps):
            raise CalibrationError(f"axes names {min(unknown)!r}, which is not a tap")
        for name, axis in axes.items():
            rank = self._taps.values[name].rank
            if not -rank <= whole_axis(axis) < rank:
                raise CalibrationError(
                    f"axis {axis} of tap {name!r} is out of range",
                    expected=f"an axis of rank {rank}",
                )
        self._nonfinite, self._threads = nonfinite, threads or host().cores
        self._keeps_values = keep_values
        self._values: dict[str, Array] | None = None
        self.ranges = Ranges({name: Statistics(axes.get(name)) for name in self.taps})

    def step(self, batch: Mapping[str, Any]) -> None:
        """Run one batch and add the values of its taps to the statistics."""
        if not isinstance(batch, Mapping):
            raise CalibrationError(
                "a batch is a dict of arrays by input name",
                expected=", ".join(repr(value.name) for value in self.graph.inputs),
                found=type(batch).__name__,
            )
        values: dict[str, Array] = {}
        before: dict[str, Statistics] = {}
        states = self._taps.states
        try:
            for found in self._taps.run_parts(batch):
                if self._keeps_values:
                    values.update((name, array.copy()) for name, array in found)
                self._add_all(found, before)
        except BaseException:
            for name, saved in before.items():
                self.ranges.statistics[name].restore(saved)
            self._taps.restore(states)
            raise
        self._values = values
        self.ranges.batches += 1

    def _add_all(self, found: list[tuple[str, Array]], before: dict[str, Statistics]) -> None:
        """Add all taps of one run, on all threads; `before` collects copies for a rollback."""
        shares = _shares(found, self._threads)
        others = [self._workers.submit(self._add, share, before) for share in shares[1:]]
        try:
            self._add(shares[0], before)
        finally:  # all threads must stop before a rollback
            if others:
                wait(others)
        for other in others:
            other.result()

    def _add(self, share: list[tuple[str, Array]], saved: dict[str, Statistics]) -> None:
        for name, array in share:
            found = self.ranges.statistics[name]
            if name not in saved:
                saved[name] = found.copy()
            before = found.nan + found.infinite
            found.add(array)
            bad = found.nan + found.infinite - before
            if bad and self._nonfinite == "error":
                raise CalibrationError(
                    f"tap {name!r} has {bad} values that are NaN or infinite",
                    where=f"batch {self.ranges.batches} of the data",
                    hint='nonfinite="ignore" skips such values.',
                )

    @cached_property
    def _workers(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._threads, "bitwright-statistics")

    def max_abs(self) -> Array:
        """The largest magnitude of each tap, in the order of the taps."""
        self._require_batches()
        return np.array([self.ranges[name].max_abs.max(initial=0) for name in self.taps])

    def scales(self) -> Array:
        """max_abs / 127; 1 for all-zero taps and for quotients that are not normal f32 numbers."""
        scales = self.max_abs() / 127
        limits = np.finfo(np.float32)
        normal = (scales >= limits.tiny) & (scales <= limits.max)
        return np.where(normal, scales, 1.0)

    def values(self) -> dict[str, Array]:
        """The tapped values of the last step; for bodies, those of their last execution."""
        self._require_batches()
        if not self._keeps_values:
            raise CalibrationError("values were not kept", hint="Remove keep_values=False.")
        if self._values is None:
            raise CalibrationError("loaded statistics have no values", hint="Call step.")
        return {name: array.copy() for name, array in self._values.items()}

    def record(
        self,
        dtype: str | QuantType = "int8",
        method: Method = "minmax",
        *,
        scheme: str | Scheme | None = None,
        values: Iterable[str] | None = None,
    ) -> CalibrationRecord:
        """Parameters of each tap, for `quant.insert_q_dq`; see `Ranges.record`."""
        self._require_batches()
        return self.ranges.record(dtype, method, scheme=scheme, values=values)

    def report(self) -> list[str]:
        """Notes on the statistics: skipped values, all-zero taps, taps that were not reached."""
        notes = self.ranges.notes()
        for name, top, scale in zip(self.taps, self.max_abs(), self.scales(), strict=True):
            if top and scale == 1.0 and top / 127 != 1.0:
                notes.append(f"{name}: scale {top / 127:.3g} is not a normal f32, so it is 1")
        return notes

    def _require_batches(self) -> None:
        if not self.ranges.batches:
            raise CalibrationError("no batch has been run", hint="Call step(batch) first.")

    def reset(self) -> None:
        """Clear statistics and states."""
        self.ranges.clear()
        self._taps.reset()
        self._values = None

    def merge(self, other: Calibrator | Ranges) -> Calibrator:
        """Add the statistics of another run with the same taps; returns itself."""
        self.ranges.merge(other.ranges if isinstance(other, Calibrator) else other)
        return self

    def save(self, path: str | Path) -> None:
        self.ranges.save(path)

    def load(self, path: str | Path) -> Calibrator:
        """Load statistics of the same taps from a file; returns itself."""
        found = Ranges.load(path)
        empty = Ranges({n: Statistics(s.axis, s.bins) for n, s in self.ranges.statistics.items()})
        self.ranges = empty.merge(found)
        return self


def _shares(found: list[tuple[str, Array]], threads: int) -> list[list[tuple[str, Array]]]:
    """Split the arrays into shares of similar size, one per thread; a tap is in one share only."""
    sizes: dict[str, int] = {}
    for name, array in found:
        sizes[name] = sizes.get(name, 0) + array.size
    count = max(1, min(threads, sum(sizes.values()) // MIN_SHARE))
    totals = [0] * count
    home: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        home[name] = totals.index(min(totals))
        totals[home[name]] += sizes[name]
    shares: list[list[tuple[str, Array]]] = [[] for _ in totals]
    for name, array in found:
        shares[home[name]].append((name, array))
    return shares


def calibrate(
    model: Any,
    data: Any,
    *,
    values: Iterable[str] | str | None = None,
    axes: Mapping[str, int] | None = None,
    transform: Transform | None = None,
    subset: int | None = None,
    patience: int | None = None,
    nonfinite: str = "error",
    save: str | Path | None = None,
    resume: bool = False,
    progress: bool | None = None,
    threads: int | None = None,
) -> Ranges:
    """Statistics of the model's floating values over the data, by name of value.

    `values` names them; the default is the values that a run stores, and "all" adds those inside
    fused regions. `subset` limits the number of batches. With `patience` the run stops after that
    many consecutive batches widened no range. The statistics are written to the file `save`, also
    if the run is interrupted; `resume=True` continues from that file.
    """
    model, data = with_graph(model, data, transform)
    graph = load(model)
    same: dict[str, str] = {}
    is_simple = values is None or isinstance(values, str)
    if values is None or isinstance(values, str):
        if values not in (None, "all"):
            raise CalibrationError("values is not a list of names", expected="all", found=values)
        graph = run_passes(graph, INFERENCE)
        values, same = observed_values(graph, inside=values == "all")
    calibrator = Calibrator(
        graph,
        values,
        axes=axes,
        nonfinite=nonfinite,
        threads=threads,
        simplify=not is_simple,
        keep_values=False,
    )
    if resume and save is not None and Path(save).exists():
        calibrator.load(save)
    calibrator.ranges.same = same
    batches = Batches(data, graph, transform=transform, subset=subset)

    def write() -> str:
        if save is None or not calibrator.ranges.batches:
            return ""
        calibrator.ranges.save(save)
        return f"the statistics so far are in {save}; resume=True (--resume) continues"

    with saved_on_interrupt(write), interrupt_between_steps() as check:
        _run(calibrator, batches, patience, progress, check)
    calibrator.ranges.remarks = batches.notes()
    write()
    return calibrator.ranges


def _run(
    calibrator: Calibrator,
    batches: Batches,
    patience: int | None,
    progress: bool | None,
    check: Callable[[], None],
) -> None:
    done = calibrator.ranges.batches
    unchanged, before = 0, _ends(calibrator.ranges)
    with progress_bar("calibrating", batches.known_length, progress) as advance:
        for number, batch in enumerate(batches):
            advance()
            if number < done:
                continue
            calibrator.step(batch)
            check()
            if patience is None:
                continue
            after = _ends(calibrator.ranges)
            unchanged = unchanged + 1 if _is_unchanged(before, after) else 0
            before = after
            if unchanged >= patience:
                return


def _ends(ranges: Ranges) -> Array:
    """Minimum and maximum of every value, [values, 2]."""
    found = ranges.statistics.values()
    return np.array(
        [[s.minimum.min(initial=np.inf), s.maximum.max(initial=-np.inf)] for s in found]
    )


def _is_unchanged(before: Array, after: Array) -> bool:
    width = np.maximum(after[:, 1] - after[:, 0], 0)[:, None]
    with np.errstate(invalid="ignore"):
        moved = np.abs(after - before) > TOLERANCE * width
    return not moved.any()
