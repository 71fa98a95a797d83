"""bw.quantize: a trained model and data in, an 8-bit model and what it cost out.

    q = bw.quantize("model.onnx", data=batches)
    print(q.report)
    q.save("model-int8.onnx")

One pass over the data shows every product's input (`quant.collect`). Each site gets a scheme by
measured error (`quant.assign`), weights are rounded to keep the products' results, mean errors go
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
from bitwright.backends.cpu.kernel_store import workers_at_hand
from bitwright.errors import CalibrationError
from bitwright.frontend.load import load
from bitwright.ir.graph import Graph
from bitwright.passes.canonicalize import canonicalize
from bitwright.passes.expose_weights import expose_weights
from bitwright.passes.manager import run_passes
from bitwright.passes.precision_policy import Policy, policy, require_layers
from bitwright.passes.separate_phases import separate_phases
from bitwright.passes.share_constants import share_constants
from bitwright.passes.sink_constants import sink_constants
from bitwright.pipeline import INFERENCE, PRECISION
from bitwright.quant.algorithms.choosing import Coding
from bitwright.quant.algorithms.codes import decibels
from bitwright.quant.algorithms.weights import (
    WeightFormat,
    Weights,
    quantize_weights,
    round_weights,
)
from bitwright.quant.angles import widen_angles
from bitwright.quant.apply import apply_choices
from bitwright.quant.assign import Choice, assign, safer, without_ignored
from bitwright.quant.attentions import Attentions
from bitwright.quant.blas import products_on_one_thread
from bitwright.quant.carried_state import carries_state
from bitwright.quant.collect import Evidence
from bitwright.quant.data import Batches, Transform
from bitwright.quant.effects import Effects, Losses
from bitwright.quant.equalize import relate_channels
from bitwright.quant.evidence_file import EvidenceFile
from bitwright.quant.exact_sums import make_sums_exact
from bitwright.quant.gathering import Gathering
from bitwright.quant.interrupt import saved_on_interrupt
from bitwright.quant.layer_names import LayerNames
from bitwright.quant.lookups import Lookup, chosen_lookups
from bitwright.quant.products import find_sites
from bitwright.quant.quantization_report import QuantizationReport, make_report, weight_bytes
from bitwright.quant.recipe import NO_DATA_HINT, Recipe
from bitwright.quant.recipe import recipe as find_recipe
from bitwright.quant.relieve import open_codings, relieve
from bitwright.quant.traced import with_graph
from bitwright.quant.types import FORMATS
from bitwright.quant.widen import widen_halves
from bitwright.quant.work import Work
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
    statistics: str | Path | EvidenceFile | None = None,
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
    file = EvidenceFile.at(statistics)
    if file is not None:
        file.require_usable(has_data=data is not None)
    elif data is None and rules.needs_data:
        raise CalibrationError(
            "there is nothing to learn the sizes of the model's values from",
            expected="data, or a file of statistics",
            hint=NO_DATA_HINT,
        )
    with workers_at_hand():
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
        gathering = Gathering(graph, find_sites(graph), batches, file, threads)
        is_narrow = all(p.matrix.shape[2] <= WIDE for s in gathering.sites for p in s.products)
        alone = products_on_one_thread() if is_narrow else nullcontext()
        with saved_on_interrupt(gathering.save), alone:
            gathering.run(progress)
            result = _quantize(graph, gathering, rules, chosen, threads, names)
    gathering.finish()
    result.report.float_bytes = weight_bytes(given)
    left_out = [] if batches is None else batches.notes()
    result.report.notes = [*gathering.notes(), *left_out, *result.report.already_quantized()]
    for note in result.report.notes:
        warnings.warn(note, DataWarning, stacklevel=2)
    result.report.seconds = time.perf_counter() - begin
    return result


def prepare(model: Graph) -> tuple[Graph, LayerNames]:
    """The model in the form that is quantized: simple, in f32, every weight a constant of its
    product, and no weight held twice; and what its layers are called."""
    given = run_passes(model, (*INFERENCE, sink_constants, canonicalize))
    graph = widen_halves(given)
    if graph is not given:
        graph = run_passes(graph, INFERENCE)
    graph = run_passes(graph, (expose_weights, separate_phases, canonicalize))
    return run_passes(graph, (share_constants,)), LayerNames(graph)


def _without_data(graph: Graph, rules: Recipe, chosen: Policy, names: LayerNames) -> Quantized:
    """Weights rounded to the nearest values, which needs no data, and measured by themselves."""
    sites, _ = without_ignored(find_sites(graph), {}, rules)
    choices = assign(sites, {}, rules)
    lookups = chosen_lookups(graph, sites, rules)
    found = _weights(choices, {}, _weight_format(rules), {}, lookups)
    kept = [one for one in lookups if one.product is None or one.product.name in found]
    result = apply_choices(graph, choices, found, kept, equalize=False)
    if rules.keeps_bits:
        result = widen_angles(result)
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
        rules.keeps_bits,
    )


def _quantize(
    graph: Graph,
    gathering: Gathering,
    rules: Recipe,
    chosen: Policy,
    threads: int | None,
    names: LayerNames,
) -> Quantized:
    """Choose, round and check, until the outputs keep what the recipe asks for."""
    sites, evidence = without_ignored(gathering.sites, gathering.evidence, rules)
    form = _weight_format(rules)
    lookups = chosen_lookups(graph, sites, rules)
    if rules.equalize:
        relate_channels(sites)
    choices = assign(sites, evidence, rules)
    weights: dict[str, tuple[Coding | None, dict[str, Weights]]] = {}
    work = Work(graph, gathering.checked[0], threads)
    attentions = Attentions(graph, rules, work.given)
    effects = Effects(
        graph,
        open_codings(choices, rules),
        gathering.checked,
        threads,
        attentions.open,
        gathering.held_out,
    )
    choices = relieve(choices, evidence, rules, effects, work, carries_state(graph))
    if rules.keeps_bits:
        choices = make_sums_exact(graph, choices)
    attentions.choose(effects)
    effects.forget_switches()
    for _ in range(GUARD_ROUNDS):
        found = _weights(choices, evidence, form, weights, lookups)
        kept = [one for one in lookups if one.product is None or one.product.name in found]
        result = apply_choices(graph, choices, found, kept, equalize=rules.equalize)
        result = attentions.apply(result)
        if rules.keeps_bits:
            result = widen_angles(result)
        if not chosen.is_plain:
            result = result.with_(meta={**result.meta, PRECISION: chosen.to_json()})
        losses = effects.of(result)
        if decibels(losses.worst) >= rules.guard_sqnr or "float" not in rules.schemes_allowed:
            break
        if attentions.chosen:
            attentions.give_up()
            continue
        next_choices = safer(choices, evidence, rules)
        if next_choices == choices:
            break
        choices = make_sums_exact(graph, next_choices) if rules.keeps_bits else next_choices
    measured = effects.on_held_out() or (losses, 0)
    report = make_report(
        graph, result, choices, found, lookups, measured, work, rules.name, attentions, names
    )
    return Quantized(result, report, rules.consumer)


def _weights(
    choices: list[Choice],
    evidence: dict[str, Evidence],
    form: WeightFormat,
    made: dict[str, tuple[Coding | None, dict[str, Weights]]],
    lookups: list[Lookup],
) -> dict[str, Weights]:
    """Weights of every product that is not left in float; those made before for the same codes of
    what they multiply are used again."""
    found: dict[str, Weights] = {}
    tables = {one.product.name for one in lookups if one.product is not None}
    for choice in choices:
        if choice.scheme == "float":
            continue
        name = choice.site.name
        before = made.get(name)
        if before is None or before[0] is not choice.coding:
            seen = evidence.get(name)
            rounded = (
                round_weights(choice.site, form, tables)
                if seen is None
                else quantize_weights(seen, choice.coding, form, tables)
            )
            made[name] = choice.coding, rounded
        found.update(made[name][1])
    system.give_memory_back()
    return found
