"""`generate` and `chat`: text from a language model, streamed to the terminal."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

import bitwright
from bitwright.cli import common
from bitwright.errors import RunError


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of the model and of `bw.generate`."""
    for option in reversed(
        (
            click.option("--threads", type=click.IntRange(1), help="Default: one per core."),
            click.option("--context", type=click.IntRange(2), help="Positions of the cache."),
            click.option("--max-tokens", type=click.IntRange(1), default=256, show_default=True),
            click.option("--temperature", default=0.0, show_default=True, help="0 is greedy."),
            click.option("--top-k", default=0, help="Only the K most probable tokens."),
            click.option("--top-p", default=1.0, help="Only tokens that together reach P."),
            click.option("--min-p", default=0.0, help="Only tokens with this share of the best."),
            click.option("--repetition-penalty", default=1.0),
            click.option("--seed", default=0, show_default=True),
            click.option("--stop", multiple=True, help="Text that ends the answer; repeatable."),
            click.option("--draft", help="`prompt`, or a smaller model, to guess tokens with."),
        )
    ):
        command = option(command)
    return command


def _open(
    model: str, threads: int | None, context: int | None, draft: str | None
) -> tuple[bitwright.LanguageModel, Any]:
    """The model, and what guesses for it."""
    load = common.working(f"loading {Path(model).name}")(bitwright.LanguageModel)
    made = load(model, threads=threads, context=context)
    if draft in (None, "prompt"):
        return made, draft
    return made, load(draft, threads=threads, context=made.context)


@common.main.command()
@click.argument("model")
@click.argument("prompt", required=False)
@sampling_options
@click.option("--chat", is_flag=True, help="The prompt is a message: use the chat template.")
@click.option("--json-schema", type=click.Path(), help="File of a schema that the text must fit.")
@click.option("--regex", help="Expression that the text must match.")
@common.json_option
def generate(
    model: str,
    prompt: str | None,
    threads: int | None,
    context: int | None,
    draft: str | None,
    chat: bool,
    json_schema: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Continue PROMPT with language MODEL; without PROMPT it is read from standard input."""
    text = sys.stdin.read() if prompt is None else prompt
    if json_schema is not None:
        try:
            options["json_schema"] = json.loads(Path(json_schema).read_text(encoding="utf-8"))
        except ValueError as error:
            raise RunError(f"the schema is not JSON: {error}", where=json_schema) from None
    lm, drafter = _open(model, threads, context, draft)
    asked: Any = [{"role": "user", "content": text}] if chat else text
    begin = time.perf_counter()
    if as_json:
        found = bitwright.generate(lm, asked, draft=drafter, **options)
        counts = vars(found.counts)
        seconds = time.perf_counter() - begin
        facts = {"text": found.text, "finish_reason": found.finish_reason, "tokens": counts}
        return common.print_json(facts | {"seconds": round(seconds, 3)})
    _print_stream(bitwright.generate(lm, asked, stream=True, draft=drafter, **options))


def _print_stream(stream: Any) -> str:
    """Print pieces as they come; the whole text."""
    text = ""
    with stream:
        for piece in stream:
            click.echo(piece.text, nl=False)
            sys.stdout.flush()
            text += piece.text
    click.echo()
    return text


@common.main.command()
@click.argument("model")
@sampling_options
@click.option("--system", help="System message.")
def chat(
    model: str,
    threads: int | None,
    context: int | None,
    draft: str | None,
    system: str | None,
    **options: Any,
) -> None:
    """Talk to language MODEL. An empty line or Ctrl-D ends; Ctrl-C stops an answer."""
    lm, drafter = _open(model, threads, context, draft)
    messages = [{"role": "system", "content": system}] if system else []
    while line := _read_line():
        messages.append({"role": "user", "content": line})
        try:
            stream = bitwright.generate(lm, messages, stream=True, draft=drafter, **options)
            messages.append({"role": "assistant", "content": _print_stream(stream)})
        except KeyboardInterrupt:
            click.echo()
            messages.pop()
        except RunError as error:
            common.print_note(error)
            messages.pop()


def _read_line() -> str:
    """One message; empty at the end of the input."""
    if sys.stdin.isatty():
        click.echo("> ", nl=False)
    return sys.stdin.readline().strip()
