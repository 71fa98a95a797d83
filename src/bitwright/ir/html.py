"""Small HTML tables, which notebooks show for a graph, an executable or a report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

MOST_ROWS = 200
_CELL = 'style="text-align:left;padding:2px 8px"'


def table(
    caption: str, header: Sequence[str], rows: Iterable[Sequence[Any]], notes: Iterable[str] = ()
) -> str:
    """A table with a caption above and notes below; rows beyond `MOST_ROWS` are counted only."""
    lines = [f"<div><b>{escape(caption)}</b>", "<table>"]
    if header:
        lines.append(_row("th", header))
    every = [_row("td", row) for row in rows]
    lines += [*every[:MOST_ROWS], "</table>"]
    if len(every) > MOST_ROWS:
        lines.append(f"<div>… {len(every) - MOST_ROWS} more rows</div>")
    lines += [f"<div>{escape(note)}</div>" for note in notes]
    return "\n".join([*lines, "</div>"])


def _row(tag: str, cells: Sequence[Any]) -> str:
    return "<tr>" + "".join(f"<{tag} {_CELL}>{escape(str(c))}</{tag}>" for c in cells) + "</tr>"
