"""bw.tune_kernels: measures tiles and cache blocks of a model's kernels and remembers the fastest.

    found = bw.tune_kernels("model.onnx", {"x": batch}, budget=60)
    print(found)

Every product and convolution asks for one of several candidates (`lowering.choices`); all of them
give the same bits. A variant of the model takes one candidate at every point, so that few
compilations measure all points: a variant runs in turns with the static one, and the times of its
steps are compared. The fastest candidates together are kept if the whole model is faster with
them. They are remembered per machine, and later compilations use them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bitwright.backends.cpu.lowering import choices
from bitwright.backends.cpu.lowering.choices import Choices, Point
from bitwright.backends.cpu.runtime.program import Program
from bitwright.errors import BitwrightError
from bitwright.executable import Executable
from bitwright.frontend.load import load
from bitwright.ir.graph import Graph
from bitwright.pipeline import compile_graph
from bitwright.target import host
from bitwright.tuning.latency import interleaved

WORTH = 0.03
"""The least part of a point's time that another candidate must save: less may be noise."""
WORTH_WHOLE = 0.005
"""The least part of a run's time that all changes together must save."""
TURNS, ROUNDS = 3, 3
"""Turns between a variant and the static model, and profiled rounds of each."""


@dataclass(frozen=True)
class TunedPoint:
    """A measured choice: seconds of its steps by candidate, the static one first."""

    point: str
    nodes: tuple[str, ...]
    seconds: dict[str, float]

    @property
    def static(self) -> str:
        return next(iter(self.seconds))

    @property
    def best(self) -> str:
        """The fastest candidate, or the static one where the gain may be noise."""
        fastest = min(self.seconds, key=lambda name: self.seconds[name])
        limit = (1 - WORTH) * self.seconds[self.static]
        return fastest if self.seconds[fastest] <= limit else self.static


@dataclass
class KernelTuning:
    """What `tune_kernels` measured."""

    points: list[TunedPoint]
    threads: int
    static_seconds: float
    tuned_seconds: float
    """Median seconds of a run before and after, in turns."""
    is_faster: bool
    stopped: str
    seconds: float
    chosen: dict[str, str] = field(default_factory=dict)
    """The candidates that were remembered, by point."""

    def __str__(self) -> str:
        lines = [
            f"{one.point}: {one.static} -> {one.best}, "
            f"{one.seconds[one.static] * 1e6:.1f} -> {one.seconds[one.best] * 1e6:.1f} us "
            f"in {len(one.nodes)} steps"
            for one in self.points
            if one.best != one.static
        ]
        verdict = "remembered" if self.is_faster else "not faster as a whole: nothing is remembered"
        lines.append(
            f"{len(self.points)} choices measured with {self.threads} threads in "
            f"{self.seconds:.1f} s ({self.stopped}); a run takes {self.static_seconds * 1e3:.3f} "
            f"-> {self.tuned_seconds * 1e3:.3f} ms: {verdict}"
        )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        names = ("threads", "static_seconds", "tuned_seconds", "is_faster", "stopped", "seconds")
        points = [
            {"point": p.point, "nodes": list(p.nodes), "seconds": p.seconds, "best": p.best}
            for p in self.points
        ]
        return {name: getattr(self, name) for name in names} | {
            "points": points,
            "chosen": self.chosen,
        }


