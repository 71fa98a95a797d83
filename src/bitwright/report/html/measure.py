"""Latency, memory and step times of the float and the quantized model, for the report.

Both models run in this process with the same number of threads. Rounds are interleaved, so that
load from other processes affects both, and medians are reported. The speedup is their ratio.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from bitwright import system
from bitwright.backends.base import Profile
from bitwright.backends.cpu.runtime.program import Program
from bitwright.compiler import compile
from bitwright.executable import Executable
from bitwright.ir.graph import Graph
from bitwright.lir.buffer import Storage
from bitwright.lir.plan import byte_size, plan
from bitwright.ops.core.opdef import Kind
from bitwright.ops.core.registry import get
from bitwright.report.html.regions import Region
from bitwright.target import host

LEAST_ROUNDS, MOST_ROUNDS, BUDGET_SECONDS = 9, 101, 3.0
"""Rounds end with the budget of time, within these limits."""
PROFILE_ROUNDS = 5
_STRENGTH = {Kind.COMPUTE: 0, Kind.REDUCTION: 1}
LEAST_SECONDS = 0.003
"""A round repeats shorter runs for this long."""


def measure(
    models: Mapping[str, Graph],
    feeds: Mapping[str, Any],
    threads: int | None,
    budget_seconds: float = BUDGET_SECONDS,
) -> tuple[dict[str, Any], dict[str, tuple[Executable, Profile]]]:
    """Facts about the runs of models by name ("float", "quantized"), and their profiles."""
    count = threads or system.cores()
    executables = {name: compile(graph, threads=count) for name, graph in models.items()}
    repeats = {}
    for name, exe in executables.items():
        exe.run(feeds)
        repeats[name] = max(1, round(LEAST_SECONDS / max(_seconds(exe, feeds, 1), 1e-6)))
    times: dict[str, list[float]] = {name: [] for name in executables}
    end, rounds = time.perf_counter() + budget_seconds, 0
    while rounds < LEAST_ROUNDS or (rounds < MOST_ROUNDS and time.perf_counter() < end):
        for name, exe in executables.items():
            times[name].append(1e3 * _seconds(exe, feeds, repeats[name]))
        rounds += 1
    facts: dict[str, Any] = {
        "latency": {name: _spread(found) for name, found in times.items()},
        "threads": count,
        "rounds": rounds,
        "inputs": {name: _shape(array) for name, array in feeds.items()},
        "target": host().cpu,
    }
    if len(times) == 2:
        before, after = (statistics.median(found) for found in times.values())
        facts["speedup"] = before / after
    profiles = {
        name: (exe, exe.engine.profile(feeds, PROFILE_ROUNDS))
        for name, exe in executables.items()
        if isinstance(exe.engine, Program)
    }
    facts["memory"] = {name: memory(exe, found) for name, (exe, found) in profiles.items()}
    return facts, profiles


def _seconds(exe: Executable, feeds: Mapping[str, Any], repeats: int) -> float:
    begin = time.perf_counter()
    for _ in range(repeats):
        exe.run(feeds)
    return (time.perf_counter() - begin) / repeats


def _spread(times: list[float]) -> dict[str, float]:
    low, middle, high = np.quantile(times, (0.25, 0.5, 0.75))
    return {"median_ms": float(middle), "low_ms": float(low), "high_ms": float(high)}


def _shape(array: Any) -> str:
    found = np.asarray(array)
    return f"{found.dtype} {list(found.shape)}"


def memory(exe: Executable, profile: Profile) -> dict[str, int] | None:
    """Bytes of constants as the kernels store them, and of the arena; None if it has no plan."""
    assert isinstance(exe.engine, Program)
    schedule = exe.engine.schedule
    if not schedule.symbols <= profile.bindings.keys():
        return None
    constants = [b for b in schedule.buffers if b.storage is Storage.CONSTANT]
    weights = sum(byte_size(buffer, profile.bindings) for buffer in constants)
    return {"weights": weights, "arena": plan(schedule, profile.bindings).total}


def region_seconds(
    exe: Executable, profile: Profile, regions: Mapping[str, Region]
) -> dict[Region, float]:
    """The time of steps by region, given the regions of value names.

    A step that computes several regions (merged products) is divided between them.
    """
    graph = exe.history.stages[-1].graph
    found: dict[Region, float] = {}
    for timed in profile.steps:
        owners = _owners(graph, timed.step.node, regions)
        for owner in owners:
            found[owner] = found.get(owner, 0.0) + timed.seconds / len(owners)
    return found


def _owners(graph: Graph, name: str, regions: Mapping[str, Region]) -> list[Region]:
    """The regions that a step of the final graph computes."""
    value = graph.values.get(name)
    names = [name]
    if value is not None:  # products of one input run as one, then split
        readers = [n for n in graph.nodes if n.op == "split" and value in n.operands]
        split = [regions[n] for reader in readers for n in reader.names if n in regions]
        if split:
            return list(dict.fromkeys(split))
        if value.node.op == "fused":
            inner = [n for n in value.node.attrs["body"].nodes if not n.is_boundary]
            inner.sort(key=lambda n: _STRENGTH.get(get(n.op).kind, 2))
            strong = [n for n in inner if _STRENGTH.get(get(n.op).kind, 2) < 2]
            names = [*(n.name for n in strong), name, *(n.name for n in inner)]
    found = (_known(one, regions) for one in names)
    return [region for region in found if region is not None][:1]


def _known(name: str, regions: Mapping[str, Region]) -> Region | None:
    """The region of a name, or of the name that passes derived it from (`conv.cast`)."""
    while name not in regions and "." in name:
        name = name.rpartition(".")[0]
    return regions.get(name)
