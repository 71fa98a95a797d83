"""A search in progress: its clock, its journal, its trials and its best model.

Every measured fact is in the journal before the next one is measured, and the best model is written
to `best.bw` whenever it changes. A search that continues reads the facts and repeats no
measurement.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bitwright.executable import Executable
from bitwright.pipeline import compile_graph
from bitwright.quant.model.quantize import Quantized
from bitwright.quant.model.report import weight_bytes
from bitwright.tuning.latency import interleaved, memory_bytes, typical
from bitwright.tuning.precision.journal import Journal
from bitwright.tuning.precision.metric import Metric
from bitwright.tuning.precision.precisions import DYNAMIC, FLOAT, STATIC, float_recipe
from bitwright.tuning.precision.problem import Problem
from bitwright.tuning.precision.ray_trials import RayScores
from bitwright.tuning.precision.result import save_json
from bitwright.tuning.precision.trial import (
    FLOAT_NAME,
    INT8_NAME,
    Model,
    ModelBuilder,
    Trial,
    graph_of,
    recipe_key,
    schemes_in,
)

NOISE = {"latency": 0.02, "size": 0.002, "memory": 0.01}
"""Differences of the objective below this fraction do not count."""
SLOWER = 1.05
"""For size and memory: the largest latency relative to the float model's."""
TRIAL_ROUNDS, TRIAL_SECONDS = 60, 4.0
_PRECISION = {"float": FLOAT, "static": STATIC, "weight_only": "w8"}
OnBest = Callable[[Model, Trial], None]


class OutOfBudgetError(Exception):
    """The budget of the search is used up."""


