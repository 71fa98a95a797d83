"""Reports where the time of a run goes: `bitwright explain MODEL --profile`.

    report = bw.profile("model.onnx", sizes={"batch": 8})
    print(report.verdict())

Totals over the steps of a run (`report.step_rows`), and the limit of the model: the category of
steps that takes the largest part of the time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bitwright.backends.cpu.profile.peaks import Peaks, measure
from bitwright.backends.cpu.runtime.program import Program
from bitwright.compiler import compile
from bitwright.errors import RunError
from bitwright.executable import Executable
from bitwright.passes.lower_integer.products import INTEGER_PRODUCTS
from bitwright.passes.manager import History
from bitwright.report.feeds import random_inputs
from bitwright.report.step_rows import SMALL_BARRIERS, StepRow, is_product, step_rows

QUANTIZED_OPS = frozenset(
    {"quantize", "dequantize", "dynamic_quantize", "integer_matmul", "integer_conv", "requantize"}
)


@dataclass(frozen=True)
class ProfileReport:
    model: str
    sizes: dict[str, int]
    peaks: Peaks
    steps: list[StepRow]
    run_seconds: float
    overhead_seconds: float
    """Time of a run outside of its steps."""
    barrier_seconds: float
    float_products: tuple[tuple[str, str], ...] = ()
    """Products of a quantized model that stay in floating point, and why."""

    @property
    def step_seconds(self) -> float:
        return sum(row.seconds for row in self.steps)

    @property
    def operations(self) -> float:
        return sum(row.operations or 0 for row in self.steps)

    @property
    def nbytes(self) -> int:
        return sum(row.traffic.nbytes for row in self.steps)

    @property
    def outside_products(self) -> float:
        """The fraction of the step time outside of matmul, convolution, attention and the like."""
        inside = sum(row.seconds for row in self.steps if is_product(row.op))
        return 1 - inside / self.step_seconds if self.step_seconds else 0.0

    @property
    def integer_fractions(self) -> tuple[float, float]:
        """The fractions of product operations, and of step time, in integer products."""
        products = [row for row in self.steps if is_product(row.op)]
        whole = sum(row.operations or 0 for row in products)
        integer = sum(row.operations or 0 for row in products if row.integer)
        seconds = sum(row.seconds for row in products if row.integer)
        return integer / (whole or 1), seconds / (self.step_seconds or 1)

    def families(self) -> list[tuple[str, int, float]]:
        """Kernel families with their number of steps and seconds, the longest first."""
        found: dict[str, list[float]] = {}
        for row in self.steps:
            found.setdefault(row.kernel, []).append(row.seconds)
        rows = [(family, len(times), sum(times)) for family, times in found.items()]
        return sorted(rows, key=lambda row: -row[2])

    def shares(self) -> dict[str, float]:
        """The fraction of run time by limit."""
        seconds = dict.fromkeys(("compute", "memory", "small", "interpreter"), 0.0)
        for row in self.steps:
            seconds[row.limit] += row.seconds
        seconds["overhead"] = self.overhead_seconds
        total = sum(seconds.values()) or 1.0
        return {name: value / total for name, value in seconds.items()}

    def verdict(self) -> str:
        """The limit of the model, in one line."""
        shares = self.shares()
        name = max(shares, key=lambda key: shares[key])
        rows = [row for row in self.steps if row.limit == name]
        share, seconds = f"{shares[name]:.0%}", sum(row.seconds for row in rows) or 1.0
        if name == "overhead":
            return (
                f"overhead between steps: {share} of the time is outside of steps "
                f"({self.overhead_seconds * 1e6:.0f} us)"
            )
        if name == "interpreter":
            ops = ", ".join(sorted({row.op for row in rows}))
            return f"interpreter fallbacks: they take {share} of the time ({ops})"
        if name == "small":
            return (
                f"many small steps: {share} of the time is in {len(rows)} steps shorter than "
                f"{SMALL_BARRIERS} barriers ({self.barrier_seconds * 1e6:.2f} us)"
            )
        reached = sum((row.reached or 0) * row.seconds for row in rows) / seconds
        if name == "memory":
            rate = sum(row.traffic.nbytes for row in rows) / seconds / 1e9
            return (
                f"memory bandwidth: {share} of the time is in memory-bound steps; "
                f"they move {rate:.1f} GB/s, {reached:.0%} of their roofline"
            )
        rate = sum(row.operations or 0 for row in rows) / seconds / 1e9
        where = "near the peak" if reached >= 0.6 else "below the peak"
        return (
            f"compute, {where}: {share} of the time is in compute-bound steps; "
            f"they reach {rate:.1f} Gop/s, {reached:.0%} of their roofline"
        )

    def as_json(self) -> dict[str, Any]:
        peaks = self.peaks
        levels = [{"level": one.name, "bytes_per_second": one.rate} for one in peaks.levels]
        operations, time = self.integer_fractions
        times = ("run_seconds", "step_seconds", "overhead_seconds", "barrier_seconds")
        return {
            "model": self.model,
            "sizes": self.sizes,
            "threads": peaks.threads,
            "peaks": {"flops": peaks.flops, "integer_ops": peaks.integers, "bandwidth": levels},
            **{name: getattr(self, name) for name in times},
            "operations": self.operations,
            "bytes": self.nbytes,
            "outside_products": self.outside_products,
            "integer_fractions": {"operations": operations, "time": time},
            "float_products": dict(self.float_products),
            "shares": self.shares(),
            "verdict": self.verdict(),
            "steps": [row.as_json() for row in self.steps],
        }


def profile(
    model: Any,
    feeds: Mapping[str, Any] | None = None,
    rounds: int = 20,
    *,
    sizes: Mapping[str, int] | None = None,
    threads: int | None = None,
) -> ProfileReport:
    """Time every step of a model (an executable, or what `bw.compile` accepts).

    Without `feeds`, inputs are random, with `sizes` for their symbolic dimensions (default 1).
    """
    exe = model if isinstance(model, Executable) else compile(model, threads=threads)
    if feeds is None:
        feeds = random_inputs(exe.graph, sizes or {}, seed=0)
    device_peaks = getattr(exe.engine, "roof", None)  # a GPU knows its own
    if not isinstance(exe.engine, Program) and device_peaks is None:
        raise RunError("only compiled models have steps to time", expected="target 'cpu' or 'cuda'")
    if rounds < 1:
        raise RunError("rounds must be at least 1", found=rounds)
    if device_peaks is not None:
        device_peaks()  # an interpreted GPU has none, and says so before the run
    exe.run(feeds)  # checks the feeds, and warms up
    graph = exe.history.stages[-1].graph
    found = exe.engine.profile(feeds, rounds)
    peaks = measure(found.threads) if device_peaks is None else device_peaks()
    rows = list(step_rows(graph, found, peaks))
    times = found.run_seconds, found.overhead_seconds, found.barrier_seconds
    return ProfileReport(
        graph.name, dict(found.bindings), peaks, rows, *times, float_products(exe.history)
    )


def float_products(history: History) -> tuple[tuple[str, str], ...]:
    """Products that no rule lowered to integers, and why; empty for a model without Q/DQ."""
    graph = history.stages[0].graph
    if not any(node.op in QUANTIZED_OPS for node in graph.nodes):
        return ()
    reasons: dict[str, str] = {}
    for event in history.trace.events:
        if event.rule in INTEGER_PRODUCTS:
            if event.fired:
                reasons.pop(event.node, None)
            else:
                reasons[event.node] = event.reason
    return tuple(reasons.items())
