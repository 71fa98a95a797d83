"""bw.quantize: a trained model and data in, an 8-bit model and its report out.

    q = bw.quantize("model.onnx", data=batches)
    print(q.report)
    q.save("model-int8.onnx")

One pass over the data collects statistics of every product's input. Each quantization point gets a
scheme by measured error, weights are rounded to minimize the error of the products' results, and
mean errors are corrected in the biases. The outputs of the quantized model are compared with the
float model's on calibration batches; if the error is too large, the worst layers fall back to a
more accurate scheme. The report gives the error on held-out batches. `quant.model.stages` has the
stages.
"""

from __future__ import annotations

import importlib
import time
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bitwright.backends.cpu.cache.kernel_store import compiler_workers
from bitwright.errors import CalibrationError
from bitwright.frontend.language.source import is_language_model
from bitwright.frontend.load import load
from bitwright.ir.arrays import Array
from bitwright.ir.graph import Graph
from bitwright.passes.precision.policy import Policy, policy
from bitwright.quant.calibration.blas import products_on_one_thread
from bitwright.quant.calibration.interrupt import saved_on_interrupt
from bitwright.quant.calibration.ranges import Ranges
from bitwright.quant.calibration.run import CalibrationRun
from bitwright.quant.calibration.stats_file import StatsFile
from bitwright.quant.data.batches import Batches, Transform
from bitwright.quant.data.extents import InputExtent, input_extents
from bitwright.quant.data.traced import with_graph
from bitwright.quant.model import stages
from bitwright.quant.model.config import QuantConfig, as_recipe
from bitwright.quant.model.recipe import NO_DATA_HINT, Recipe
from bitwright.quant.model.report import QuantizationReport
from bitwright.quant.model.static_ranges import find_ranges
from bitwright.warn import DataWarning

WIDE = 4096
"""Products with more terms than this round their weights on all threads."""
PROVER = "bitwright.proof.attach:attach_proof"
"""Adds the proof to a saved file; imported on first use."""
LANGUAGE_MODELS = "bitwright.llm.quantize.run:quantize_model"
"""Quantizes language models; imported on first use."""
_POLICIES = {"bf16": "mixed_bf16", "f16": "mixed"}
"""Policies by float precision."""


@dataclass(frozen=True, repr=False)
class Quantized:
    """A quantized model: its graph in Q/DQ form and the report."""

    graph: Graph
    report: QuantizationReport
    consumer: str = "any"
    """The runtime that will run the file, unless `save` names another."""
    inputs: Mapping[str, InputExtent] = field(default_factory=dict)
    """Sizes and ranges of the inputs in the calibration data."""
    original: Any = None
    """The float model as it was given, for `bw.recalibrate`: its path or graph."""
    recipe: Recipe | None = None
    source: Graph | None = None
    """The float model in the form that was quantized; files do not contain it."""
    equalized: Mapping[str, Array] = field(default_factory=dict)
    """Factors of the results that equalization scaled, by name of the product."""
    observed: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """The range that calibration saw at each static quantization, by name of the product."""

    def save(
        self, path: str | Path, *, proof: bool | Mapping[str, Any] = True, **options: Any
    ) -> None:
        """Write the model (.onnx or .bw); the options are those of `bw.export_onnx`.

        The file gets digests of its weights and synthetic golden inputs with their outputs, which
        `bw.verify_file` reruns. `proof=False` leaves them out; a batch of inputs is stored instead
        of synthetic ones.
        """
        if Path(path).suffix == ".onnx":
            options = {"consumer": self.consumer} | options
        self.graph.save(path, **options)
        if proof is not False and Path(path).suffix in (".onnx", ".bw"):
            module, function = PROVER.split(":")
            attach = getattr(importlib.import_module(module), function)
            attach(path, self.report, self.inputs, proof, options.get("consumer", ""))

    def __repr__(self) -> str:
        return f"<quantized {self.graph.name!r}: {self.report.summary()}>"

    def _repr_html_(self) -> str:
        return self.report._repr_html_()


