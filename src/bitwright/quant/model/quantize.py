"""bw.quantize: a trained model and data in, an 8-bit model and what it cost out.

    q = bw.quantize("model.onnx", data=batches)
    print(q.report)
    q.save("model-int8.onnx")

One pass over the data shows every product's input (`quant.calibration.stats`). Each site gets a scheme by
measured error (`quant.model.assign`), weights are rounded to keep the products' results, mean errors go
into the biases (`quant.algorithms`), and the outputs of the result are compared with the float
model's on calibration batches: where they lost too much, the worst layers take a safer scheme. The
figure in the report comes from batches that were held out of all this.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bitwright import system
from bitwright.backends.cpu.cache.kernel_store import compiler_workers
from bitwright.errors import CalibrationError
from bitwright.frontend.load import load
from bitwright.ir.graph import Graph
from bitwright.passes.manager import run_passes
from bitwright.passes.precision.policy import Policy, policy, require_layers
from bitwright.passes.simplify.canonicalize import canonicalize
from bitwright.passes.simplify.expose_weights import expose_weights
from bitwright.passes.simplify.separate_phases import separate_phases
from bitwright.passes.simplify.share_constants import share_constants
from bitwright.passes.simplify.sink_constants import sink_constants
from bitwright.pipeline import INFERENCE, PRECISION
from bitwright.quant.calibration.blas import products_on_one_thread
from bitwright.quant.calibration.interrupt import saved_on_interrupt
from bitwright.quant.calibration.run import CalibrationRun
from bitwright.quant.calibration.stats import CalibrationStats
from bitwright.quant.calibration.stats_file import StatsFile
from bitwright.quant.core.formats import FORMATS
from bitwright.quant.data.batches import Batches, Transform
from bitwright.quant.data.traced import with_graph
from bitwright.quant.model.assign import Choice, assign, fallback, without_ignored
from bitwright.quant.model.attention import Attentions
from bitwright.quant.model.carried_state import carries_state
from bitwright.quant.model.embeddings import Lookup, chosen_lookups
from bitwright.quant.model.equalize import relate_channels
from bitwright.quant.model.layer_names import LayerNames
from bitwright.quant.model.mixed_precision_search import open_activations, search_mixed_precision
from bitwright.quant.model.points import find_points
from bitwright.quant.model.power_of_two_scales import use_power_of_two_scales
from bitwright.quant.model.recipe import NO_DATA_HINT, Recipe
from bitwright.quant.model.recipe import recipe as find_recipe
from bitwright.quant.model.report import QuantizationReport, make_report, weight_bytes
from bitwright.quant.model.rewrite import apply_choices
from bitwright.quant.model.sensitivity import Losses, SensitivityAnalysis
from bitwright.quant.model.upcast import upcast_halves
from bitwright.quant.model.upcast_rope_tables import upcast_rope_tables
from bitwright.quant.model.weights.choose import ActivationQuant
from bitwright.quant.model.weights.nearest import decibels
from bitwright.quant.model.weights.weights import (
    WeightFormat,
    Weights,
    quantize_weights,
    round_weights,
)
from bitwright.quant.model.work import Work
from bitwright.warn import DataWarning

Array = np.ndarray[Any, Any]
GUARD_ROUNDS = 4
WIDE = 4096
"""Terms of a product from which on rounding its weights is worth all threads."""
_POLICIES = {"bf16": "mixed_bf16", "f16": "mixed"}
"""What a float precision stands for."""


@dataclass(frozen=True, repr=False)
class Quantized:
    """A quantized model: its graph in Q/DQ form and the report of what each layer got."""

    graph: Graph
    report: QuantizationReport
    consumer: str = "any"
    """Who runs the file, unless `save` says another."""

    def save(self, path: str | Path, **options: Any) -> None:
        """Write the model (.onnx or .bw); `bw.export_onnx` has the options."""
        if Path(path).suffix == ".onnx":
            options = {"consumer": self.consumer} | options
        self.graph.save(path, **options)

    def __repr__(self) -> str:
        return f"<quantized {self.graph.name!r}: {self.report.summary()}>"

    def _repr_html_(self) -> str:
        return self.report._repr_html_()


def quantize(
    model: Any,
    data: Any = None,
    recipe: str | Path | Mapping[str, Any] | Recipe = "int8",
    *,
    statistics: str | Path | StatsFile | None = None,
    transform: Transform | None = None,
    subset: int | None = None,
    threads: int | None = None,
    progress: bool | None = None,
    float_precision: str | Policy = "f32",
) -> Quantized:
    """Quantize a model (graph, path, bytes, ModelProto or PyTorch module) with calibration data.

    `data` is whatever `bw.calibrate` takes. No batch is needed twice, except the few that the
    result is checked on. What the data showed goes to the file `statistics`, also when the run is
    interrupted; the next run with that file goes on behind the batches that it holds, and needs no
    data if there are none. Nor does a recipe for weights alone with rounding "nearest". What stays
    float runs at `float_precision` ("bf16", "f16" or a policy) wherever bitwright runs the model,
    and is checked so; other runtimes run it as f32.
    """
    begin = time.perf_counter()
    rules = find_recipe(recipe)
    chosen = policy(_POLICIES.get(str(float_precision), float_precision))
    file = StatsFile.at(statistics)
    if file is not None:
        file.require_usable(has_data=data is not None)
    elif data is None and rules.needs_data:
        raise CalibrationError(
            "there is nothing to learn the sizes of the model's values from",
            expected="data, or a file of statistics",
            hint=NO_DATA_HINT,
        )
    with compiler_workers():
        model, data = with_graph(model, data, transform)
        given = load(model)
        graph, names = prepare(given)
        rules = names.resolved(rules)
        require_layers(chosen, [given, graph])
        if data is None and file is None:
            result = _without_data(graph, rules, chosen, names)
            result.report.float_bytes = weight_bytes(given)
            result.report.seconds = time.perf_counter() - begin
            return result
        batches = None if data is None else Batches(data, graph, transform=transform, subset=subset)
        calibration = CalibrationRun(graph, find_points(graph), batches, file, threads)
        is_narrow = all(p.matrix.shape[2] <= WIDE for s in calibration.points for p in s.products)
        alone = products_on_one_thread() if is_narrow else nullcontext()
        with saved_on_interrupt(calibration.save), alone:
            calibration.run(progress)
            result = _quantize(graph, calibration, rules, chosen, threads, names)
    calibration.finish()
    result.report.float_bytes = weight_bytes(given)
    left_out = [] if batches is None else batches.notes()
    result.report.notes = [*calibration.notes(), *left_out, *result.report.already_quantized()]
    for note in result.report.notes:
        warnings.warn(note, DataWarning, stacklevel=2)
    result.report.seconds = time.perf_counter() - begin
    return result


def prepare(model: Graph) -> tuple[Graph, LayerNames]:
    """The model in the form that is quantized: simple, in f32, every weight a constant of its
    product, and no weight held twice; and what its layers are called."""
    given = run_passes(model, (*INFERENCE, sink_constants, canonicalize))
    graph = upcast_halves(given)
    if graph is not given:
        graph = run_passes(graph, INFERENCE)
    graph = run_passes(graph, (expose_weights, separate_phases, canonicalize))
    return run_passes(graph, (share_constants,)), LayerNames(graph)


def _without_data(graph: Graph, rules: Recipe, chosen: Policy, names: LayerNames) -> Quantized:
    """Weights rounded to the nearest values, which needs no data, and measured by themselves."""
    points, _ = without_ignored(find_points(graph), {}, rules)
    choices = assign(points, {}, rules)
    lookups = chosen_lookups(graph, points, rules)
    found = _weights(choices, {}, _weight_format(rules), {}, lookups)
    kept = [one for one in lookups if one.product is None or one.product.name in found]
    result = apply_choices(graph, choices, found, kept, equalize=False)
    if rules.matches_onnxruntime:
        result = upcast_rope_tables(result)
    if not chosen.is_plain:
        result = result.with_(meta={**result.meta, PRECISION: chosen.to_json()})
    work = Work(graph, None)
    attentions = Attentions(graph, rules, work.given)
    report = make_report(
        graph,
        result,
        choices,
        found,
        lookups,
        (Losses(), 0),
        work,
        rules.name,
        attentions,
        names,
    )
    report.is_measured = False
    report.notes = [
        "there was no data: the SQNR of a layer is that of its weights, and work is counted with "
        "free sizes of 1",
        *report.already_quantized(),
    ]
    return Quantized(result, report, rules.consumer)


def _weight_format(rules: Recipe) -> WeightFormat:
    return WeightFormat(
        rules.weight_bits,
        rules.block or (FORMATS[rules.weight_format].block if rules.weight_format else 0),
        rules.rounding,
        rules.bias_correction,
        rules.ranges,
        rules.weight_format,
        rules.matches_onnxruntime,
    )


def _quantize(
    graph: Graph,
    calibration: CalibrationRun,
    rules: Recipe,
    chosen: Policy,
    threads: int | None,
    names: LayerNames,
) -> Quantized:
    """Choose, round and check, until the outputs keep what the recipe asks for."""
    points, stats = without_ignored(calibration.points, calibration.stats, rules)
    form = _weight_format(rules)
    lookups = chosen_lookups(graph, points, rules)
    if rules.equalize:
        relate_channels(points)
    choices = assign(points, stats, rules)
    weights: dict[str, tuple[ActivationQuant | None, dict[str, Weights]]] = {}
    work = Work(graph, calibration.checked[0], threads)
    attentions = Attentions(graph, rules, work.given)
    sensitivity = SensitivityAnalysis(
        graph,
        open_activations(choices, rules),
        calibration.checked,
        threads,
        attentions.open,
        calibration.held_out,
    )
    choices = search_mixed_precision(choices, stats, rules, sensitivity, work, carries_state(graph))
    if rules.matches_onnxruntime:
        choices = use_power_of_two_scales(graph, choices)
    attentions.choose(sensitivity)
    sensitivity.forget_switches()
    for _ in range(GUARD_ROUNDS):
        found = _weights(choices, stats, form, weights, lookups)
        kept = [one for one in lookups if one.product is None or one.product.name in found]
        result = apply_choices(graph, choices, found, kept, equalize=rules.equalize)
        result = attentions.apply(result)
        if rules.matches_onnxruntime:
            result = upcast_rope_tables(result)
        if not chosen.is_plain:
            result = result.with_(meta={**result.meta, PRECISION: chosen.to_json()})
        losses = sensitivity.of(result)
        if (
            decibels(losses.worst) >= rules.min_output_sqnr_db
            or "float" not in rules.schemes_allowed
        ):
            break
        if attentions.chosen:
            attentions.give_up()
            continue
        next_choices = fallback(choices, stats, rules)
        if next_choices == choices:
            break
        choices = (
            use_power_of_two_scales(graph, next_choices)
            if rules.matches_onnxruntime
            else next_choices
        )
    measured = sensitivity.on_held_out() or (losses, 0)
    report = make_report(
        graph, result, choices, found, lookups, measured, work, rules.name, attentions, names
    )
    return Quantized(result, report, rules.consumer)


def _weights(
    choices: list[Choice],
    stats: dict[str, CalibrationStats],
    form: WeightFormat,
    made: dict[str, tuple[ActivationQuant | None, dict[str, Weights]]],
    lookups: list[Lookup],
) -> dict[str, Weights]:
    """Weights of every product that is not left in float; those made before for the same codes of
    what they multiply are used again."""
    found: dict[str, Weights] = {}
    tables = {one.product.name for one in lookups if one.product is not None}
    for choice in choices:
        if choice.scheme == "float":
            continue
        name = choice.point.name
        before = made.get(name)
        if before is None or before[0] is not choice.activation:
            seen = stats.get(name)
            rounded = (
                round_weights(choice.point, form, tables)
                if seen is None
                else quantize_weights(seen, choice.activation, form, tables)
            )
            made[name] = choice.activation, rounded
        found.update(made[name][1])
    system.trim_memory()
    return found