class Session:
    def __init__(
        self,
        problem: Problem,
        metric: Metric,
        journal: Journal,
        objective: str,
        budget: float,
        begin: float,
        on_best: OnBest | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.problem, self.metric, self.journal = problem, metric, journal
        self.objective, self.budget = objective, budget
        self._begin, self._before = begin, journal.elapsed
        self._on_best, self._say = on_best, say
        self.builder = ModelBuilder(problem.graph, problem.statistics, problem.threads)
        self.trials: dict[str, Trial] = {}
        self.best: Trial | None = None
        self.scores: RayScores | None = None
        self.pinned: set[str] = set()
        """Keys of recipes whose models stay in memory."""
        self._models: dict[str, Model] = {}
        self._exes: dict[str, Executable] = {}
        self._float_seconds = math.nan
        self._ratios: dict[str, list[float]] = {}
        """Times relative to the float model's, by model."""
        self._build_seconds = self._score_seconds = 0.0
        """The longest so far, without and with the user's function."""

    # the clock

    @property
    def elapsed(self) -> float:
        return self._before + time.perf_counter() - self._begin

    def require_time(self, expected: float | None = None) -> None:
        """Raise if the next piece of work would end after the budget."""
        needed = self._build_seconds if expected is None else expected
        if self.best is not None and self.elapsed + needed > self.budget:
            raise OutOfBudgetError

    def record(self, event: str, **facts: Any) -> None:
        self.journal.add(event, elapsed=round(self.elapsed, 3), **facts)

    def say(self, text: str) -> None:
        if self._say is not None:
            self._say(f"{self.elapsed:6.1f} s  {text}")

    # models

    def model(self, recipe: Mapping[str, Any]) -> Model:
        """The model of a recipe; those of the float, int8 and best trials stay in memory."""
        key = recipe_key(recipe)
        if key not in self._models:
            self._models[key] = self.builder.build(recipe)
        return self._models[key]

    def executable(self, recipe: Mapping[str, Any]) -> Executable:
        key = recipe_key(recipe)
        if key not in self._exes:
            graph = graph_of(self.model(recipe))
            self._exes[key] = compile_graph(graph, threads=self.problem.threads)
        return self._exes[key]

    def forget(self) -> None:
        """Free the models that are not needed for comparison."""
        kept = {recipe_key(float_recipe(FLOAT)), recipe_key({"base": "int8"}), *self.pinned}
        if self.best is not None:
            kept.add(self.best.key)
        for held in (self._models, self._exes):
            for key in [key for key in held if key not in kept]:
                del held[key]

    # trials

    def trial(
        self,
        name: str,
        recipe: dict[str, Any],
        precisions: Mapping[str, str] | None = None,
        *,
        always_score: bool = False,
        predicted: tuple[float, float] | None = None,
    ) -> Trial:
        """Build, time and, if that could make it the best one, score a model."""
        key = recipe_key(recipe)
        if key in self.trials:
            return self.trials[key]
        known = self.journal.last("trial", recipe=recipe)
        if known is not None:
            if self.best is not None:
                self.best.latency = known["best_latency"]
            return self._take(Trial.from_json(known["trial"]))
        self.require_time()
        begin = time.perf_counter()
        made = Trial(name, recipe, dict(precisions or {}))
        if predicted is not None:
            made.predicted_error, made.predicted_latency = predicted
        exe = self._measure(made)
        self._build_seconds = max(self._build_seconds, time.perf_counter() - begin)
        begin = time.perf_counter()
        if name == FLOAT_NAME:
            made.score, made.error = self._reference(exe), 0.0
        elif always_score or self._could_be_best(made):
            self.require_time(self._score_seconds)
            self._score(made, exe)
        self._score_seconds = max(self._score_seconds, time.perf_counter() - begin)
        best_latency = None if self.best is None else self.best.latency
        self.record("trial", recipe=recipe, trial=made.to_json(), best_latency=best_latency)
        return self._take(made)

    def _measure(self, made: Trial) -> Executable:
        """Build a model and measure its latency and bytes, or read them from the journal."""
        model, exe = self.model(made.recipe), self.executable(made.recipe)
        if not made.precisions:
            made.precisions = self.precisions_in(model)
        known = self.journal.last("latency", recipe=made.recipe)
        if known is None:
            made.latency = self._latency(made, exe)
            facts: dict[str, Any] = {
                "latency": made.latency,
                "nbytes": weight_bytes(graph_of(model)),
                "memory": memory_bytes(exe),
                "best_latency": None if self.best is None else self.best.latency,
            }
            self.record("latency", recipe=made.recipe, **facts)
            known = facts
        elif self.best is not None:
            self.best.latency = known["best_latency"]
        made.latency, made.nbytes = known["latency"], known["nbytes"]
        made.memory = known["memory"]
        if made.name == FLOAT_NAME:
            self._float_seconds = made.latency
        return exe

    def _reference(self, exe: Executable, known: float | None = None) -> float:
        exe.reset()
        found = self.metric.set_reference(exe.run, known)
        exe.reset()
        return found

    def _latency(self, made: Trial, exe: Executable) -> float:
        """The time relative to the float model's in the same rounds, times the latter.

        The best model runs in the same rounds, which makes its own estimate better.
        """
        models = {"own": exe}
        is_float = made.name == FLOAT_NAME
        if not is_float:
            models["float"] = self.executable(float_recipe(FLOAT))
        best = self.best
        if best is not None and best.name != FLOAT_NAME:
            models["best"] = self.executable(best.recipe)
        samples = interleaved(models, self.problem.sample, TRIAL_ROUNDS, TRIAL_SECONDS)
        for one in models.values():
            one.reset()
        if is_float:
            self._float_seconds = typical(samples)["own"]
            return self._float_seconds
        seconds = typical(samples)
        found = {name: taken / seconds["float"] for name, taken in seconds.items()}
        if best is not None and "best" in found:
            self._ratios.setdefault(best.key, []).append(found["best"])
            best.latency = float(np.median(self._ratios[best.key])) * self._float_seconds
        self._ratios.setdefault(made.key, []).append(found["own"])
        return found["own"] * self._float_seconds

    def _could_be_best(self, made: Trial) -> bool:
        if self.best is None:
            return True
        limit = self.best.value(self.objective) * (1 - NOISE[self.objective] / 2)
        return made.value(self.objective) < limit and self._is_fast_enough(made)

    def _is_fast_enough(self, made: Trial) -> bool:
        return self.objective == "latency" or made.latency <= SLOWER * self._float_seconds

    def _score(self, made: Trial, exe: Executable) -> None:
        known = None if self.scores is None else self.scores.known(made.recipe)
        if known is not None:
            made.score, made.error = known["score"], known["error"]
            return
        exe.reset()
        made.error = self.metric.error(exe.run)
        exe.reset()
        made.score = self.metric.score(exe.run)
        exe.reset()

    def _take(self, made: Trial) -> Trial:
        """Keep a trial, and make it the best one if it is."""
        self.trials[made.key] = made
        if made.name == FLOAT_NAME and math.isnan(self.metric.reference):
            self._float_seconds = made.latency
            self._reference(self.executable(made.recipe), made.score)
        is_within = self.metric.is_within(made.score)
        score = "not scored" if made.score is None else f"score {made.score:.6g}"
        score += "" if is_within or made.score is None else ", beyond the allowed drop"
        self.say(f"{made.name}: {made.latency * 1e3:.4g} ms, {score}")
        if is_within and self._could_be_best(made):
            self.set_best(made)
        self.forget()
        return made

    def set_best(self, made: Trial) -> None:
        """Write the model and its recipe, each atomically."""
        before, self.best = self.best, made
        if before is not None and before.key == made.key:
            return
        known = self.journal.last("best")
        path = self.problem.folder / "best.bw"
        if known is not None and known["recipe"] == made.recipe and path.exists():
            return
        model = self.model(made.recipe)
        graph_of(model).save(path)
        save_json(self.problem.folder / "recipe.json", made.recipe)
        self.record("best", name=made.name, recipe=made.recipe)
        if self._on_best is not None:
            self._on_best(model, made)

    def precisions_in(self, model: Model) -> dict[str, str]:
        """The precision that each unit has in a model."""
        units = self.problem.units
        if not isinstance(model, Quantized):
            return {unit.name: FLOAT for unit in units}
        schemes = schemes_in(model.report)
        return {
            unit.name: _PRECISION.get(schemes.get(unit.layers[0], "float"), DYNAMIC)
            for unit in units
        }

    @staticmethod
    def key(recipe: Mapping[str, Any]) -> str:
        return recipe_key(recipe)

    def named(self, name: str) -> Trial | None:
        return next((trial for trial in self.trials.values() if trial.name == name), None)

    # the end

    def choose_finally(self, rounds: int = 60, seconds: float = 20.0) -> None:
        """Compare the models that may be the best in one set of interleaved rounds."""
        assert self.best is not None
        within = [t for t in self.trials.values() if self.metric.is_within(t.score)]
        within = [trial for trial in within if self._is_fast_enough(trial)]
        within.sort(key=lambda trial: trial.value(self.objective))
        limit = 1.1 * within[0].value(self.objective)
        finalists = [t for t in within if t.value(self.objective) <= limit][:4]
        for name in (FLOAT_NAME, INT8_NAME):
            one = self.named(name)
            if one is not None and one in within and one not in finalists:
                finalists.append(one)
        if len(finalists) > 1 and self.objective == "latency":
            known = self.journal.last("final", names=[trial.name for trial in finalists])
            if known is None:
                exes = {trial.name: self.executable(trial.recipe) for trial in finalists}
                found = typical(interleaved(exes, self.problem.sample, rounds, seconds))
                for exe in exes.values():
                    exe.reset()
                self.record("final", names=list(found), seconds=list(found.values()))
            else:
                found = dict(zip(known["names"], known["seconds"], strict=True))
            for trial in finalists:
                trial.latency = found[trial.name]
        least = min(trial.value(self.objective) for trial in finalists)
        close = [
            trial
            for trial in finalists
            if trial.value(self.objective) <= least * (1 + NOISE[self.objective])
        ]
        self.set_best(max(close, key=lambda t: (self.metric.goodness(t.score), -(t.error or 0.0))))
