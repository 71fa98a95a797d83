"""bw.ledger: where the error of a quantized model comes from, and what each fix would cost.

    q = bw.quantize("model.onnx", data=batches)
    ledger = bw.ledger(q, data=others)
    print(ledger)

The unit is the energy of the outputs' error against the float model, relative to the outputs' own
energy. Each line is one cause of error in one layer. Its share is its part of the error; the shares
and the printed rest add up to the measured error. Its leave-one-out effect is what the error would
lose if only this cause of this layer were removed (`tuning.attribution`). Effects on the SQNR and
on the user's metric are predictions, those of fixes are measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from bitwright.errors import BitwrightError, GraphError
from bitwright.frontend.load import load
from bitwright.ir.arrays import Array
from bitwright.ir.graph import Graph
from bitwright.passes.manager import run_passes
from bitwright.pipeline import INFERENCE, PRECISION
from bitwright.quant.data.batches import Batch, Batches, Transform
from bitwright.quant.model.layer_names import LayerNames
from bitwright.quant.model.quantize import Quantized
from bitwright.tuning import ledger_text
from bitwright.tuning.attribution import (
    Attribution,
    Line,
    Reference,
    attribute_with,
    compiled,
    measure_layers,
    prepared,
)
from bitwright.tuning.fixes import (
    SMOOTHING,
    TEXTS,
    Fix,
    Variants,
    action_for,
    actions_for,
    best_of,
    describe,
    score,
    time_added,
)
from bitwright.tuning.flips import Flip, Flips
from bitwright.tuning.instrumented import Instrumented
from bitwright.tuning.local_errors import Range
from bitwright.tuning.matching import Matching
from bitwright.tuning.requantized import channel_ranges, product_of
from bitwright.tuning.schemes import scheme_of
from bitwright.tuning.seen_ranges import seen_ranges

FIXES = 5
"""Fixes that are built and measured."""
LARGE_REST = 0.2
LEAST_CHANGE = 0.005
"""The relative change of the error from which on a fix's score counts for predictions."""


@dataclass
class LedgerLine:
    """One cause of error in one layer."""

    layer: str
    """A readable name."""
    value: str
    """The name of its result in the graph, as in the quantization report."""
    op: str
    scheme: str
    cause: str
    share: float
    """Its part of the error energy."""
    leave_one_out: float
    """What the error energy would lose without it."""
    predicted_sqnr_db: float | None
    """The outputs' SQNR without it; None if no error would be left."""
    predicted_metric: float | None = None
    fix: Fix | None = None
    """What helps; of several measured ones the fastest that helps about as much as the best."""
    alternatives: list[Fix] = field(default_factory=list)
    """The other measured fixes."""


