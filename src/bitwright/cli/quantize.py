"""`quantize`: writes a quantized model and prints the report."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import bitwright
from bitwright.cli import common
from bitwright.cli.calibrate import subset_option, threads_option
from bitwright.cli.data import data_options
from bitwright.cli.export import export_options, options_given
from bitwright.cli.perplexity import language_model_options, quantize_language_model
from bitwright.cli.report import check_report, latency_option, report_option, write_report
from bitwright.errors import BitwrightError, ExportError
from bitwright.frontend.language.source import is_language_model
from bitwright.warn import DataWarning

Scores = dict[str, dict[str, float]]

if TYPE_CHECKING:  # commands import on use, so that --help is quick
    from bitwright.quant.calibration.ranges import Ranges
    from bitwright.quant.calibration.stats_file import StatsFile
    from bitwright.quant.model.recipe import Recipe
    from bitwright.report.evaluate import Evaluation


@common.main.command()
@click.argument("model")
@data_options()
@click.option(
    "--statistics",
    type=click.Path(),
    help="File of collected statistics, written and reused: another recipe then needs no --data, "
    "and an interrupted run continues. A file of `bitwright calibrate` gives static ranges "
    "without measurement.",
)
@click.option("-o", "--output", required=True, type=click.Path(), help="File to write: .onnx, .bw.")
@click.option(
    "--recipe",
    default="int8",
    show_default=True,
    help="int8, int8-static, int8-dynamic, w8, w4, or a .yaml / .json file.",
)
@click.option(
    "--float-precision",
    help="Precision of float layers: f32, bf16, f16 or a policy; default: the recipe's, else f32.",
)
@export_options
@click.option("--no-proof", is_flag=True, help="Leave golden data and digests out of the file.")
@click.option(
    "--proof-data",
    type=click.Path(),
    help="Store the inputs of this .npz or .npy in the file instead of synthetic golden inputs.",
)
@subset_option
@click.option(
    "--eval",
    "evaluation",
    metavar="SCRIPT.py:FUNCTION",
    help="Score the float and the quantized model: the function gets a callable "
    "from a dict of arrays to a dict of arrays, and returns a number or a dict of numbers.",
)
@language_model_options
@report_option
@latency_option
@threads_option
@common.json_option
def quantize(
    model: str,
    data: Any,
    statistics: str | None,
    output: str,
    recipe: str,
    float_precision: str | None,
    no_proof: bool,
    proof_data: str | None,
    subset: int | None,
    evaluation: str | None,
    text: str | None,
    widths: tuple[str, ...],
    size_budget: str | None,
    report_path: str | None,
    latency: bool,
    threads: int | None,
    as_json: bool,
    **export: str | None,
) -> None:
    """Quantize MODEL with calibration batches from DATA, and print each layer's scheme and why.

    The file is written atomically and never over MODEL. Ctrl-C ends the run between two batches
    and saves their statistics, in the file of --statistics or next to OUTPUT. A language model
    (GGUF file, Hugging Face folder) is written as .bw or .gguf.
    """
    from bitwright.quant.data.batches import Batches
    from bitwright.report.compare import file_bytes
    from bitwright.report.evaluate import Evaluation
    from bitwright.report.feeds import read_inputs

    form = options_given(output, export)
    options: dict[str, Any] = dict(form)
    if is_language_model(Path(model)):
        if data is not None or statistics or evaluation or report_path or proof_data:
            raise BitwrightError(
                "language models take --text, --widths and --size-budget", where=model
            )
        return quantize_language_model(
            model, output, recipe, text, widths, size_budget, threads, as_json
        )
    if text or widths or size_budget:
        raise BitwrightError(
            "--text, --widths and --size-budget are for language models",
            found=model,
            expected="a GGUF file or a Hugging Face folder",
        )
    rules = rules_of(recipe, form)
    check_output(output)
    check_report(report_path)
    source = _statistics(statistics, output, data is not None, rules)
    script = Evaluation(evaluation) if evaluation else None
    scores: Scores = {}
    with (
        redirect_stdout(sys.stderr) if as_json else nullcontext(),  # the script may print
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", DataWarning)  # the report has them
        graph = common.working(f"reading {Path(model).name}")(load_beside)(model, output)
        proof = read_inputs(proof_data, graph) if proof_data else not no_proof
        if data is not None:
            Batches(data, graph)  # raises for bad data before a long evaluation
        if script:
            scores["float"] = _score(script, graph, threads)
        result = bitwright.quantize(
            graph,
            data,
            rules,
            statistics=source,
            subset=subset,
            threads=threads,
            float_precision=float_precision,
        )
        result.save(output, proof=proof, **options)
        fault = None
        if script:
            try:
                scores["quantized"] = _score(script, output, threads)
            except BitwrightError as error:  # the model is finished: print the report first
                fault = error
        if report_path is not None:
            write_report(
                report_path,
                result,
                float_model=graph,
                data=data,
                subset=subset,
                latency=latency,
                threads=threads,
                scores=scores,
                files=(model, output),
            )
    sizes = file_bytes(Path(model)), file_bytes(Path(output))
    if as_json:
        for note in result.report.notes:
            common.print_note(note)
        facts = {"model": model, "output": output, "file_bytes": sizes}
        common.print_json(facts | result.report.to_json() | {"scores": _finite(scores)})
        return _require_scored(fault, output)
    click.echo(str(result.report).rstrip())
    common.print_size(model, output, sizes)
    _require_scored(fault, output)
    if script:
        _show_scores(scores["float"], scores["quantized"])


def _require_scored(fault: BitwrightError | None, output: str) -> None:
    """Raise the error of a score; the model's file stays."""
    if fault is not None:
        raise BitwrightError(str(fault), hint=f"The quantized model is finished, in {output}.")


