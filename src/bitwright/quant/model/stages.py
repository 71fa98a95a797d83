"""The stages of `bw.quantize`; each reads and extends one `QuantizationState`."""

from __future__ import annotations

from dataclasses import dataclass, field

from bitwright import system
from bitwright.ir.arrays import Array
from bitwright.ir.graph import Graph
from bitwright.passes.manager import run_passes
from bitwright.passes.precision.policy import Policy, require_layers
from bitwright.passes.simplify.canonicalize import canonicalize
from bitwright.passes.simplify.expose_weights import expose_weights
from bitwright.passes.simplify.separate_phases import separate_phases
from bitwright.passes.simplify.share_constants import share_constants
from bitwright.passes.simplify.sink_constants import sink_constants
from bitwright.pipeline import INFERENCE, PRECISION
from bitwright.quant.calibration.ranges import Ranges
from bitwright.quant.calibration.run import CalibrationRun
from bitwright.quant.calibration.stats import CalibrationStats
from bitwright.quant.calibration.time_limit import check_time
from bitwright.quant.core.formats import FORMATS
from bitwright.quant.model import mixed_precision_search
from bitwright.quant.model.assign import Choice, assign, fallback, without_ignored
from bitwright.quant.model.attention import Attentions
from bitwright.quant.model.calibrated_ranges import with_calibrated_ranges
from bitwright.quant.model.carried_state import carries_state
from bitwright.quant.model.embeddings import Lookup, chosen_lookups
from bitwright.quant.model.layer_names import LayerNames
from bitwright.quant.model.points import QuantizationPoint, find_points
from bitwright.quant.model.products import Product
from bitwright.quant.model.recipe import Recipe
from bitwright.quant.model.report import QuantizationReport, make_report
from bitwright.quant.model.rewrite import apply_choices
from bitwright.quant.model.sensitivity import Losses, SensitivityAnalysis
from bitwright.quant.model.static_ranges import assign_from_ranges, unmeasured
from bitwright.quant.model.transforms.equalize import folded_shares, relate_channels
from bitwright.quant.model.transforms.power_of_two_scales import use_power_of_two_scales
from bitwright.quant.model.transforms.upcast import upcast_halves
from bitwright.quant.model.transforms.upcast_rope_tables import upcast_rope_tables
from bitwright.quant.model.weights.choose import ActivationQuant
from bitwright.quant.model.weights.nearest import decibels
from bitwright.quant.model.weights.weights import (
    QuantizedWeights,
    WeightFormat,
    quantize_weights,
    round_to_nearest,
)
from bitwright.quant.model.work import Work

MAX_ATTEMPTS = 4
"""Quantized models that are checked before the last one is taken."""
_UNMEASURED = "the SQNR of a layer is that of its weights, and symbolic sizes count as 1"


@dataclass
class QuantizationState:
    """The inputs, intermediate results and result of one quantization."""

    original: Graph
    graph: Graph
    """The prepared float model."""
    names: LayerNames
    rules: Recipe
    policy: Policy
    """The precision of what stays float."""
    threads: int | None = None
    ranges: Ranges | None = None
    """Saved ranges, in place of data."""
    calibration: CalibrationRun | None = None
    """None without data."""
    points: list[QuantizationPoint] = field(default_factory=list)
    stats: dict[str, CalibrationStats] = field(default_factory=dict)
    lookups: list[Lookup] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    work: Work = field(init=False)
    attentions: Attentions = field(init=False)
    sensitivity: SensitivityAnalysis | None = None
    rounded: dict[str, tuple[ActivationQuant | None, dict[str, QuantizedWeights]]] = field(
        default_factory=dict
    )
    """Weights by name of point, with the input quantization that they were rounded for."""
    weights: dict[str, QuantizedWeights] = field(default_factory=dict)
    quantized: Graph = field(init=False)
    losses: Losses = field(default_factory=Losses)
    held_out_batches: int = 0


