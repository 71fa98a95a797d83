"""`perplexity`, and `quantize` for language models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

import bitwright
from bitwright.cli import common
from bitwright.cli.calibrate import threads_option
from bitwright.errors import BitwrightError


def language_model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of `quantize` that only language models take."""
    for option in (
        click.option("--size-budget", help="Language models: bytes of all weights, such as 90MB."),
        click.option(
            "--widths",
            multiple=True,
            metavar="PATTERN=BITS",
            help="Language models: bits (4, 5, 8) or format of matrices; may be repeated.",
        ),
        click.option(
            "--text", type=click.Path(), help="Language models: file of calibration text."
        ),
    ):
        command = option(command)
    return command


def read_text(path: str) -> str:
    """A text file; an error names what is wrong with it."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BitwrightError(f"{path} is not UTF-8 text: {error}") from None


def parsed_widths(rules: Sequence[str]) -> dict[str, int | str]:
    """Patterns and their bits or formats."""
    found: dict[str, int | str] = {}
    for rule in rules:
        pattern, mark, width = rule.rpartition("=")
        if not (mark and pattern and width):
            raise BitwrightError(f"{rule!r} is no rule", expected="PATTERN=BITS, as lm_head=8")
        found[pattern] = int(width) if width.isdigit() else width
    return found


def quantize_language_model(
    model: str,
    output: str,
    recipe: str,
    text: str | None,
    widths: Sequence[str],
    size_budget: str | None,
    threads: int | None,
    as_json: bool,
) -> None:
    from bitwright.ir.container import require_writable
    from bitwright.llm.files.save import SUFFIXES

    if Path(output).suffix not in SUFFIXES:
        raise BitwrightError(
            f"no format of language models is known for {Path(output).name!r}",
            expected=" or ".join(SUFFIXES),
        )
    if Path(output).resolve() == Path(model).resolve():
        raise BitwrightError("the output would replace the model", found=output)
    require_writable(output)
    result: Any = bitwright.quantize(
        model,
        None if text is None else read_text(text),
        recipe,
        widths=parsed_widths(widths) or None,
        size_budget=size_budget,
        threads=threads,
    )
    result.save(output)
    if as_json:
        return common.print_json({"model": model, "output": output, **result.to_json()})
    click.echo(str(result))
    click.echo(f"wrote {output}: {Path(output).stat().st_size / 1e6:.1f} MB")


@common.main.command()
@click.argument("model")
@click.option("--text", required=True, type=click.Path(), help="UTF-8 text to predict.")
@click.option("--tokens", type=int, help="Use the first TOKENS tokens only.")
@click.option("--window", type=int, default=512, show_default=True, help="Tokens of a window.")
@click.option(
    "--form",
    type=click.Choice(["both", "exact", "default"]),
    default="both",
    show_default=True,
    help="Products with activations as floats (exact), in 8 bits (default), or both.",
)
@click.option("--store", is_flag=True, help="Keep the figures in MODEL, a .bw or .gguf file.")
@threads_option
@common.json_option
def perplexity(
    model: str,
    text: str,
    tokens: int | None,
    window: int,
    form: str,
    store: bool,
    threads: int | None,
    as_json: bool,
) -> None:
    """Measure how well MODEL predicts a text: exp of the mean negative log-likelihood."""
    from bitwright.llm.files.save import save_model
    from bitwright.llm.model import load_model
    from bitwright.llm.perplexity import perplexity as measure

    loaded = load_model(model)
    words = read_text(text)
    forms = {"both": (True, False), "exact": (True,), "default": (False,)}[form]
    found = [
        measure(loaded, words, window, tokens, threads, exact, label=Path(text).name)
        for exact in forms
    ]
    if store:
        rows = {"perplexity": [*loaded.report.get("perplexity", ()), *(f.to_json() for f in found)]}
        save_model(replace(loaded.source, report={**loaded.report, **rows}), model)
    if as_json:
        return common.print_json({"model": model, "perplexity": [f.to_json() for f in found]})
    for result in found:
        click.echo(str(result))