def _statistics(
    statistics: str | None, output: str, has_data: bool, rules: Recipe
) -> StatsFile | Ranges | None:
    """What --statistics names: ranges or a file; else a temporary file next to OUTPUT."""
    from bitwright.quant.calibration.stats_file import StatsFile
    from bitwright.quant.model.static_ranges import find_ranges

    temporary = StatsFile(Path(f"{output}.statistics"), is_temporary=True)
    file = temporary if statistics is None else StatsFile(Path(statistics))
    if file.path.resolve() == Path(output).resolve():
        raise ExportError(f"--statistics and --output are both {output}")
    if (ranges := find_ranges(statistics, has_data)) is not None:
        return ranges
    if not has_data and statistics is None and not rules.needs_data:
        return None
    file.require_usable(has_data=has_data)
    return file


def check_output(output: str) -> None:
    """Raise before calibration for anything that would prevent writing OUTPUT."""
    from bitwright.ir.container import require_writable
    from bitwright.ir.graph import WRITERS

    path = Path(output)
    if path.suffix not in WRITERS:
        raise ExportError(f"no format is known for {path.name!r}", expected=" or ".join(WRITERS))
    require_writable(path)


def load_beside(model: str, output: str) -> bitwright.Graph:
    """The model's graph; raises if OUTPUT would replace one of the model's files."""
    from bitwright.frontend.load import load_with_files

    graph, files = load_with_files(model)
    written = [Path(output), Path(f"{output}.data")]
    for file in (Path(model), *files):
        if any(path.exists() and path.samefile(file) for path in written):
            raise ExportError(
                f"writing {output} would replace {file}, which the model is read from",
                hint="Give another name with -o.",
            )
    return graph


def _score(script: Evaluation, model: Any, threads: int | None) -> dict[str, float]:
    return script.scores(bitwright.compile(model, threads=threads))


def _finite(scores: Scores) -> dict[str, dict[str, float | None]]:
    """Scores for JSON, which has no NaN and no infinity."""
    return {
        side: {name: value if math.isfinite(value) else None for name, value in found.items()}
        for side, found in scores.items()
    }


def _show_scores(before: dict[str, float], after: dict[str, float]) -> None:
    rows = []
    for name in before | after:
        a, b = before.get(name, math.nan), after.get(name, math.nan)
        rows.append((name, f"{a:.6g}", f"{b:.6g}", f"{b - a:+.4g}"))
    common.show_table("", ("score", "float", "quantized", "change"), rows)


def rules_of(recipe: str, form: Mapping[str, str]) -> Recipe:
    """The recipe with the export options that affect quantization."""
    from bitwright.quant.model.recipe import recipe as find_recipe
    from bitwright.quant.model.recipe import without_zero_points

    rules = find_recipe(recipe)
    if form.get("zero_points") == "zero":
        rules = without_zero_points(rules)
    return replace(rules, consumer=form.get("consumer", rules.consumer))