def tune_kernels(
    model: Any,
    feeds: Mapping[str, Any],
    *,
    budget: float = 60.0,
    threads: int | None = None,
    precision: Any = None,
) -> KernelTuning:
    """Measure kernel parameters of a model (what `bw.load` accepts) on these inputs.

    `budget` is in seconds and bounds the search between two measurements. The candidates that
    make the model faster are remembered in the cache folder for this machine (BITWRIGHT_TUNED=off
    ignores them). Results of the model do not change.
    """
    if budget <= 0:
        raise BitwrightError("the budget must be positive", found=budget, expected="seconds")
    begin = time.perf_counter()
    graph = load(getattr(model, "graph", model))
    tuner = _Tuner(graph, feeds, threads, precision)
    static = tuner.compile(Choices())
    points = tuner.asked.points
    times: dict[str, dict[str, float]] = {name: {} for name in points}
    stopped = "all candidates measured"
    for number in range(1, max((len(p.candidates) for p in points.values()), default=1)):
        if time.perf_counter() - begin > budget:
            stopped = f"budget of {budget:g} s reached"
            break
        _add(times, points, number, tuner.compare(static, _variant(points, number)))
    tuned = [
        TunedPoint(name, tuple(points[name].nodes), found) for name, found in times.items() if found
    ]
    chosen = {one.point: one.best for one in tuned if one.best != one.static}
    before, after = tuner.whole(static, chosen)
    is_faster = bool(chosen) and after < (1 - WORTH_WHOLE) * before
    if is_faster:
        measured = {one.point for one in tuned}
        others = {k: v for k, v in choices.remembered(host()).items() if k not in measured}
        choices.remember(host(), others | chosen)
    seconds = time.perf_counter() - begin
    program: Any = static.engine
    used = program.profile(feeds, 1).threads
    kept = chosen if is_faster else {}
    return KernelTuning(tuned, used, before, after, is_faster, stopped, seconds, kept)


def _variant(points: Mapping[str, Point], number: int) -> dict[str, str]:
    """The candidate of this number at every point that has as many."""
    return {
        name: point.candidates[number]
        for name, point in points.items()
        if number < len(point.candidates)
    }


def _add(
    times: dict[str, dict[str, float]],
    points: Mapping[str, Point],
    number: int,
    measured: tuple[Mapping[str, float], Mapping[str, float]],
) -> None:
    """Enter a variant's times relative to those of the static model in the same turns."""
    before, after = measured
    for name, point in points.items():
        nodes = set(point.nodes)
        static = sum(before.get(node, 0.0) for node in nodes)
        if number >= len(point.candidates) or not static:
            continue
        found = times[name]
        base = found.setdefault(point.candidates[0], static)
        other = sum(after.get(node, 0.0) for node in nodes)
        found[point.candidates[number]] = base * other / static


class _Tuner:
    """Compiles a graph with given choices, and measures variants on the same inputs."""

    def __init__(
        self, graph: Graph, feeds: Mapping[str, Any], threads: int | None, precision: Any
    ) -> None:
        self.graph, self.feeds, self.threads, self.precision = graph, feeds, threads, precision
        self.asked = Choices()

    def compile(self, chosen: Choices) -> Executable:
        with choices.using(chosen):
            exe = compile_graph(self.graph, "cpu", self.threads, self.precision)
        assert isinstance(exe.engine, Program)
        exe.run(self.feeds)  # checks the feeds
        self.asked = chosen
        return exe

    def compare(
        self, static: Executable, variant: Mapping[str, str]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds of each node in the static model and in a variant, measured in turns."""
        other = self.compile(Choices(variant))
        best: tuple[dict[str, float], dict[str, float]] = ({}, {})
        for _ in range(TURNS):
            for exe, found in zip((static, other), best, strict=True):
                for node, seconds in self._steps(exe).items():
                    found[node] = min(seconds, found.get(node, seconds))
        return best

    def _steps(self, exe: Executable) -> dict[str, float]:
        engine: Any = exe.engine
        found: dict[str, float] = {}
        for timed in engine.profile(self.feeds, ROUNDS).steps:
            name = getattr(timed.step, "node", "")
            found[name] = found.get(name, 0.0) + timed.seconds
        return found

    def whole(self, static: Executable, chosen: Mapping[str, str]) -> tuple[float, float]:
        """Median seconds of a run with static and with chosen parameters, in turns."""
        if not chosen:
            seconds = interleaved({"static": static}, self.feeds)["static"]
            return seconds, seconds
        found = interleaved(
            {"static": static, "tuned": self.compile(Choices(chosen))}, self.feeds, rounds=25
        )
        return found["static"], found["tuned"]
