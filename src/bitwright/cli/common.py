"""The command group, shared options, and printing of tables, JSON and errors."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import bitwright
from bitwright.errors import BitwrightError
from bitwright.warn import DataWarning

out = Console()
err = Console(stderr=True)


class Command(click.Command):
    """A command that prints errors as one paragraph."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (BitwrightError, OSError, RecursionError, MemoryError) as error:
            if ctx.find_root().params.get("debug"):
                raise
            what = str(error) or type(error).__name__
            err.print(f"[red]error:[/] {escape(what)}", highlight=False, soft_wrap=True)
            ctx.exit(2)
        except KeyboardInterrupt as interrupt:
            for line in ("interrupted", *getattr(interrupt, "__notes__", ())):
                err.print(line, highlight=False, markup=False, soft_wrap=True)
            ctx.exit(130)


class Group(click.Group):
    command_class = Command


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(bitwright.__version__, prog_name="bitwright")
@click.option("--debug", is_flag=True, help="Show tracebacks of errors.")
def main(debug: bool) -> None:
    """Make a trained model smaller and faster, run it, and prove what that cost."""


def working(message: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Shows a spinner while the function runs, on a terminal only."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not err.is_terminal:
                return function(*args, **kwargs)
            with err.status(message):
                return function(*args, **kwargs)

        return call

    return decorate


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@contextmanager
def notes_of_data() -> Iterator[None]:
    """Prints warnings about the data as notes, for commands without a report."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DataWarning)
        yield
    for one in caught:
        if issubclass(one.category, DataWarning):
            print_note(one.message)
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


def parse_sizes(
    ctx: click.Context, option: click.Parameter, value: tuple[str, ...]
) -> dict[str, int]:
    """`--size batch=4 --size seq=128`, or `--size batch=4,seq=128`."""
    sizes: dict[str, int] = {}
    for item in (part for text in value for part in text.split(",")):
        name, _, number = item.partition("=")
        if not name or not number.isdigit():
            raise click.BadParameter(f"{item!r} is not NAME=NUMBER")
        sizes[name] = int(number)
    return sizes


size_option = click.option(
    "--size",
    "sizes",
    multiple=True,
    callback=parse_sizes,
    help="Value of a free size, NAME=NUMBER.",
)


precision_option = click.option(
    "--precision",
    help="Policy: f32, f16, mixed_conservative, mixed, mixed_bf16, or NAME:KEY=TYPE,... with "
    "kinds, op:PATTERN or layer:PATTERN as keys; default: the policy in the model file, else f32.",
)


def load(path: str) -> bitwright.Graph:
    return working(f"reading {Path(path).name}")(bitwright.load)(path)  # type: ignore[no-any-return]


def show_table(title: str, columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> None:
    """Prints a table; without columns it has no header."""
    table = Table(title=escape(title), title_justify="left", show_header=bool(columns))
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    out.print(table, highlight=False)


def show_columns(header: Sequence[str], rows: Iterable[Sequence[str]], text: Sequence[str]) -> None:
    """Prints aligned columns of full width: those named in `text` left, numbers right."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (
            cell.ljust(width) if name in text else cell.rjust(width)
            for name, cell, width in zip(header, line, widths, strict=True)
        )
        click.echo("  ".join(cells).rstrip())


def human(count: float, unit: str = "") -> str:
    """12.3 M, 4.56 k, 7."""
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= factor:
            return f"{count / factor:.3g} {letter}{unit}"
    return f"{count:g} {unit}".rstrip()


def print_line(line: str) -> None:
    """Prints plain text without wrapping or markup."""
    out.print(line, highlight=False, markup=False, soft_wrap=True)


def print_note(note: object) -> None:
    err.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)


def print_size(model: str, output: str, sizes: tuple[int, int]) -> None:
    """Prints the bytes of OUTPUT, and their ratio to those of MODEL."""
    before, after = sizes
    print_line(f"{output}: {human(after, 'B')}, {after / before:.3f} of {Path(model).name}")


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, default=str))
