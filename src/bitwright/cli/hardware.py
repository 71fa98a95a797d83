"""`hardware` and `advise`: what this machine has, and what suits a model on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

import bitwright
from bitwright.cli import common
from bitwright.cli.bench import parse_counts
from bitwright.cli.data import data_options

_LOW_SHARE = 0.8


@common.main.command()
@click.option(
    "--measure/--no-measure",
    default=None,
    help="Measure again, or only print what is remembered; default: measure once.",
)
@click.option("--threads", type=click.IntRange(1), help="Threads of the peaks; default: all cores.")
@common.json_option
def hardware(measure: bool | None, threads: int | None, as_json: bool) -> None:
    """Show features, measured peaks, and which kernels and instructions each type uses here.

    Measurements take a few seconds and are remembered in the cache folder.
    """
    found = common.working("measuring")(bitwright.hardware)(measure, threads)
    if as_json:
        return common.print_json(found.as_json())
    for line in _facts(found):
        common.print_line(line)
    click.echo()
    common.show_columns(
        ("type", "accelerated", "kernel", "instruction", "Gop/s", "peak", "share"),
        [_cells(one) for one in found.accelerations()],
        text=("type", "accelerated", "kernel", "instruction"),
    )
    common.print_line("rates of one thread: the kernel, and the instruction in registers")
    reasons: dict[str, list[str]] = {}
    for one in found.accelerations():
        if one.reason != one.instruction:
            reasons.setdefault(one.reason, []).append(one.dtype)
    for reason, types in reasons.items():
        common.print_line(f"{', '.join(types)}: {reason}")
    if found.preferences is not None:
        click.echo()
        for line in _preferences(found.preferences):
            common.print_line(line)


def _facts(found: Any) -> Iterator[str]:
    l1, l2, l3 = (_binary(size) for size in found.caches)
    yield f"{found.name} ({found.architecture}), target {found.target}"
    yield f"cores: {found.parallel_units}, vectors: {8 * found.vector_bytes} bits"
    yield f"caches: L1 {l1}, L2 {l2} per core, L3 {l3}"
    yield f"features: {', '.join(found.features) or 'none'}"
    if found.excluded:
        yield f"excluded by the target: {', '.join(found.excluded)}"
    for gpu in found.gpus:
        yield f"GPU: {gpu}"
    if not found.gpus:
        yield f"GPUs: none ({found.why_no_gpu})"
    if found.peaks is None:
        yield "peaks: not measured (--measure)"
        return
    peaks = found.peaks
    rates = [f"{name} {common.human(rate, 'op/s')}" for name, rate in peaks.products.items()]
    yield f"peaks of {_threads(peaks.threads)}: {', '.join(rates)}"
    low = [
        name
        for name, rate in peaks.products.items()
        if rate < _LOW_SHARE * peaks.threads * (found.single or {}).get(name, 0.0)
    ]
    if low:
        yield (
            f"{', '.join(low)}: less than {_LOW_SHARE:.0%} of {peaks.threads} times the peak of "
            "one thread: other processes use the cores, or threads share their units"
        )
    rates = [f"{level.name} {common.human(level.rate, 'B/s')}" for level in peaks.levels]
    yield f"bandwidth of {_threads(peaks.threads)}: {', '.join(rates)}"


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def _binary(size: int) -> str:
    for factor, unit in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= factor:
            return f"{size / factor:g} {unit}"
    return "none" if not size else f"{size} B"


def _cells(one: Any) -> tuple[str, ...]:
    return (
        one.dtype,
        "yes" if one.accelerated else "no",
        one.kernel or "(interpreter)",
        one.instruction,
        "not measured" if one.rate is None else f"{one.rate / 1e9:.1f}",
        "" if one.peak is None else f"{one.peak / 1e9:.1f}",
        "" if one.share is None else f"{one.share:.0%}",
    )


def _preferences(found: Any) -> Iterator[str]:
    values = {
        "batch_size": found.batch_size,
        "block_size": found.block_size,
        "layout": found.layout,
        "schemes": ", ".join(found.schemes),
        "threads": found.threads,
    }
    for name, reason in found.reasons().items():
        yield f"{name.replace('_', ' ')}: {values[name]} ({reason})"


@common.main.command()
@click.argument("model")
@data_options()
@click.option(
    "--budget",
    default=60.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Seconds for compiling and measuring.",
)
@click.option(
    "--threads",
    callback=parse_counts,
    help="Numbers of threads, separated by commas; default: 1, 2, 4 ... to the number of cores.",
)
@click.option(
    "--min-sqnr-db",
    default=20.0,
    show_default=True,
    help="Smallest SQNR of the outputs on the data.",
)
@common.size_option
@common.json_option
def advise(
    model: str,
    data: Any,
    budget: float,
    threads: list[int],
    min_sqnr_db: float,
    sizes: dict[str, int],
    as_json: bool,
) -> None:
    """Advise precision, threads and batch size for MODEL on this machine, with the reasons.

    Without --data, inputs are random, and the int8 model serves for timing only.
    """
    found = common.working("measuring")(bitwright.advise)(
        model, data, sizes=sizes, threads=threads or None, budget=budget, min_sqnr_db=min_sqnr_db
    )
    if as_json:
        return common.print_json(found.as_json())
    at = ", ".join(f"{name}={size}" for name, size in found.sizes.items())
    common.print_line(f"{found.model}{f' at {at}' if at else ''}, on {found.measured_on}")
    common.show_columns(
        ("precision", "threads", "batch", "ms", "quartiles", "x f32", "samples/s", "MB"),
        [_advice_cells(row) for row in found.rows],
        text=("precision",),
    )
    for sentence in found.sentences:
        common.print_line(sentence)


def _advice_cells(row: Any) -> tuple[str, ...]:
    low, high = row.quartiles
    return (
        row.precision,
        str(row.threads),
        str(row.batch),
        f"{row.milliseconds:.3f}",
        f"{low:.3f}-{high:.3f}",
        f"{row.times_f32:.2f}",
        f"{row.samples_per_second:.1f}",
        f"{row.memory_bytes / 1e6:.2f}",
    )