def simplify(model: Graph) -> Graph:
    """The model simplified and in f32, with every weight a constant that is stored once."""
    given = run_passes(model, (*INFERENCE, sink_constants, canonicalize))
    graph = upcast_halves(given)
    if graph is not given:
        graph = run_passes(graph, INFERENCE)
    graph = run_passes(graph, (expose_weights, separate_phases, canonicalize))
    return run_passes(graph, (share_constants,))


def prepare(
    model: Graph, rules: Recipe, policy: Policy, threads: int | None, ranges: Ranges | None
) -> QuantizationState:
    """Simplify the model and resolve the recipe's patterns."""
    graph = simplify(model)
    names = LayerNames(graph)
    rules = names.resolved(rules if ranges is None else unmeasured(rules))
    require_layers(policy, [model, graph])
    return QuantizationState(model, graph, names, rules, policy, threads, ranges)


def find_quantization_points(state: QuantizationState) -> None:
    """Find the values that products with constant weights read."""
    state.points = find_points(state.graph)


def calibrate(state: QuantizationState, progress: bool | None) -> None:
    """Run the data and collect statistics at every point."""
    if state.calibration is not None:
        state.calibration.run(progress)
        state.stats = state.calibration.stats


def choose_schemes(state: QuantizationState) -> None:
    """Choose the scheme of every point and lookup."""
    state.points, state.stats = without_ignored(state.points, state.stats, state.rules)
    state.lookups = chosen_lookups(state.graph, state.points, state.rules)
    if state.rules.equalize and state.calibration is not None:
        relate_channels(state.points)
    if state.ranges is not None:
        state.choices = assign_from_ranges(state.points, state.ranges, state.rules)
    else:
        state.choices = assign(state.points, state.stats, state.rules)


def search_mixed_precision(state: QuantizationState) -> None:
    """Replace static ranges that cost the outputs too much, and choose int8 attention."""
    run = state.calibration
    state.work = Work(state.graph, None if run is None else run.checked[0], state.threads)
    state.attentions = Attentions(state.graph, state.rules, state.work.given)
    if run is None:
        state.attentions.choose_unmeasured()
    else:
        state.sensitivity = sensitivity = SensitivityAnalysis(
            state.graph,
            mixed_precision_search.open_activations(state.choices, state.rules),
            run.checked,
            state.threads,
            state.attentions.open,
            run.held_out,
        )
        state.choices = mixed_precision_search.search_mixed_precision(
            *(state.choices, state.stats, state.rules, sensitivity, state.work),
            carries_state(state.graph),
        )
        state.attentions.choose(sensitivity)
        sensitivity.forget_switches()
    _match_onnxruntime(state)


def _match_onnxruntime(state: QuantizationState) -> None:
    if state.rules.matches_onnxruntime:
        state.choices = use_power_of_two_scales(state.graph, state.choices)


def round_weights(state: QuantizationState) -> None:
    """Round the weights of every quantized product; reuse those whose input did not change."""
    rules = state.rules

    def form(product: Product) -> WeightFormat:
        return weight_format(rules, product.name)

    tables = {one.product.name for one in state.lookups if one.product is not None}
    state.weights = {}
    for choice in state.choices:
        if choice.scheme == "float":
            continue
        check_time()
        name, activation = choice.point.name, choice.activation
        before = state.rounded.get(name)
        if before is None or before[0] is not activation:
            if (stats := state.stats.get(name)) is None:
                made = round_to_nearest(choice.point, form, tables, activation)
            else:
                made = quantize_weights(stats, activation, form, tables)
            state.rounded[name] = activation, made
        state.weights.update(state.rounded[name][1])
    system.trim_memory()