@dataclass(repr=False)
class Ledger:
    """The error of a quantized model, by layer and cause; lines with the largest share first."""

    outputs: dict[str, float | None]
    """SQNR of each float output in dB; None without an error."""
    error_energy: float
    """Relative to the signal, mean of all outputs."""
    lines: list[LedgerLine] = field(default_factory=list)
    rest: float = 0.0
    """The part of the error that no line explains."""
    flips: list[Flip] = field(default_factory=list)
    flip_count: int = 0
    rows: int = 0
    """Answers compared."""
    metric: dict[str, Any] | None = None
    """Name, and the scores of the float and the quantized model."""
    notes: list[str] = field(default_factory=list)
    batches: int = 0
    layers: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Share and leave-one-out effect of all causes of a layer, by name of its result."""

    @property
    def sqnr_db(self) -> float | None:
        """SQNR of the outputs; None without an error."""
        return _decibels(self.error_energy)

    def to_dict(self) -> dict[str, Any]:
        """The ledger as a dict of plain values, without infinities."""
        return {
            "outputs": {name: {"sqnr_db": db} for name, db in self.outputs.items()},
            "signal_energy": 1.0,
            "error_energy": self.error_energy,
            "sqnr_db": self.sqnr_db,
            "lines": [asdict(line) for line in self.lines],
            "rest": self.rest,
            "flips": [flip.to_dict() for flip in self.flips],
            "flip_count": self.flip_count,
            "rows": self.rows,
            "metric": self.metric,
            "notes": list(self.notes),
            "batches": self.batches,
            "layers": [
                {"value": name, "share": share, "leave_one_out": effect}
                for name, (share, effect) in self.layers.items()
            ],
        }

    def save(self, path: Any) -> None:
        """Write the ledger as JSON."""
        ledger_text.save(self.to_dict(), path)

    def __str__(self) -> str:
        return ledger_text.table(self.to_dict())

    def __repr__(self) -> str:
        db = "no error" if self.sqnr_db is None else f"{self.sqnr_db:.1f} dB"
        return f"<ledger of {len(self.lines)} lines: {db}>"

    def _repr_html_(self) -> str:
        return ledger_text.html(self.to_dict())


def ledger(
    model: Any,
    data: Any,
    eval: Callable[[Any], Any] | None = None,
    *,
    float_model: Any = None,
    calibration: Any = None,
    transform: Transform | None = None,
    subset: int | None = None,
    fixes: int = FIXES,
    threads: int | None = None,
) -> Ledger:
    """The error of a quantized model on data, split by layer and cause, with fixes and their costs.

    `model` is what `bw.quantize` returned, or a quantized graph or file; those need `float_model`,
    the model that was quantized. `data` is what `bw.calibrate` accepts; `subset` limits the number
    of batches. `eval` gets a callable from a dict of arrays to a dict of arrays and returns a
    number, or a dict whose first number is the metric. `calibration` is the data that the model was
    calibrated with, to tell values outside of the calibrated range from deliberate clipping; what
    `bw.quantize` returned contains these ranges. The `fixes` with the largest effect are built and
    measured.
    """
    source, quantized, shares, observed = _models(model, float_model)
    batches = Batches(data, source, transform=transform, subset=subset)
    held: Iterable[Batch] = batches if batches.is_repeatable else list(batches)
    first = next(iter(held))
    matching = Matching(source, quantized)
    if calibration is not None:
        observed = seen_ranges(matching, Batches(calibration, source, transform=transform), threads)
    reference = Reference(source, held, threads)
    state = _State(matching, reference, shares, observed, threads)
    found = state.attribution()
    made = Ledger(state.sqnr, found.error, batches=state.batches)
    made.flips, made.flip_count, made.rows = state.flips.found, state.flips.count, state.flips.rows
    made.rest = found.rest
    made.layers = {name: (line.share, line.left_out) for name, line in found.layers.items()}
    names, schemes = LayerNames(source), _schemes(matching)
    lines = sorted(found.lines, key=lambda line: -line.share)
    made.lines = [_line(line, found.error, names, schemes) for line in lines if line.is_present]
    _measure_fixes(made, state, found, first, eval, fixes)
    made.notes += state.notes + batches.notes() + _notes(made, matching)
    return made


def _models(
    model: Any, float_model: Any
) -> tuple[Graph, Graph, Mapping[str, Array], Mapping[str, Range]]:
    """The prepared float graph, the quantized graph, factors and observed ranges."""
    if isinstance(model, Quantized):
        if float_model is None and model.source is not None:
            return model.source, model.graph, model.equalized, model.observed
        model = model.graph
    if float_model is None:
        raise BitwrightError(
            "the ledger compares a quantized model with its float model",
            expected="what bw.quantize returned, or float_model=",
            hint="Pass the model that was quantized as float_model.",
        )
    quantized = run_passes(load(model), INFERENCE)
    source = float_model.graph if isinstance(float_model, Quantized) else load(float_model)
    source = prepared(source)
    names = [{v.name for v in graph.inputs} for graph in (source, quantized)]
    if names[0] != names[1]:
        raise BitwrightError(
            "the quantized model has other inputs than the float model",
            expected=", ".join(sorted(names[0])),
            found=", ".join(sorted(names[1])),
        )
    return source, quantized, {}, {}


class _State:
    """The models of one ledger, and what was measured on the way."""

    def __init__(
        self,
        matching: Matching,
        reference: Reference,
        shares: Mapping[str, Array],
        observed: Mapping[str, Range],
        threads: int | None,
    ) -> None:
        self.matching, self.reference = matching, reference
        self.shares, self.observed, self.threads = shares, observed, threads
        self.flips = Flips()
        self.noise = dict.fromkeys(reference.outputs, 0.0)
        self.batches = 0
        self.notes: list[str] = []

    def attribution(self) -> Attribution:
        quantized = self.matching.quantized
        try:
            model = Instrumented(self.matching, self.shares, self.observed, threads=self.threads)
        except GraphError as error:
            self.notes.append(
                f"the float model has no gradient ({error}), so leaving out each layer was "
                "measured, and causes are not told apart"
            )
            return measure_layers(
                self.matching, self.reference, self.shares, quantized, seen=self._seen
            )
        return attribute_with(model, self.reference, quantized, seen=self._seen)

    def _seen(self, number: int, exact: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        self.batches = number + 1
        self.flips.add(number, exact, found)
        for name, error in self.reference.error(exact, found).items():
            self.noise[name] += float(np.vdot(error, error))

    @property
    def sqnr(self) -> dict[str, float | None]:
        count = sum(unit > 0 for unit in self.reference.units.values())
        return {
            name: _decibels(self.noise[name] * count)
            for name, unit in self.reference.units.items()
            if unit > 0
        }


def _line(line: Line, error: float, names: LayerNames, schemes: Mapping[str, str]) -> LedgerLine:
    left = error - line.left_out
    return LedgerLine(
        names.readable(line.layer),
        line.layer,
        line.op,
        schemes[line.layer],
        line.cause,
        line.share,
        line.left_out,
        _decibels(left),
    )


def _schemes(matching: Matching) -> dict[str, str]:
    return {site.layer: scheme_of(matching, site) for site in matching.sites}


def _measure_fixes(
    made: Ledger,
    state: _State,
    found: Attribution,
    batch: Batch,
    evaluate: Callable[[Any], Any] | None,
    count: int,
) -> None:
    """Give each line a fix, and measure those with the largest effect."""
    quantized, reference = state.matching.quantized, state.reference
    base = compiled(quantized, state.threads)
    curve: list[tuple[float, float]] = []
    name = ""
    if evaluate is not None:
        exact = compiled(state.matching.float_graph, state.threads)
        (name, before), (_, after) = score(evaluate, exact), score(evaluate, base)
        made.metric = {"name": name, "float": before, "quantized": after}
        curve = [(0.0, before), (found.error, after)]
    wanted: dict[tuple[str, str], list[str]] = {}  # actions by layer and cause
    for line in made.lines:
        if len(wanted) < count and line.leave_one_out > 0:
            is_product = product_of(state.matching, line.value) is not None
            wanted[line.value, line.cause] = actions_for(line.cause, line.scheme, is_product)
    layers = {layer for (layer, _), actions in wanted.items() if SMOOTHING in actions}
    batches = (one for one, _ in reference)
    seen = channel_ranges(state.matching, layers, batches, state.threads)
    variants = Variants(state.matching, state.shares, found.means, seen)
    measured: dict[tuple[str, str], Fix] = {}
    exes: dict[tuple[str, str], Any] = {}
    schemes = {line.value: line.scheme for line in made.lines}
    for (layer, _), actions in wanted.items():
        for action in actions:
            if (layer, action) in measured or (action == SMOOTHING and layer not in seen):
                continue
            measured[layer, action] = fix = Fix(action, "")
            graph = variants.graph(layer, action, schemes[layer])
            exes[layer, action] = exe = compiled(graph, state.threads)
            fix.bytes = variants.added_bytes(graph)
            fix.error = reference.energy(exe)
            fix.sqnr_db = _decibels(fix.error)
            if made.metric is not None:
                value = score(evaluate, exe)[1]
                fix.metric = value - made.metric["quantized"]
                curve.append((fix.error, value))
    for key, seconds in zip(exes, time_added(base, list(exes.values()), batch), strict=True):
        measured[key].seconds = seconds
    for fix in measured.values():
        fix.text = describe(fix, made.sqnr_db, name)
    for line in made.lines:
        known = [
            measured[line.value, action]
            for action in wanted.get((line.value, line.cause), ())
            if (line.value, action) in measured
        ]
        if known:
            line.fix = best_of(known, found.error)
            line.alternatives = [fix for fix in known if fix is not line.fix]
        else:
            action = action_for(line.cause, line.scheme)
            line.fix = measured.get((line.value, action)) or Fix(action, TEXTS[action])
    for line in made.lines if curve else ():
        line.predicted_metric = _at(curve, found.error - line.leave_one_out)


def _at(curve: list[tuple[float, float]], error: float) -> float:
    """The metric at an output error, by the median slope from the quantized model's score to the
    float model's and to those of fixes; of two middle slopes the flatter one."""
    (at, value), others = curve[1], [curve[0], *curve[2:]]
    slopes = [(m - value) / (e - at) for e, m in others if abs(e - at) > LEAST_CHANGE * at]
    if not slopes:
        return value
    middle = sorted(slopes)[(len(slopes) - 1) // 2 : len(slopes) // 2 + 1]
    return value + min(middle, key=abs) * (max(error, 0.0) - at)


def _notes(made: Ledger, matching: Matching) -> list[str]:
    found = []
    if not matching.sites:
        found.append("no layer of the quantized model differs from the float model")
    if made.error_energy and abs(made.rest) > LARGE_REST * made.error_energy:
        found.append(
            f"the lines explain only {1 - made.rest / made.error_energy:.0%} of the error: the "
            "model is far from linear on this data, or names of values differ"
        )
    if matching.quantized.meta.get(PRECISION):
        found.append("the error of lower float precision is part of the rest")
    return found


def _decibels(energy: float) -> float | None:
    """The SQNR of a relative error; None without an error."""
    return -10 * math.log10(energy) if energy > 0 else None
