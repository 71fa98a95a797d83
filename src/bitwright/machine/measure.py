"""Measured rates: what instructions allow in registers, and what the compiler's kernels reach.

    peaks   operations per second of register loops, and bytes per second (`profile.peaks`)
    rates   operations per second of the product kernel of each type, at a good shape

A peak is a maximum, so a remembered one is only ever replaced by a larger one: a busy machine
cannot lower it. Rates of kernels are compared with the peaks of one thread, because other processes
rarely leave all cores free at once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from bitwright.backends.cpu.profile import peaks as register_peaks
from bitwright.backends.cpu.profile.peaks import Level, Peaks
from bitwright.backends.cpu.runtime.program import Program
from bitwright.lir.schedule import KernelStep
from bitwright.machine.probes import probe
from bitwright.machine.selection import select
from bitwright.pipeline import compile_graph
from bitwright.target import host

RATED = ("f32", "bf16", "f16", "int8", "uint8", "int4")
"""Types whose rates are measured together; the others are measured when they are asked for."""
ROWS = 128
"""Few enough that a call is shorter than a time slice of the system."""
_ROUNDS = 5
_SECONDS = 0.1
"""The measuring time of a rate."""
_ATTEMPTS, _LOW_SHARE = 3, 0.8


def measure_peaks(threads: int, single: Mapping[str, float], known: Peaks | None) -> Peaks:
    """The peaks of this process's target, or the known ones where they are larger.

    `single` has the peaks of one thread; loops that are far below its multiple run again.
    """
    found = register_peaks.measure(threads)
    products, attempts = dict(found.products), _ATTEMPTS if threads > 1 else 0
    while attempts and any(
        rate < _LOW_SHARE * threads * single[name] for name, rate in products.items()
    ):
        products = larger(register_peaks.measure_products(threads), products)
        attempts -= 1
    levels = found.levels
    if known is not None:
        products = larger(products, known.products)
        before = {level.name: level.rate for level in known.levels}
        levels = tuple(
            Level(level.name, level.nbytes, max(level.rate, before.get(level.name, 0.0)))
            for level in levels
        )
    return Peaks(threads, products["f32"], products.get("int8"), levels, products)


def larger(rates: Mapping[str, float], known: Mapping[str, float]) -> dict[str, float]:
    """Each rate, or the known one where that is larger."""
    return {name: max(rate, known.get(name, 0.0)) for name, rate in rates.items()}


def measure_rate(dtype: str) -> float | None:
    """Operations per second of the type's kernel on one thread; None if the interpreter runs it."""
    product, selected = probe(dtype), select(dtype, host())
    engine = compile_graph(product.graph, threads=1).engine
    assert isinstance(engine, Program)
    feeds, best = product.feeds(ROWS), float("inf")
    engine.run(feeds)
    stop = time.perf_counter() + _SECONDS
    while best == float("inf") or time.perf_counter() < stop:
        steps = engine.profile(feeds, _ROUNDS).steps
        times = [
            timed.seconds
            for timed in steps
            if isinstance(timed.step, KernelStep) and timed.step.kernel == selected.name
        ]
        if not times:
            return None
        best = min(best, sum(times))
    return product.operations(ROWS) / max(best, 1e-9)


def peaks_to_json(peaks: Peaks) -> dict[str, Any]:
    return {
        "threads": peaks.threads,
        "products": dict(peaks.products),
        "levels": [[one.name, one.nbytes, one.rate] for one in peaks.levels],
    }


def peaks_from_json(data: Any) -> Peaks | None:
    """The peaks of a remembered entry; None if it has another form."""
    try:
        products = {str(name): float(rate) for name, rate in data["products"].items()}
        levels = tuple(
            Level(str(name), float(size), float(rate)) for name, size, rate in data["levels"]
        )
        threads = int(data["threads"])
        return Peaks(threads, products["f32"], products.get("int8"), levels, products)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
