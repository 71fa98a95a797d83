"""`bw.write_report`: measures what is asked for, fills the sections and writes the page.

q = bw.quantize("model.onnx", data=batches)
bw.write_report("model.html", q, float_model="model.onnx", data=batches, latency=True)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.backends.cpu.runtime.program import Program
from bitwright.errors import BitwrightError
from bitwright.frontend.load import load
from bitwright.ir.graph import Graph
from bitwright.passes.manager import run_passes
from bitwright.pipeline import INFERENCE
from bitwright.quant.data.batches import Batches
from bitwright.quant.data.traced import with_graph
from bitwright.quant.model.quantize import Quantized
from bitwright.quant.model.report import QuantizationReport
from bitwright.report.compare import Comparison, compare
from bitwright.report.feeds import random_inputs
from bitwright.report.html import conclusions
from bitwright.report.html.data import ReportData, check_path, number, section
from bitwright.report.html.figures import reproduce, summary, timed
from bitwright.report.html.layer_rows import Row, rows_of_graph, rows_of_report
from bitwright.report.html.measure import measure, region_seconds
from bitwright.report.html.picture import picture
from bitwright.report.html.regions import Region, Regions, find_regions
from bitwright.report.profile import float_products

MOST_WORST = 20
PREVIEW = 64
"""Elements of an input that are shown if inputs are included."""


def write_report(
    path: str | Path,
    quantized: Any,
    *,
    float_model: Any = None,
    data: Any = None,
    subset: int | None = None,
    latency: bool = False,
    sizes: Mapping[str, int] | None = None,
    threads: int | None = None,
    comparison: Comparison | None = None,
    ledger: Mapping[str, Any] | None = None,
    tune: Mapping[str, Any] | None = None,
    scores: Mapping[str, Mapping[str, float]] | None = None,
    files: tuple[str | Path, str | Path] | None = None,
    title: str | None = None,
    command: str = "",
    include_inputs: bool = False,
) -> ReportData:
    """Write an HTML report about a quantized model, and its data as JSON beside it.

    `quantized` is what `bw.quantize` returned, or a graph or file of any model. With `float_model`
    and `data` both models are compared, layer by layer, on at most `subset` batches; `comparison`
    gives the result of an earlier `bw.compare` instead. `latency` times both models, on the first
    batch or on random inputs with symbolic sizes `sizes` (default 1).

    `ledger` and `tune` are the dicts of those commands. `scores` are by side, {"float": {name:
    number}, "quantized": {...}}. `files` are the paths of both models, for their sizes and digests.
    The contents of the data stay out of the file unless `include_inputs` is set: then it has the
    first elements of the worst inputs.
    """
    check_path(path)
    graph = run_passes(load(_model(quantized)), INFERENCE)
    report = getattr(quantized, "report", None)
    given: Graph | None = None
    if float_model is not None:
        found, data = with_graph(_model(float_model), data)
        given = load(found)
    if data is not None and not Batches(data, graph).is_repeatable:
        data = list(Batches(data, graph, subset=subset))  # it is read more than once
    plain_graph = None if given is None else run_passes(given, INFERENCE)
    if comparison is None and given is not None and data is not None:
        comparison = compare(given, graph, data, subset=subset, threads=threads)
    if files is None and all(isinstance(m, (str, Path)) for m in (float_model, quantized)):
        files = float_model, quantized
    if isinstance(report, QuantizationReport):
        rows = rows_of_report(report)
    else:
        report = None
        rows = rows_of_graph(graph, plain_graph, data)
    made = ReportData(title or _title(graph, files, given))
    made.ledger = section("ledger", ledger, ("lines", "flips"))
    made.tune = section("tune", tune, ("pareto", "layers"))
    made.notes = [] if report is None else list(report.notes)
    if made.ledger is not None:
        made.notes += [note for note in made.ledger.get("notes") or [] if note not in made.notes]
    regions = find_regions(graph)
    seconds: dict[Region, float] = {}
    _add_shares(rows, made.ledger)
    _add_accumulated(rows, comparison, graph, regions)
    made.layers = rows
    made.skipped = _float_layers(rows)
    made.summary = summary(graph, given, report, comparison, files, scores)
    if latency:
        models = {"quantized": graph} if given is None else {"float": given, "quantized": graph}
        seconds = _add_times(made, models, lambda: _feeds(graph, data, sizes), threads, regions)
    made.graph = picture(graph, regions, rows, seconds)
    _add_seconds(rows, seconds, regions.regions)
    if comparison is not None:
        made.comparison = comparison.as_json(MOST_WORST)
        made.worst_inputs = _worst(comparison, data if include_inputs else None, graph)
    made.reproduce = reproduce(report, command, files, made.summary)
    made.headline = conclusions.headline(made.title, made.summary)
    made.next_steps = conclusions.next_steps(made)
    made.save(path)
    return made


def _add_times(
    made: ReportData,
    models: Mapping[str, Graph],
    feeds: Callable[[], Mapping[str, Any]],
    threads: int | None,
    regions: Regions,
) -> dict[Region, float]:
    """Measure latency and memory; returns the time of regions of the quantized model."""
    try:
        facts, profiles = measure(models, feeds(), threads)
    except BitwrightError as error:  # the rest of the report does not depend on it
        made.notes.append(f"the latency was not measured: {error}")
        return {}
    made.summary |= timed(facts)
    if "quantized" not in profiles:
        return {}
    exe, profile = profiles["quantized"]
    made.skipped += _not_lowered(exe)
    return region_seconds(exe, profile, regions.of)


def _model(model: Any) -> Any:
    """The graph of a quantized model, or the model itself."""
    return model.graph if isinstance(model, Quantized) else model


def _title(graph: Graph, files: tuple[Any, Any] | None, given: Graph | None) -> str:
    if files is None:
        return (given or graph).name or "model"
    path = Path(files[0]).absolute()
    return path.parent.name or path.stem if path.stem == "model" else path.stem


def _feeds(graph: Graph, data: Any, sizes: Mapping[str, int] | None) -> Mapping[str, Any]:
    if data is not None:
        first = next(iter(Batches(data, graph)), None)
        if first is not None:
            return dict(first)
    return random_inputs(graph, sizes or {}, seed=0)


def _add_shares(rows: list[Row], ledger: Mapping[str, Any] | None) -> None:
    """Write the shares of the ledger into the rows of their layers."""
    shares: dict[str, float] = {}
    for line in (ledger or {}).get("lines") or []:
        for key in {line.get("value"), line.get("layer")} - {None}:
            shares[str(key)] = shares.get(str(key), 0.0) + number(line.get("share"))
    for row in rows:
        row["share"] = shares.get(row["value"], shares.get(row["name"]))


def _add_accumulated(
    rows: list[Row], comparison: Comparison | None, graph: Graph, regions: Regions
) -> None:
    """Write the error of each layer's result, or of the first value after it in its region."""
    distances = {} if comparison is None else dict(comparison.layers)
    if comparison is not None:
        outputs = {value.name: comparison.outputs.get(name) for name, value in graph.outputs}
        distances |= {name: one for name, one in outputs.items() if one is not None}
    for row in rows:
        region = regions.of.get(row["value"])
        names = [row["value"]]
        if region is not None:
            every = [name for node in region.nodes for name in node.names]
            names += every[every.index(row["value"]) :] if row["value"] in every else []
        found = next((distances[name] for name in names if name in distances), None)
        row["accumulated"] = None if found is None else found.as_json()


