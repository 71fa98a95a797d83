"""Runs the benchmark suite and writes the page of results: table, plots and the raw numbers.

    python benchmarks/suite.py [--threads 1] [MODEL.onnx ...]    run, then write everything
    python benchmarks/suite.py --from benchmarks/suite.json      write from an earlier run

Writes benchmarks/suite.json, the part of docs/benchmarks.md between the markers, and
docs/pictures/suite-speed.svg and suite-accuracy.svg. The plots need matplotlib. Run it alone on the
machine: other load widens the quartiles.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from bitwright.cli.bench import suite_cells
from bitwright.report.suite.cases import NAMES
from bitwright.report.suite.machine import in_one_line
from bitwright.report.suite.results import SuiteResult, SuiteRow
from bitwright.report.suite.run import bench_suite

ROOT = Path(__file__).parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "suite.json", ROOT / "docs" / "benchmarks.md"
PICTURES = ROOT / "docs" / "pictures"
BEGIN, END = "<!-- results -->", "<!-- end of results -->"
HEADER = ("suite", "case", "precision", "ms", "quartiles", "rate", "memory", "SQNR dB")
LOADED = 0.1
"""The distance of quartiles, over the median, above which the machine was not idle."""
COLORS = {"f32": "tab:gray", "bf16": "tab:blue", "int8": "tab:orange", "w4": "tab:green"}


def table(result: SuiteResult) -> str:
    """The rows as Markdown."""
    lines = ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    lines += ["| " + " | ".join(suite_cells(row, False)) + " |" for row in result.rows]
    threads = {row.threads for row in result.rows}
    counts = ", ".join(f"{count} thread{'s' * (count != 1)}" for count in sorted(threads))
    return "\n".join([f"{in_one_line(result.machine)}; {counts}. {spread(result)}", "", *lines])


def spread(result: SuiteResult) -> str:
    """How far the quartiles are apart, and what that means."""
    known = [row for row in result.rows if row.quartiles and row.milliseconds]
    apart = statistics.median(
        (row.quartiles[1] - row.quartiles[0]) / row.milliseconds for row in known
    )
    text = f"Quartiles are {apart:.0%} of the median apart in half of the rows"
    return f"{text}: other processes were running." if apart > LOADED else f"{text}."


def write_page(result: SuiteResult) -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(result)}\n\n{END}{after}", encoding="utf-8")


def cases(result: SuiteResult) -> dict[str, dict[str, SuiteRow]]:
    """Rows with more than one precision, by case and precision."""
    found: dict[str, dict[str, SuiteRow]] = {}
    for row in result.rows:
        if not row.error:
            found.setdefault(f"{row.suite} {row.name}", {})[row.precision] = row
    return {name: rows for name, rows in found.items() if "f32" in rows and len(rows) > 1}


def plot(result: SuiteResult) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "bitwright"
    PICTURES.mkdir(parents=True, exist_ok=True)
    found = cases(result)
    names = list(found)[::-1]
    height = 0.8 / max(len(COLORS) - 1, 1)
    for kind in ("speed", "accuracy"):
        figure, axes = pyplot.subplots(figsize=(9, 0.45 * len(names) + 1.2), layout="constrained")
        for turn, precision in enumerate(name for name in COLORS if name != "f32"):
            places, widths, errors = [], [], []
            for at, name in enumerate(names):
                row, base = found[name].get(precision), found[name]["f32"]
                if row is None:
                    continue
                places.append(at + 0.4 - height * (turn + 0.5))
                if kind == "accuracy":
                    widths.append(row.sqnr_db or 0.0)
                    continue
                widths.append(base.milliseconds / row.milliseconds)
                low, high = row.quartiles
                faster, slower = base.milliseconds / low, base.milliseconds / high
                errors.append((widths[-1] - slower, faster - widths[-1]))
            spread = None if kind == "accuracy" else list(zip(*errors, strict=True))
            axes.barh(places, widths, height, label=precision, color=COLORS[precision], xerr=spread)
        axes.set_yticks(range(len(names)), names, fontsize=8)
        if kind == "speed":
            axes.axvline(1, color="black", lw=0.8)
            axes.set(xlabel="times as fast as f32 (median; bars: quartiles)")
        else:
            axes.set(xlabel="SQNR of the outputs against f32, dB")
        axes.grid(axis="x", alpha=0.3)
        axes.legend(frameon=False, loc="lower right")
        figure.savefig(PICTURES / f"suite-{kind}.svg", metadata={"Date": None})
        pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--from", dest="source", help="results of an earlier run")
    given = parser.parse_args()
    if given.source:
        result = SuiteResult.load(given.source)
    else:
        show = lambda row: print(*suite_cells(row, False), sep="  ", flush=True)
        result = bench_suite([*NAMES, *given.models], threads=given.threads, on_row=show)
        result.save(RESULTS)
    write_page(result)
    plot(result)


if __name__ == "__main__":
    main()
