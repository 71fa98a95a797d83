"""What a search works on: the float model, its units, statistics of the data, and batches."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitwright.backends.cpu.cache.kernel_store import compiler_workers
from bitwright.errors import CalibrationError
from bitwright.frontend.load import load
from bitwright.ir.graph import Graph
from bitwright.quant.calibration.blas import products_on_one_thread
from bitwright.quant.calibration.interrupt import saved_on_interrupt
from bitwright.quant.calibration.run import CalibrationRun
from bitwright.quant.calibration.stats_file import StatsFile, model_digest
from bitwright.quant.data.batches import Batch, Batches, Transform
from bitwright.quant.data.traced import with_graph
from bitwright.quant.model.points import find_points
from bitwright.quant.model.quantize import WIDE
from bitwright.quant.model.stages import simplify
from bitwright.target import host
from bitwright.tuning.precision.precisions import BF16, multiplies_bf16, precisions_of
from bitwright.tuning.precision.units import Unit, find_units

STATISTICS = "statistics.npz"


@dataclass
class Problem:
    graph: Graph
    prepared: Graph
    """The simplified float graph, whose value names units and recipes use."""
    units: list[Unit]
    folder: Path
    batches: list[Batch]
    """The batches that errors and the default score are measured on."""
    sample: Mapping[str, Any]
    """The inputs that latency is measured on."""
    threads: int | None

    @property
    def statistics(self) -> Path:
        return self.folder / STATISTICS

    @property
    def precisions(self) -> list[str]:
        """All precisions that a unit may have on this machine."""
        found = dict.fromkeys(name for unit in self.units for name in precisions_of(unit))
        return [name for name in found if name != BF16 or multiplies_bf16(host())]


def hardware_key() -> str:
    """The kind of machine: times of one kind say nothing about another."""
    target = host()
    features = hashlib.sha256(",".join(sorted(target.features)).encode()).hexdigest()[:12]
    return f"{target.architecture}:{target.cpu or target.name}:{target.cores}:{features}"


def prepare_problem(
    model: Any,
    data: Any,
    folder: Path,
    *,
    sample: Mapping[str, Any] | None,
    transform: Transform | None,
    subset: int | None,
    threads: int | None,
    resume: bool,
) -> Problem:
    """Load the model and collect statistics of the data, or read those of an earlier run."""
    model, data = with_graph(model, data, transform)
    graph = load(model)
    prepared = simplify(graph)
    file = StatsFile(folder / STATISTICS)
    if not resume:
        file.path.unlink(missing_ok=True)
    if data is None and not file.path.exists():
        raise CalibrationError(
            "tuning needs data: errors and times are measured on it", expected="data"
        )
    batches = None
    if data is not None:
        batches = Batches(data, prepared, transform=transform, subset=subset)
    with compiler_workers(), ExitStack() as stack:
        points = find_points(prepared)
        run = CalibrationRun(prepared, points, batches, file, threads)
        if all(p.matrix.shape[2] <= WIDE for s in points for p in s.products):
            stack.enter_context(products_on_one_thread())  # the statistics of `bw.quantize`
        stack.enter_context(saved_on_interrupt(run.save))
        run.run(progress=False)
    held_out = run.held_out or run.checked
    return Problem(
        graph,
        prepared,
        find_units(prepared),
        folder,
        held_out,
        sample if sample is not None else run.checked[0],
        threads,
    )


def digest_of(problem: Problem) -> str:
    return model_digest(problem.prepared)
