"""`bw.bench_suite`: times ops and models at several precisions.

    result = bw.bench_suite(["matmul", "models"], baseline="before.json")
    for row in result.regressions: print(row.suite, row.name, row.precision, row.baseline_ratio)

All precisions of a case are compiled, warmed up, and then timed in interleaved rounds in this
process, so that load from other processes affects all of them. A round is as many calls as last
about `ROUND_SECONDS`; its time is their mean. The row has median and quartiles over rounds.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bitwright import system
from bitwright.compiler import compile as compile_model
from bitwright.errors import BitwrightError
from bitwright.executable import Executable
from bitwright.ir.arrays import Array
from bitwright.ir.feeds import input_sizes
from bitwright.ir.graph import Graph
from bitwright.ops.core.flops import flops
from bitwright.quant.core.measure import quality
from bitwright.quant.model.quantize import quantize
from bitwright.report.suite.cases import MODELS, NAMES, OPS, Case, op_cases
from bitwright.report.suite.machine import describe_machine
from bitwright.report.suite.model_cases import demo_cases, file_case
from bitwright.report.suite.results import SuiteResult, SuiteRow, compare_with
from bitwright.warn import BitwrightWarning

ROUNDS, QUICK_ROUNDS = 31, 9
ROUND_SECONDS, QUICK_SECONDS = 0.005, 0.001
WARM_UP_CALLS, MOST_CALLS = 3, 10_000
PRODUCTS = ("matmul", "conv", "depthwise", "attention", MODELS)
"""Suites whose rate is in operations; that of the others is in bytes."""
_POLICIES = {"f32": "f32", "bf16": "mixed_bf16"}

Report = Callable[[SuiteRow], Any]


def bench_suite(
    suites: Iterable[str | Path] | None = None,
    *,
    baseline: str | Path | SuiteResult | None = None,
    quick: bool = False,
    threads: int | None = None,
    rounds: int | None = None,
    sizes: Mapping[str, int] | None = None,
    on_row: Report | None = None,
) -> SuiteResult:
    """Time the suites of ops and models, and compare with a baseline.

    `suites` are names (matmul, conv, depthwise, attention, norm, softmax, quantize, elementwise,
    models) or paths of models; default: all names. `baseline` is an earlier result or its .json
    file: every row then has the ratio of times and a verdict. `quick` runs a few cases with few
    rounds. `threads` defaults to the number of cores. `sizes` are the free sizes of models given
    by path. `on_row` gets every row when it is measured.
    """
    if rounds is not None and rounds < 1:
        raise BitwrightError("rounds must be at least 1", found=rounds)
    before = SuiteResult.load(baseline) if isinstance(baseline, (str, Path)) else baseline
    cases = _cases(list(suites or NAMES), quick, sizes or {})
    count = system.cores() if threads is None else threads
    result = SuiteResult(describe_machine(), [])
    timing = _Timing(rounds or (QUICK_ROUNDS if quick else ROUNDS), quick)
    for case in cases:
        rows = _measure(case, count, timing)
        result.rows += rows
        for row in rows if on_row is not None else ():
            on_row(row)  # type: ignore[misc]
    if before is not None:
        compare_with(result, before)
    return result


def _cases(names: list[str | Path], quick: bool, sizes: Mapping[str, int]) -> list[Case]:
    found: list[Case] = []
    for name in dict.fromkeys(names):
        if name in OPS:
            found += op_cases(str(name), quick)
        elif name == MODELS:
            found += demo_cases(quick)
        elif Path(name).suffix or Path(name).exists():
            found.append(file_case(name, sizes))
        else:
            raise BitwrightError(
                f"no suite is named {str(name)!r}",
                expected=f"{', '.join(NAMES)}, or the path of a model",
            )
    return found


class _Timing:
    """How long to measure."""

    def __init__(self, rounds: int, quick: bool) -> None:
        self.rounds = rounds
        self.seconds = QUICK_SECONDS if quick else ROUND_SECONDS


def _measure(case: Case, threads: int, timing: _Timing) -> list[SuiteRow]:
    """The rows of one case."""
    graph, batches = case.make()
    rows = {name: SuiteRow(case.suite, case.name, name, threads) for name in case.precisions}
    made: dict[str, Executable] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BitwrightWarning)  # random data, and ops without kernels
        for name in case.precisions:
            try:
                made[name] = _compiled(case, graph, batches, name, threads)
                _warm_up(made[name], batches[0])
            except BitwrightError as error:
                rows[name].error = str(error).splitlines()[0]
                made.pop(name, None)
    work = _flops(graph, batches[0]) if case.suite in PRODUCTS else 0
    calls = {name: _calls(exe, batches[0], timing.seconds) for name, exe in made.items()}
    times: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(timing.rounds):
        for name, exe in made.items():
            times[name].append(_seconds(exe, batches[0], calls[name]) / calls[name])
    exact = _reference(graph, batches[0])
    for name, exe in made.items():
        row, milliseconds = rows[name], 1e3 * np.array(times[name])
        low, middle, high = (float(v) for v in np.quantile(milliseconds, (0.25, 0.5, 0.75)))
        row.milliseconds, row.quartiles = middle, (low, high)
        row.rounds, row.calls = timing.rounds, calls[name]
        row.best = float(milliseconds.min())
        row.gflops = work / middle / 1e6 if work else None
        row.gbytes = None if work else _nbytes(batches[0], exact) / middle / 1e6
        row.memory_bytes = getattr(exe.engine, "memory_bytes", None)
        row.sqnr_db = _sqnr(exact, exe.run(batches[0]))
    return list(rows.values())


def _compiled(
    case: Case, graph: Graph, batches: list[dict[str, Array]], precision: str, threads: int
) -> Executable:
    if precision in _POLICIES:
        return compile_model(graph, threads=threads, precision=_POLICIES[precision])
    if precision == "w4":
        small = quantize(graph, recipe={"base": "w4", "rounding": "nearest"}, threads=threads)
        return compile_model(small, threads=threads)
    if case.int8 is not None:
        return compile_model(case.int8(), threads=threads)
    recipe = "int8" if case.suite == MODELS else "int8-static"
    made = quantize(graph, batches, recipe, threads=threads, progress=False)
    if not made.report.int8_mac_fraction:
        raise BitwrightError("no layer of the model is in 8 bits")
    return compile_model(made, threads=threads)


def _warm_up(exe: Executable, feeds: Mapping[str, Array]) -> None:
    for _ in range(WARM_UP_CALLS):
        exe.run(feeds)


def _seconds(exe: Executable, feeds: Mapping[str, Array], calls: int) -> float:
    run = exe.run
    begin = time.perf_counter()
    for _ in range(calls):
        run(feeds)
    return time.perf_counter() - begin


def _calls(exe: Executable, feeds: Mapping[str, Array], seconds: float) -> int:
    """Calls that last about as long as a round."""
    one = min(_seconds(exe, feeds, 1) for _ in range(WARM_UP_CALLS))
    return max(1, min(MOST_CALLS, round(seconds / max(one, 1e-7))))


def _flops(graph: Graph, feeds: Mapping[str, Array]) -> int:
    """Operations of a run; 0 if some are not known."""
    bindings = input_sizes(graph, feeds)
    try:
        counts = [flops(node, bindings) for node in graph.nodes]
    except BitwrightError:  # a size is known only at run time
        return 0
    return 0 if None in counts else sum(count or 0 for count in counts)


def _nbytes(feeds: Mapping[str, Any], results: Mapping[str, Any]) -> int:
    arrays = [*feeds.values(), *results.values()]
    return sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))


def _reference(graph: Graph, feeds: Mapping[str, Array]) -> dict[str, Any]:
    return compile_model(graph, target="reference").run(feeds)


def _sqnr(exact: Mapping[str, Any], found: Mapping[str, Any]) -> float | None:
    """The lowest SQNR of an output; None if all are equal."""
    values = [
        quality(array, found[name]).sqnr
        for name, array in exact.items()
        if isinstance(array, np.ndarray) and array.dtype.kind in "fiu" and array.size
    ]
    finite = [value for value in values if np.isfinite(value)]
    return min(finite, default=None)
