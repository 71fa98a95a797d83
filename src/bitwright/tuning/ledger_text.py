"""The ledger as text, HTML and JSON, from its dict."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import IO, Any

from bitwright.ir.container import write_atomically

MOST_LINES, MOST_FLIPS = 25, 10


def save(facts: Mapping[str, Any], path: Any) -> None:
    text = json.dumps(facts, indent=2, allow_nan=False).encode()

    def write(file: IO[bytes]) -> None:
        file.write(text)

    write_atomically(path, write)


def header(facts: Mapping[str, Any]) -> tuple[str, ...]:
    scored = (f"{facts['metric']['name']} without it",) if facts["metric"] else ()
    columns = ("layer", "op", "scheme", "cause", "share", "leave one out", "dB without it")
    return (*columns, *scored, "fix")


def rows(facts: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Cells of the lines with the largest effect, and one row for the others."""
    whole = facts["error_energy"] or 1.0
    found = []
    for line in facts["lines"][:MOST_LINES]:
        after = line["predicted_sqnr_db"]
        scored = (f"{line['predicted_metric']:.6g}",) if facts["metric"] else ()
        found.append(
            (
                *(line["layer"], line["op"], line["scheme"], line["cause"]),
                f"{line['share'] / whole:.2%}",
                f"{line['leave_one_out'] / whole:.2%}",
                "" if after is None else f"{after:.2f}",
                *scored,
                line["fix"]["text"] if line["fix"] else "",
            )
        )
    others = facts["lines"][MOST_LINES:]
    if others:
        share = sum(line["share"] for line in others) / whole
        blank = ("",) * (2 + bool(facts["metric"]))
        found.append((f"{len(others)} other lines", "", "", "", f"{share:.2%}", "", *blank))
    return found


def remarks(facts: Mapping[str, Any]) -> list[str]:
    """Sums, flips and notes, one line each."""
    whole = facts["error_energy"]
    share = sum(line["share"] for line in facts["lines"])
    outputs = ", ".join(
        f"{name} {'exact' if one['sqnr_db'] is None else format(one['sqnr_db'], '.1f') + ' dB'}"
        for name, one in facts["outputs"].items()
    )
    found = [f"outputs on {facts['batches']} batches: {outputs or 'none are real numbers'}"]
    if whole:
        found.append(
            f"error energy {whole:.4g} of the signal: lines {share / whole:.1%}, "
            f"rest {facts['rest'] / whole:.1%}"
        )
    if facts["metric"]:
        one = facts["metric"]
        found.append(f"{one['name']}: float {one['float']:.6g}, quantized {one['quantized']:.6g}")
    for line in facts["lines"][:MOST_LINES]:
        found += [
            f"also measured for {line['layer']}, {line['cause']}: {fix['text']}"
            for fix in line["alternatives"]
        ]
    found.append(f"changed answers: {facts['flip_count']} of {facts['rows']}")
    found += [f"  {_flip(flip)}" for flip in facts["flips"][:MOST_FLIPS]]
    more = facts["flip_count"] - min(len(facts["flips"]), MOST_FLIPS)
    found += [f"  and {more} more"] if more > 0 else []
    return found + [f"note: {note}" for note in facts["notes"]]


def _flip(flip: Mapping[str, Any]) -> str:
    where = f"batch {flip['batch']}, row {flip['row']} of {flip['output']}"
    change = f"{flip['float']} -> {flip['quantized']}"
    if flip["float_margin"] is None:
        return f"{where}: {change}"
    margins = f"margin {flip['float_margin']:.4g} -> {flip['quantized_margin']:.4g}"
    return f"{where}: {change}, {margins}"


def table(facts: Mapping[str, Any]) -> str:
    from rich.console import Console
    from rich.table import Table

    made = Table(*header(facts))
    for row in rows(facts):
        made.add_row(*row)
    text = io.StringIO()
    console = Console(file=text, width=180)
    console.print(made, *remarks(facts), sep="\n", highlight=False, markup=False)
    return text.getvalue()


def html(facts: Mapping[str, Any]) -> str:
    from bitwright.ir.html import table as as_table

    return as_table("error ledger", header(facts), rows(facts), remarks(facts))