def weight_format(rules: Recipe, layer: str = "") -> WeightFormat:
    """How the recipe stores and rounds the weights of a layer, named by its path."""
    bits, block = rules.widths.get(layer, (rules.weight_bits, rules.block))
    return WeightFormat(
        bits,
        block or (FORMATS[rules.weight_format].block if rules.has_blocks else 0),
        rules.rounding,
        rules.bias_correction,
        rules.ranges,
        rules.weight_format,
        rules.matches_onnxruntime,
    )


def rewrite_graph(state: QuantizationState) -> None:
    """Write the choices and weights into the graph (Q/DQ form)."""
    lookups, equalize = _lookups(state), _equalizes(state)
    graph = apply_choices(state.graph, state.choices, state.weights, lookups, equalize=equalize)
    graph = state.attentions.apply(graph)
    if state.rules.matches_onnxruntime:
        graph = upcast_rope_tables(graph)
    if not state.policy.is_plain:
        graph = graph.with_(meta={**graph.meta, PRECISION: state.policy.to_json()})
    state.quantized = with_calibrated_ranges(graph, state)


def _lookups(state: QuantizationState) -> list[Lookup]:
    """The lookups whose table is quantized."""
    return [
        one for one in state.lookups if one.product is None or one.product.name in state.weights
    ]


def _equalizes(state: QuantizationState) -> bool:
    has_ranges = state.calibration is not None or state.ranges is not None
    return state.rules.equalize and has_ranges


def equalized(state: QuantizationState) -> dict[str, Array]:
    """The factors of scaled results in the quantized graph, by name of the product."""
    if not _equalizes(state):
        return {}
    tied = {one.product.name for one in _lookups(state) if one.product is not None}
    return folded_shares(state.graph, state.choices, state.weights, tied)


def observed(state: QuantizationState) -> dict[str, tuple[float, float]]:
    """The range of each statically quantized input during calibration, by name of the product.

    It is that of the values that are quantized, after smoothing.
    """
    found: dict[str, tuple[float, float]] = {}
    for choice in state.choices:
        stats, activation = state.stats.get(choice.point.name), choice.activation
        if choice.scheme != "static" or stats is None or activation is None:
            continue
        inverse = 1.0 if activation.factors is None else activation.inverse
        ends = [stats.every.low * inverse, stats.every.high * inverse]
        low, high = float(ends[0].min(initial=0)), float(ends[1].max(initial=0))
        found.update({product.name: (low, high) for product in choice.point.products})
    return found


def meets_output_sqnr(state: QuantizationState) -> bool:
    """Whether the outputs on calibration batches keep what the recipe requires."""
    if state.sensitivity is None:
        return True
    state.losses = state.sensitivity.measure(state.quantized)
    is_met = decibels(state.losses.worst) >= state.rules.min_output_sqnr_db
    return is_met or "float" not in state.rules.schemes_allowed


def fall_back(state: QuantizationState) -> bool:
    """Move attention, then the worst points, to a more accurate scheme; False if none is left."""
    if state.attentions.chosen:
        state.attentions.revert()
        return True
    choices = fallback(state.choices, state.stats, state.rules)
    if choices == state.choices:
        return False
    state.choices = choices
    _match_onnxruntime(state)
    return True


def verify_on_held_out(state: QuantizationState) -> None:
    """Measure the outputs on batches that nothing was learned from, if there are any."""
    measured = None if state.sensitivity is None else state.sensitivity.on_held_out()
    if measured is not None:
        state.losses, state.held_out_batches = measured


def report(state: QuantizationState) -> QuantizationReport:
    """The report of what each layer got and what it cost."""
    made = make_report(state)
    if state.calibration is not None:
        made.notes = state.calibration.notes()
    elif state.ranges is not None:
        made.notes = [
            f"quantized from saved ranges of {state.ranges.batches} batches, with static schemes "
            f"and nearest rounding; nothing was measured: {_UNMEASURED}"
        ]
    else:
        made.notes = [f"there was no data: {_UNMEASURED}"]
    made.is_measured = state.calibration is not None
    return made
