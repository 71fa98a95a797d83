"""bw.quantize: a trained model and data in, an 8-bit model and what it cost out.

    q = bw.quantize("model.onnx", data=batches)
    print(q.report)
    q.save("model-int8.onnx")

One pass over the data shows every product's input (`quant.collect`). Each site gets a scheme by
measured error (`quant.assign`), weights are rounded to keep the products' results, mean errors go
into the biases (`quant.algorithms`), and the outputs of the result are compared with the float
model's on calibration batches: where they lost too much, the worst layers take a safer scheme.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bitwright import system
from bitwright.errors import BitwrightError, CalibrationError
from bitwright.executable import Executable
from bitwright.frontend.load import load
from bitwright.ir.feeds import bind_input
from bitwright.ir.graph import Graph
from bitwright.passes.manager import History, run_passes
from bitwright.pipeline import CPU, INFERENCE, make_program
from bitwright.quant.algorithms.weights import WeightFormat, Weights, quantize_weights
from bitwright.quant.apply import apply_choices
from bitwright.quant.assign import Choice, assign, embeddings, safer
from bitwright.quant.collect import Evidence
from bitwright.quant.data import Batch, Batches, Transform
from bitwright.quant.evidence_file import EvidenceFile
from bitwright.quant.gathering import Gathering
from bitwright.quant.interrupt import saved_on_interrupt
from bitwright.quant.products import find_sites
from bitwright.quant.quantization_report import QuantizationReport, make_report
from bitwright.quant.recipe import Recipe
from bitwright.quant.recipe import recipe as find_recipe

Array = np.ndarray[Any, Any]
GUARD_ROUNDS = 4
NUMBERS_COMPARED = 1 << 20
LOST = 1e3
"""The error, relative to its place, of a number that is finite in the float model alone."""


@dataclass(frozen=True)
class Quantized:
    """A quantized model: its graph in Q/DQ form and the report of what each layer got."""

    graph: Graph
    report: QuantizationReport

    def save(self, path: str | Path, **options: Any) -> None:
        """Write the model (.onnx or .bw)."""
        self.graph.save(path, **options)


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
) -> Quantized:
    """Quantize a model (graph, path, bytes or ModelProto) with calibration data.

    `data` is whatever `bw.calibrate` takes. No batch is needed twice, except the few that the
    result is checked on. What the data showed goes to the file `statistics`, also when the run is
    interrupted; the next run with that file goes on behind the batches that it holds, and needs no
    data if there are none.
    """
    begin = time.perf_counter()
    rules = find_recipe(recipe)
    file = EvidenceFile.at(statistics)
    if file is not None:
        file.require_usable(has_data=data is not None)
    elif data is None:
        raise CalibrationError(
            "there is nothing to learn the sizes of the model's values from",
            expected="data, or a file of statistics",
        )
    graph = run_passes(load(model), INFERENCE)
    batches = None if data is None else Batches(data, graph, transform=transform, subset=subset)
    gathering = Gathering(graph, find_sites(graph), batches, file, threads)
    with saved_on_interrupt(gathering.save):
        gathering.run(progress)
        result = _quantize(graph, gathering, rules, threads)
    gathering.finish()
    result.report.seconds = time.perf_counter() - begin
    return result


def _quantize(graph: Graph, gathering: Gathering, rules: Recipe, threads: int | None) -> Quantized:
    """Choose, round and check, until the outputs keep what the recipe asks for."""
    evidence = gathering.evidence
    form = WeightFormat(rules.weight_bits, rules.block, rules.rounding, rules.bias_correction)
    lookups = embeddings(graph, rules)
    choices = assign(gathering.sites, evidence, rules)
    weights: dict[tuple[str, str], dict[str, Weights]] = {}
    check = _Check(graph, gathering.held, threads)
    for _ in range(GUARD_ROUNDS):
        found = _weights(choices, evidence, form, weights)
        result = apply_choices(graph, choices, found, lookups)
        outcome = check.compare(result)
        if outcome.worst >= rules.guard_sqnr or "float" not in rules.schemes_allowed:
            break
        next_choices = safer(choices, evidence, rules)
        if next_choices == choices:
            break
        choices = next_choices
    report = make_report(
        graph, result, choices, found, lookups, outcome.sqnr, check.bindings, rules.name
    )
    return Quantized(result, report)


def _weights(
    choices: list[Choice],
    evidence: dict[str, Evidence],
    form: WeightFormat,
    made: dict[tuple[str, str], dict[str, Weights]],
) -> dict[str, Weights]:
    """Weights of every product that is not left in float; those made before are used again."""
    found: dict[str, Weights] = {}
    for choice in choices:
        if choice.scheme == "float":
            continue
        key = choice.site.name, choice.scheme
        if key not in made:
            made[key] = quantize_weights(evidence[choice.site.name], choice.coding, form)
        found.update(made[key])
    system.give_memory_back()
    return found


@dataclass(frozen=True)
class _Outcome:
    sqnr: dict[str, float]

    @property
    def worst(self) -> float:
        return min(self.sqnr.values(), default=np.inf)


class _Check:
    """Compares a quantized graph's outputs with the float graph's on held batches."""

    def __init__(self, graph: Graph, batches: list[Batch], threads: int | None) -> None:
        self.batches, self.threads = batches, threads
        exe = self._compile(graph)
        self.expected = [exe.run(batch) for batch in batches]
        del exe
        self.bindings = _bindings(graph, batches[0])

    def _compile(self, graph: Graph) -> Executable:
        history = History()
        fused = run_passes(graph, CPU, history)
        return Executable(graph, history, make_program(fused, self.threads))

    def compare(self, graph: Graph) -> _Outcome:
        exe = self._compile(run_passes(graph, INFERENCE))
        signal: dict[str, float] = {}
        noise: dict[str, float] = {}
        for batch, expected in zip(self.batches, self.expected, strict=True):
            for name, found in exe.run(batch).items():
                exact = expected[name]
                if not isinstance(exact, np.ndarray) or exact.dtype.kind != "f":
                    continue
                if found.shape != exact.shape:
                    raise BitwrightError(f"output {name!r} has another shape when quantized")
                power, lost = _power_and_loss(exact, found)
                signal[name] = signal.get(name, 0.0) + power
                noise[name] = noise.get(name, 0.0) + lost
        return _Outcome(
            {
                n: 10 * float(np.log10(s / max(noise[n], 1e-30 * s)))
                for n, s in signal.items()
                if s > 0  # an output that was empty or zero on all batches has nothing to lose
            }
        )


def _power_and_loss(exact: Array, found: Array) -> tuple[float, float]:
    """The sums of squares of an output and of its error, a part at a time to save memory."""
    power = loss = 0.0
    flat, other = exact.reshape(-1), found.reshape(-1)
    for start in range(0, flat.size, NUMBERS_COMPARED):
        part = slice(start, start + NUMBERS_COMPARED)
        told = np.isfinite(flat[part])  # masked places say nothing
        wide = flat[part][told].astype(np.float64)
        near = other[part][told]
        error = np.where(np.isfinite(near), near - wide, LOST * np.abs(wide))
        power += float(wide @ wide)
        loss += float(error @ error)
    return power, loss


def _bindings(graph: Graph, batch: Batch) -> dict[str, int]:
    found: dict[str, int] = {}
    for _ in range(2):
        for value in graph.inputs:
            bind_input(value, batch[value.name], found)
    return found
