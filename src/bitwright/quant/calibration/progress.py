"""A progress bar with estimated time, on terminals only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(what: str, total: int | None, show: bool | None) -> Iterator[Callable[[], None]]:
    """Yields a function to call once per step; `show=None`: only if stderr is a terminal."""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    if not (is_terminal if show is None else show):
        yield lambda: None
        return
    from rich import progress as rich
    from rich.console import Console  # slow to import, and most runs do not need it

    columns = rich.TextColumn("{task.description}"), rich.BarColumn(), rich.MofNCompleteColumn()
    console = Console(stderr=True)
    with rich.Progress(
        *columns, rich.TimeRemainingColumn(), console=console, transient=True
    ) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
