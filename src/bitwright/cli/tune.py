"""`tune`: searches the precision of every layer and writes the best model."""

from __future__ import annotations

import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import bitwright
from bitwright.cli import common
from bitwright.cli.calibrate import subset_option, threads_option
from bitwright.cli.data import data_options
from bitwright.cli.quantize import check_output, load_beside
from bitwright.cli.report import check_report, latency_option, report_option, write_report

if TYPE_CHECKING:  # commands import on use, so that --help is quick
    from bitwright.report.evaluate import Evaluation
DEFAULT_FUNCTION = "score"


class ScriptScore:
    """The score of a script; another process loads the script again."""

    def __init__(self, source: str) -> None:
        self.source = source if ":" in Path(source).name else f"{source}:{DEFAULT_FUNCTION}"
        self.__name__ = self.source.rpartition(":")[2]
        self._script: Evaluation | None = None

    def load(self) -> Evaluation:
        from bitwright.report.evaluate import Evaluation

        if self._script is None:
            self._script = Evaluation(self.source)
        return self._script

    def __call__(self, run: Any) -> float:
        return next(iter(self.load().scores(run).values()))

    def __reduce__(self) -> Any:
        return ScriptScore, (self.source,)


@common.main.command()
@click.argument("model")
@data_options()
@click.option("-o", "--output", required=True, type=click.Path(), help="File to write: .onnx, .bw.")
@click.option(
    "--eval",
    "evaluation",
    metavar="SCRIPT.py[:FUNCTION]",
    help="Score of a model, higher is better: the function (default: score) gets a callable from a "
    "dict of arrays to a dict of arrays. Without it: agreement with the float model.",
)
@click.option("--lower-is-better", is_flag=True, help="The score of --eval is a loss.")
@click.option(
    "--max-drop",
    default="0.5%",
    show_default=True,
    help="Largest loss of score: relative (0.5%) or absolute (0.01).",
)
@click.option("--budget", default="10m", show_default=True, help="Time: seconds, 90s, 5m, 1h.")
@click.option(
    "--objective",
    type=click.Choice(["latency", "size", "memory"]),
    default="latency",
    show_default=True,
)
@click.option("--sample", type=click.Path(), help=".npz with the inputs that are timed.")
@click.option(
    "--workdir",
    type=click.Path(),
    help="Folder of the journal, the statistics and the recipe; default: OUTPUT.tune.",
)
@click.option("--resume", is_flag=True, help="Continue the search of the same --workdir.")
@click.option("--ray", is_flag=True, help="Compute scores on a Ray cluster (extra: ray).")
@report_option
@latency_option
@subset_option
@threads_option
@common.json_option
def tune(
    model: str,
    data: Any,
    output: str,
    evaluation: str | None,
    lower_is_better: bool,
    max_drop: str,
    budget: str,
    objective: str,
    sample: str | None,
    workdir: str | None,
    resume: bool,
    ray: bool,
    report_path: str | None,
    latency: bool,
    subset: int | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Search the precision of every layer of MODEL by time and error on this machine.

    OUTPUT always holds the best model so far: it is replaced atomically whenever a better one is
    found. Ctrl-C ends the search with that model; --resume continues it.
    """
    from bitwright.report.feeds import read_inputs

    check_output(output)
    check_report(report_path)
    script = ScriptScore(evaluation) if evaluation else None
    if script is not None:
        script.load()
    graph = common.working(f"reading {Path(model).name}")(load_beside)(model, output)
    with redirect_stdout(sys.stderr) if as_json else nullcontext():  # the script may print
        tuned = bitwright.tune(
            graph,
            data,
            script,
            max_drop=max_drop,
            budget=budget,
            objective=objective,
            threads=threads,
            workdir=workdir or f"{output}.tune",
            resume=resume,
            sample=None if sample is None else read_inputs(sample, graph),
            lower_is_better=lower_is_better,
            subset=subset,
            ray=ray,
            on_best=lambda best, trial: best.save(output),
            say=lambda line: click.echo(line, err=True),
        )
        tuned.save(output)
        if report_path is not None:
            write_report(
                report_path,
                tuned.model,
                float_model=graph,
                data=data,
                subset=subset,
                latency=latency,
                threads=threads,
                tune=tuned.to_dict(),
                files=(model, output),
            )
    if as_json:
        common.print_json({"model": model, "output": output, **tuned.to_dict()})
        return
    click.echo(str(tuned).rstrip())
    click.echo(f"recipe: {Path(workdir or f'{output}.tune') / 'recipe.json'}")