def quantize(
    model: Any,
    data: Any = None,
    recipe: str | Path | Mapping[str, Any] | Recipe | QuantConfig = "int8",
    *,
    statistics: str | Path | StatsFile | Ranges | None = None,
    transform: Transform | None = None,
    subset: int | None = None,
    threads: int | None = None,
    progress: bool | None = None,
    float_precision: str | Policy | None = None,
    widths: Mapping[str, int | str] | None = None,
    size_budget: str | int | None = None,
) -> Quantized:
    """Quantize a model (graph, path, bytes, ModelProto or PyTorch module) with calibration data.

    `data` is what `bw.calibrate` accepts; it is iterated once. `statistics` is a file for the
    collected statistics. It is also written when the run is interrupted; the next run with it
    continues after the batches that it contains, and needs no data if there are none left.
    `statistics` may also be what `bw.calibrate` returned, or its file: the model then gets static
    ranges and nearest rounding, and nothing is measured. A weight-only recipe with rounding
    "nearest" needs neither. Float layers run at `float_precision` ("bf16", "f16" or a policy; None:
    the recipe's) in bitwright, and in f32 in other runtimes.

    A language model (a GGUF file or a Hugging Face folder) is quantized layer by layer by the
    recipe "w4", "w8" or "int8": `llm.quantize.run.quantize_model`, whose result has `save` and
    `report` too. `data` is then text or tokens, `widths` gives bits by pattern, and `size_budget`
    ("90MB") chooses them by measured errors.
    """
    if isinstance(model, (str, Path)) and is_language_model(Path(model)):
        given = (statistics, transform, subset, float_precision)
        found: Quantized = _language_model(
            model, data, recipe, given, widths=widths, size_budget=size_budget, threads=threads
        )
        return found
    if widths is not None or size_budget is not None:
        raise CalibrationError(
            "widths and size_budget are options of language models",
            hint="A recipe gives the precisions of other models: docs/quantization.md.",
        )
    begin = time.perf_counter()
    rules = as_recipe(recipe)
    precision = rules.float_precision if float_precision is None else float_precision
    float_policy = float_policy_of(precision)
    ranges = find_ranges(statistics, has_data=data is not None)
    file = StatsFile.at(statistics) if ranges is None else None
    has_data = _has_data(rules, data, file, ranges)
    with compiler_workers(), ExitStack() as stack:
        model, data = with_graph(model, data, transform)
        state = stages.prepare(load(model), rules, float_policy, threads, ranges)
        stages.find_quantization_points(state)
        batches = None
        if data is not None:
            batches = Batches(data, state.graph, transform=transform, subset=subset)
        if has_data:
            run = CalibrationRun(state.graph, state.points, batches, file, threads)
            state.calibration = run
            stack.enter_context(saved_on_interrupt(run.save))
            if all(p.matrix.shape[2] <= WIDE for s in state.points for p in s.products):
                stack.enter_context(products_on_one_thread())
        stages.calibrate(state, progress)
        stages.choose_schemes(state)
        stages.search_mixed_precision(state)
        for attempt in range(1, stages.MAX_ATTEMPTS + 1):
            stages.round_weights(state)
            stages.rewrite_graph(state)
            is_last = attempt == stages.MAX_ATTEMPTS
            if stages.meets_output_sqnr(state) or is_last or not stages.fall_back(state):
                break
        stages.verify_on_held_out(state)
    if state.calibration is not None:
        state.calibration.finish()
    report = stages.report(state)
    report.notes += [] if batches is None else batches.notes()
    report.notes += report.already_quantized()
    if has_data:
        for note in report.notes:
            warnings.warn(note, DataWarning, stacklevel=2)
    report.seconds = time.perf_counter() - begin
    return Quantized(
        state.quantized,
        report,
        consumer=state.rules.consumer,
        inputs={} if state.calibration is None else input_extents(state.calibration.checked),
        original=model if isinstance(model, (str, Path)) else state.original,
        recipe=rules,
        source=state.graph,
        equalized=stages.equalized(state),
        observed=stages.observed(state),
    )


def _language_model(
    model: str | Path, data: Any, recipe: Any, given: tuple[Any, ...], **options: Any
) -> Any:
    """The quantized language model; it cannot use the other options of `quantize`."""
    if any(option is not None for option in given):
        raise CalibrationError(
            "statistics, transform, subset and float_precision are not for language models"
        )
    if not isinstance(recipe, str):
        raise CalibrationError("a language model needs the name of a recipe", found=type(recipe))
    module, function = LANGUAGE_MODELS.split(":")
    return getattr(importlib.import_module(module), function)(model, data, recipe, **options)


def float_policy_of(precision: str | Policy) -> Policy:
    """The policy of float layers that a precision or a policy names."""
    return policy(_POLICIES.get(str(precision), precision))


def _has_data(rules: Recipe, data: Any, file: StatsFile | None, ranges: Ranges | None) -> bool:
    """Whether there is data or a file of statistics; raises if the recipe needs one."""
    if file is not None:
        file.require_usable(has_data=data is not None)
    elif data is None and ranges is None and rules.needs_data:
        raise CalibrationError(
            "quantization needs data to find the ranges of the model's values",
            expected="data, or a file of statistics",
            hint=NO_DATA_HINT,
        )
    return data is not None or file is not None
