"""Scores of candidates on a Ray cluster (extra `ray`).

Workers build a candidate from its recipe and score it. They measure no time: latency is measured
by the process that searches, on the machine that the model is tuned for, one model at a time and
while no task is running. The search makes the same decisions as without Ray, because it reads the
same scores in the same order; Ray only computes them ahead.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bitwright.errors import BitwrightError
from bitwright.ir.container import from_bytes, to_bytes
from bitwright.pipeline import compile_graph
from bitwright.tuning.precision.metric import Metric
from bitwright.tuning.precision.trial import ModelBuilder, graph_of, recipe_key

Scores = dict[str, float]


def import_ray() -> Any:
    try:
        import ray  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise BitwrightError(
            "spreading trials over machines needs Ray", hint="pip install bitwright[ray]"
        ) from None
    return ray


def score_on_worker(
    graph: bytes, statistics: bytes, metric: Metric, recipe: Mapping[str, Any], threads: int | None
) -> Scores:
    """Build and score one candidate."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "statistics.npz"
        path.write_bytes(statistics)
        model = ModelBuilder(from_bytes(graph), path, threads).build(recipe)
    exe = compile_graph(graph_of(model), threads=threads)
    error = metric.error(exe.run)
    exe.reset()
    return {"score": metric.score(exe.run), "error": error}


class RayScores:
    """Computes the scores of candidates ahead, several at a time."""

    def __init__(self, builder: ModelBuilder, metric: Metric) -> None:
        self._ray = ray = import_ray()
        if not ray.is_initialized():
            try:
                ray.init(address="auto", log_to_driver=False)  # a running cluster
            except ConnectionError:
                ray.init(log_to_driver=False)
        self.workers = max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._function = ray.remote(num_cpus=1, max_retries=1)(score_on_worker)
        shared = (to_bytes(builder.graph), builder.statistics.read_bytes(), metric)
        self._shared = [ray.put(one) for one in shared]
        self._found: dict[str, Scores] = {}

    def compute(self, recipes: Sequence[Mapping[str, Any]]) -> None:
        """Score the recipes that are not scored yet, and wait until no task runs."""
        wanted = {recipe_key(r): r for r in recipes if recipe_key(r) not in self._found}
        tasks = {k: self._function.remote(*self._shared, r, 1) for k, r in wanted.items()}
        for key, task in tasks.items():
            self._found[key] = self._ray.get(task)

    def known(self, recipe: Mapping[str, Any]) -> Scores | None:
        return self._found.get(recipe_key(recipe))
