"""bw.tune: the precision of every layer, by measured time and error, within an allowed drop.

    tuned = bw.tune("model.onnx", batches, eval=accuracy, max_drop="0.5%", budget="5m")
    print(tuned)
    tuned.save("model-tuned.onnx")

1. The float and the plain int8 model are timed and scored. From here on there is a best model.
2. The model is built in every precision that this machine has kernels for, and each step of each
   variant is timed (`step_times`). Errors are predicted by layer (`prediction`).
3. `assignment` gives the fastest assignments for a ladder of allowed errors.
4. Candidates of the ladder are built, timed as a whole and scored. The measured drop tells which
   allowed error to try next; measured times correct the predicted ones.
5. The finalists, the float and the int8 model are timed again in turn. The fastest one within the
   allowed drop is the answer; of equally fast ones the most accurate.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bitwright.errors import BitwrightError
from bitwright.quant.data.batches import Transform
from bitwright.tuning.precision.journal import Journal
from bitwright.tuning.precision.metric import Evaluate, MaxDrop, Metric
from bitwright.tuning.precision.precisions import FLOAT, float_recipe
from bitwright.tuning.precision.problem import digest_of, hardware_key, prepare_problem
from bitwright.tuning.precision.ray_trials import RayScores, import_ray
from bitwright.tuning.precision.refinement import Refinement
from bitwright.tuning.precision.result import Tuned
from bitwright.tuning.precision.session import OnBest, OutOfBudgetError, Session
from bitwright.tuning.precision.summary import make_result
from bitwright.tuning.precision.tables import Tables
from bitwright.tuning.precision.trial import FLOAT_NAME, INT8_NAME, OBJECTIVES
from bitwright.tuning.precision.variants import measure_variants

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def tune(
    model: Any,
    data: Any = None,
    eval: Evaluate | None = None,
    *,
    max_drop: str | float = "0.5%",
    budget: str | float = "10m",
    objective: str = "latency",
    threads: int | None = None,
    workdir: str | Path | None = None,
    resume: bool = False,
    sample: Mapping[str, Any] | None = None,
    lower_is_better: bool = False,
    transform: Transform | None = None,
    subset: int | None = None,
    ray: bool = False,
    on_best: OnBest | None = None,
    say: Callable[[str], None] | None = None,
) -> Tuned:
    """Search the precision of every layer of a model (what `bw.quantize` accepts).

    `eval` gets a callable from a dict of arrays to a dict of arrays and returns a score; without it
    the score is the agreement with the float model on held-out batches. `max_drop` is relative to
    the float model's score ("0.5%") or absolute (0.01). `objective` is "latency", "size" or
    "memory"; no answer is slower than the float model. Latency is measured on `sample`, the first
    batches of `data` by default, with `threads`.

    The search ends when nothing faster is left to try, after `budget` (seconds, "90s", "5m"), or on
    Ctrl-C, with the best model so far. `workdir` keeps the journal, the statistics of the data and
    the best model; `resume` continues from there, and `budget` then counts the time of all runs.
    `ray` computes scores on a Ray cluster. `on_best` is called with each new best model.
    """
    begin = time.perf_counter()
    if objective not in OBJECTIVES:
        raise BitwrightError(f"there is no objective {objective!r}", expected=", ".join(OBJECTIVES))
    drop, seconds = MaxDrop.of(max_drop), parse_budget(budget)
    if resume and workdir is None:
        raise BitwrightError("only a search with a workdir can continue", expected="workdir")
    if ray:
        import_ray()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary if workdir is None else workdir)
        folder.mkdir(parents=True, exist_ok=True)
        problem = prepare_problem(
            model,
            data,
            folder,
            sample=sample,
            transform=transform,
            subset=subset,
            threads=threads,
            resume=resume,
        )
        facts = {
            "model": digest_of(problem),
            "objective": objective,
            "machine": hardware_key(),
            "threads": threads,
        }
        metric = Metric(eval, drop, problem.batches, lower_is_better)
        journal = Journal(folder, {**facts, "metric": metric.name}, resume)
        session = Session(problem, metric, journal, objective, seconds, begin, on_best, say)
        tables = Tables(problem.units)
        stopped = _search(session, tables, ray)
        return make_result(session, tables, stopped)


def _search(session: Session, tables: Tables, ray: bool) -> str:
    """Run all steps; the reason for the end."""
    try:
        session.trial(FLOAT_NAME, float_recipe(FLOAT), always_score=True)
        session.say(f"{len(tables.units)} units can have a precision of their own")
        if ray:
            session.scores = RayScores(session.builder, session.metric)
        if tables.units:
            session.trial(INT8_NAME, {"base": "int8"}, always_score=True)
        measure_variants(session, tables)
        stopped = Refinement(session, tables).run()
    except OutOfBudgetError:
        stopped = "the budget is used up"
    except KeyboardInterrupt:
        if session.best is None:
            raise
        stopped = "interrupted"
    if session.best is None:
        raise BitwrightError("the search ended before the float model was measured")
    if stopped != "interrupted":
        left = session.budget - session.elapsed
        session.choose_finally(seconds=min(20.0, max(2.0, left)))
    return stopped


def parse_budget(given: str | float) -> float:
    """Seconds of 90, "90s", "5m" or "1h"."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", str(given))
    if found is None or isinstance(given, bool):
        raise BitwrightError(
            "budget is not a time", expected='seconds, "90s", "5m" or "1h"', found=repr(given)
        )
    return float(found[1]) * _UNITS[found[2]]