def _add_seconds(rows: list[Row], seconds: Mapping[Region, float], regions: list[Region]) -> None:
    """Write the time of its region into each row; layers of one region share it."""
    for row in rows:
        found = None if row["node"] is None else seconds.get(regions[row["node"]])
        row["seconds"] = found


def _float_layers(rows: list[Row]) -> list[dict[str, Any]]:
    return [
        {
            "kind": "float layer",
            "name": row["name"],
            "op": row["op"],
            "reason": row["reason"] or "its operands are not quantized in this model",
            "multiply_adds": row["multiply_adds"],
        }
        for row in rows
        if row["scheme"] == "float"
    ]


def _not_lowered(exe: Any) -> list[dict[str, Any]]:
    """Quantized products that run in float, and interpreter fallbacks."""
    found = [
        {"kind": "product not lowered to integers", "name": node, "op": "", "reason": why}
        for node, why in float_products(exe.history)
    ]
    if isinstance(exe.engine, Program):
        found += [
            {"kind": "interpreter fallback", "name": s.node, "op": s.op.op, "reason": s.why}
            for s in exe.engine.fallbacks
        ]
    return found


def _worst(comparison: Comparison, data: Any, graph: Graph) -> list[dict[str, Any]]:
    """The batches with the lowest SQNR; `data` only if their contents are included."""
    rows = [{"batch": n, **one.as_json()} for n, one in comparison.worst(MOST_WORST)]
    if data is not None:
        wanted = {row["batch"]: row for row in rows}
        for number, batch in enumerate(Batches(data, graph)):
            if number in wanted:
                wanted[number]["inputs"] = {n: _preview(a) for n, a in batch.items()}
            if number >= max(wanted):
                break
    return rows


def _preview(array: Any) -> dict[str, Any]:
    flat = np.asarray(array)
    return {
        "type": f"{flat.dtype} {list(flat.shape)}",
        "first": flat.reshape(-1)[:PREVIEW].tolist(),
    }
