"""Makes the result of a search from its trials and tables."""

from __future__ import annotations

from typing import Any

from bitwright.quant.model.layer_names import LayerNames
from bitwright.tuning.precision.explanation import reasons
from bitwright.tuning.precision.result import Tuned
from bitwright.tuning.precision.session import Session
from bitwright.tuning.precision.tables import Tables
from bitwright.tuning.precision.trial import FLOAT_NAME, INT8_NAME, Trial


def make_result(session: Session, tables: Tables, stopped: str) -> Tuned:
    best, metric = session.best, session.metric
    assert best is not None
    session.record("end", stopped=stopped, best=best.name)
    return Tuned(
        model=session.model(best.recipe),
        recipe=best.recipe,
        pareto=[_row(trial, best) for trial in pareto(session)],
        layers=_layers(session, tables, best),
        objective=session.objective,
        budget_s=session.budget,
        max_drop=metric.max_drop.text,
        metric={"name": metric.name, "float": metric.reference, "best": best.score},
        seconds=session.elapsed,
        stopped=stopped,
        notes=_notes(session, best),
    )


def pareto(session: Session) -> list[Trial]:
    """Scored trials that no other one beats in both objective and score, the best, and the float
    and int8 models, by objective."""
    objective, goodness = session.objective, session.metric.goodness
    scored = [t for t in session.trials.values() if t.score is not None]
    kept: list[Trial] = []
    most = float("-inf")
    for trial in sorted(scored, key=lambda t: (t.value(objective), -goodness(t.score))):
        is_front = goodness(trial.score) > most
        most = max(most, goodness(trial.score))
        if is_front or trial is session.best or trial.name in (FLOAT_NAME, INT8_NAME):
            kept.append(trial)
    return kept


def _row(trial: Trial, best: Trial) -> dict[str, Any]:
    return {
        "name": trial.name,
        "latency_ms": trial.latency * 1e3,
        "bytes": trial.nbytes,
        "memory_bytes": trial.memory,
        "score": trial.score,
        "predicted_error": trial.predicted_error,
        "measured_error": trial.error,
        "is_best": trial is best,
    }


def _layers(session: Session, tables: Tables, best: Trial) -> list[dict[str, Any]]:
    """One row per layer; the layers of a unit share its precision, times and error."""
    names = LayerNames(session.problem.prepared)
    why = reasons(tables, best.precisions, session.objective)
    return [
        {
            "layer": names.readable(layer),
            "value": layer,
            "unit": unit.name,
            "precision": best.precisions[unit.name],
            "reason": why[unit.name],
            "options": tables.options(unit),
        }
        for unit in tables.units
        for layer in unit.layers
    ]


def _notes(session: Session, best: Trial) -> list[str]:
    found = []
    plain = session.named(INT8_NAME)
    if plain is not None and not session.metric.is_within(plain.score):
        drop = session.metric.drop(plain.score or 0.0)
        found.append(
            f"plain int8 is beyond the allowed drop: it loses {drop:.4g} "
            f"({plain.latency * 1e3:.4g} ms)"
        )
    if best.name == FLOAT_NAME:
        tried = len(session.trials) - 1
        found.append(
            f"float is the answer: none of {tried} other models was faster within the allowed drop"
            if tried
            else "float is the answer: no layer can have another precision"
        )
    if len(session.problem.batches) < 2:
        found.append("errors were measured on one batch")
    return found
