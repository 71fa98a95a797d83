"""Builds the model in each precision, and records step times and predicted errors."""

from __future__ import annotations

import time
from typing import Any

from bitwright.executable import Executable
from bitwright.pipeline import compile_graph
from bitwright.quant.model.quantize import Quantized
from bitwright.tuning.precision.precisions import (
    BF16,
    FLOAT,
    SCHEMES,
    float_recipe,
    precisions_of,
    uniform_recipe,
)
from bitwright.tuning.precision.prediction import predict_unit_errors
from bitwright.tuning.precision.session import Session
from bitwright.tuning.precision.step_times import VariantTimes, merged, profile_variant
from bitwright.tuning.precision.tables import Tables
from bitwright.tuning.precision.trial import INT8_NAME, graph_of, schemes_in
from bitwright.tuning.precision.units import owners

PASSES, ROUNDS = 3, 4
PROFILE_SECONDS = 4.0
"""The most time for the profile of one variant; long models get fewer rounds."""
WEIGHT_ONLY = ("w8", "w4")


def measure_variants(session: Session, tables: Tables) -> None:
    """Fill the tables: times of every precision, then errors of those that matter."""
    wanted = session.problem.precisions
    if BF16 in wanted:
        session.trial(BF16, float_recipe(BF16), {u.name: BF16 for u in tables.units})
    _time_variants(session, tables, wanted)
    tables.boundary = tables.measured_boundary()
    chosen = [name for name in wanted if name != FLOAT and _is_wanted(session, tables, name)]
    for name in chosen:
        if name != BF16 and not _is_known(session, uniform_recipe(name)):
            session.trial(f"all {name}", uniform_recipe(name), _uniform(tables, name))
    predict_unit_errors(session, tables, chosen)
    session.pinned.clear()
    session.forget()


def _uniform(tables: Tables, name: str) -> dict[str, str]:
    """A precision for every unit that can have it; attention and lookups have their own."""
    own = tables.available[name]
    return {unit.name: name if unit.name in own else FLOAT for unit in tables.units}


def _is_known(session: Session, recipe: dict[str, Any]) -> bool:
    """Whether the plain int8 model has the same schemes."""
    known = session.journal.last("trial", recipe=recipe)
    plain = session.named(INT8_NAME)
    if known is not None or plain is None:
        return False
    return session.precisions_in(session.model(recipe)) == plain.precisions


def _is_wanted(session: Session, tables: Tables, name: str) -> bool:
    """Whether assignments may use a precision; weight-only ones must be the fastest somewhere."""
    if name not in tables.times:
        return False
    return session.objective != "latency" or name not in WEIGHT_ONLY or tables.matters(name)


def _timing_recipe(name: str) -> dict[str, Any]:
    """The recipe of a variant; rounding to nearest is quick and takes the same time to run."""
    recipe = uniform_recipe(name)
    return {**recipe, "rounding": "nearest"} if name in WEIGHT_ONLY else recipe


def _time_variants(session: Session, tables: Tables, wanted: list[str]) -> None:
    """Profile the variants in turn, so that a busy moment does not affect only one of them."""
    known = session.journal.last("timings")
    if known is not None:
        tables.times = {n: VariantTimes(**one) for n, one in known["times"].items()}
        tables.available = known["available"]
        return
    times: dict[str, VariantTimes] = {}
    exes: dict[str, Executable] = {}
    owner = owners(session.problem.prepared, tables.units)
    for name in wanted:
        session.require_time()
        exes[name], tables.available[name] = _variant(session, tables, name)
        times[name] = _profile(session, exes[name], owner, 1)
    for _ in range(PASSES - 1):
        for name, exe in exes.items():
            session.require_time(times[name].run_seconds * 4 * ROUNDS)
            times[name] = merged(times[name], _profile(session, exe, owner, ROUNDS))
    tables.times = times
    session.record(
        "timings",
        times={name: one.to_json() for name, one in times.items()},
        available=tables.available,
    )
    for name, one in times.items():
        session.say(f"steps in {name}: {one.run_seconds * 1e3:.4g} ms")


def _variant(session: Session, tables: Tables, name: str) -> tuple[Executable, list[str]]:
    """The compiled variant, and the units that have this precision in it."""
    possible = [unit for unit in tables.units if name in precisions_of(unit)]
    threads = session.problem.threads
    if name in (FLOAT, BF16):
        precision = "mixed_bf16" if name == BF16 else "f32"
        exe = compile_graph(session.problem.prepared, threads=threads, precision=precision)
        return exe, [unit.name for unit in possible]
    recipe = _timing_recipe(name)
    if recipe == uniform_recipe(name):  # it is needed again
        session.pinned.add(session.key(recipe))
    model = session.model(recipe)
    assert isinstance(model, Quantized)
    got = schemes_in(model.report)
    is_float = SCHEMES[FLOAT]
    found = [u.name for u in possible if got.get(u.layers[0], is_float) != is_float]
    session.forget()
    return compile_graph(graph_of(model), threads=threads), found


def _profile(session: Session, exe: Executable, owner: dict[str, str], rounds: int) -> VariantTimes:
    sample = session.problem.sample
    begin = time.perf_counter()
    exe.run(sample)
    taken = time.perf_counter() - begin
    most = int(PROFILE_SECONDS / PASSES / max(1e-6, 4 * taken))
    found = profile_variant(exe, sample, owner, max(1, min(rounds, most)))
    exe.reset()
    return found
