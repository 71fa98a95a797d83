"""Predicted output errors of units by precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from bitwright.errors import BitwrightError
from bitwright.quant.model.quantize import Quantized
from bitwright.tuning.attribution import predict_errors
from bitwright.tuning.precision.precisions import BF16, float_recipe, uniform_recipe
from bitwright.tuning.precision.session import Session
from bitwright.tuning.precision.tables import Tables
from bitwright.tuning.precision.units import Unit

Energies = Mapping[str, float]
PREDICTION_BATCHES = 3
"""Batches that derivatives are computed on."""


def predict_unit_errors(session: Session, tables: Tables, precisions: Sequence[str]) -> None:
    """Record the error energy of every unit in each precision."""
    for precision in precisions:
        known = session.journal.last("predictions", precision=precision)
        if known is None:
            session.require_time()
            total = _measured_error(session, precision)
            energies = {} if precision == BF16 else _energies(session, precision)
            session.say(f"errors in {precision}: {total:.2e} of the signal")
            errors = unit_errors(tables.units, energies, total, scale_to_total=True)
            session.record("predictions", precision=precision, errors=errors)
            tables.errors[precision] = errors
        else:
            tables.errors[precision] = known["errors"]
    # tables are rounded alike in every precision
    lookups = {
        unit.name: min(errors[unit.name] for errors in tables.errors.values())
        for unit in tables.units
        if unit.kind == "lookup" and tables.errors
    }
    if lookups:
        tables.errors["w8"] = tables.errors.get("w8", {}) | lookups


def _measured_error(session: Session, precision: str) -> float:
    """The output error of the model with one precision everywhere."""
    recipe = float_recipe(BF16) if precision == BF16 else uniform_recipe(precision)
    trial = session.trials.get(session.key(recipe))
    if trial is not None and trial.error is not None:
        return trial.error
    exe = session.executable(recipe)
    exe.reset()
    found = session.metric.error(exe.run)
    exe.reset()
    session.forget()
    return found


def _energies(session: Session, precision: str) -> Energies:
    """Error energies by layer: at the outputs, or at the layers' results where the outputs'
    derivatives do not exist."""
    model = session.model(uniform_recipe(precision))
    session.forget()
    assert isinstance(model, Quantized)
    problem = session.problem
    with suppress(BitwrightError):
        batches = problem.batches[:PREDICTION_BATCHES]
        options = {precision: model}
        found = predict_errors(problem.prepared, options, batches, threads=problem.threads)
        if any(found[precision].values()):
            return found[precision]
    return {
        layer.value: 10 ** (-layer.sqnr_db / 10)
        for layer in model.report.layers
        if layer.sqnr_db is not None
    }


def unit_errors(
    units: Sequence[Unit], energies: Energies, total: float, scale_to_total: bool
) -> dict[str, float]:
    """The error energy of each unit, from energies by layer.

    Layers without a prediction share what remains of the measured `total`. With `scale_to_total`
    the energies are relative and their sum is set to the total.
    """
    found = {
        u.name: sum(energies[layer] for layer in u.layers if layer in energies)
        for u in units
        if any(layer in energies for layer in u.layers)
    }
    known = sum(found.values())
    if scale_to_total and known > 0:
        found = {name: error * total / known for name, error in found.items()}
        known = total
    missing = [unit.name for unit in units if unit.name not in found]
    rest = max(0.0, total - known)
    return found | dict.fromkeys(missing, rest / max(1, len(missing)))
