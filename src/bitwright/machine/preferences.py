"""What is fastest on this machine: batch and block sizes, layout, scheme and threads, measured.

    batch_size   the smallest number of rows at 90% of the best rate of an 8-bit product
    block_size   the smallest block of 4-bit weights at most 5% slower than the fastest block
    layout       of images that a convolution reads and writes: channels first or last
    schemes      of 8-bit weights; a zero point needs a sum over each row
    threads      the smallest number at 95% of the best rate

A preference is derived from its table of measurements when it is read, so that the reason shows
the figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.ir.graph import Graph
from bitwright.machine.probes import SampleProduct, probe
from bitwright.machine.timing import Timing, time_sides
from bitwright.ops.core.builder import Builder
from bitwright.pipeline import compile_graph

Run = Callable[[], object]
BLOCKS = (32, 64, 128)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_BATCH_SHARE, _THREAD_SHARE, _SLACK = 0.9, 0.95, 1.05
_ROWS, _SIZE = 256, 512
_SECONDS = 0.25
"""The measuring time of a table."""
_CHANNELS, _PIXELS = 32, 28


@dataclass(frozen=True)
class Preferences:
    """Measured tables for a number of threads; rates in rows or operations per second."""

    batch_rates: Mapping[int, float]
    """Rows per second by batch size."""
    thread_rates: Mapping[int, float]
    """Operations per second by number of threads."""
    block_seconds: Mapping[int, float]
    """Seconds of a product of one row by block size."""
    layout_seconds: Mapping[str, float]
    scheme_seconds: Mapping[str, float]

    @property
    def batch_size(self) -> int:
        return _smallest(self.batch_rates, _BATCH_SHARE)

    @property
    def threads(self) -> int:
        return _smallest(self.thread_rates, _THREAD_SHARE)

    @property
    def block_size(self) -> int:
        return smallest_within(self.block_seconds)

    @property
    def layout(self) -> str:
        first, last = self.layout_seconds["channels_first"], self.layout_seconds["channels_last"]
        return "channels_last" if last * _SLACK < first else "channels_first"

    @property
    def schemes(self) -> tuple[str, ...]:
        seconds = self.scheme_seconds
        limit = _SLACK * min(seconds.values())
        # a symmetric scheme needs no zero points
        if seconds["symmetric"] <= limit:
            return "symmetric", "asymmetric"
        return "asymmetric", "symmetric"

    def reasons(self) -> dict[str, str]:
        """The figures behind each preference."""
        best, rates = max(self.batch_rates.values()), self.batch_rates
        layouts, schemes = self.layout_seconds, self.scheme_seconds
        first, second = (schemes[name] for name in self.schemes)
        scaling = self.thread_rates[self.threads] / self.thread_rates[min(self.thread_rates)]
        return {
            "batch_size": f"{rates[self.batch_size] / best:.0%} of the best rate of an 8-bit "
            f"product; one row has {rates[min(rates)] / best:.0%}",
            "block_size": ", ".join(
                f"{block}: {seconds * 1e6:.1f} us" for block, seconds in self.block_seconds.items()
            )
            + " for one row times 4-bit weights",
            "layout": f"a convolution takes {layouts['channels_first'] * 1e6:.0f} us with channels "
            f"first and {layouts['channels_last'] * 1e6:.0f} us with channels last",
            "schemes": f"{self.schemes[1]} weights take {second / first:.2f} times as long",
            "threads": f"{scaling:.2f} times the rate of one thread",
        }

    def as_json(self) -> dict[str, Any]:
        return {
            "batch_rates": dict(self.batch_rates),
            "thread_rates": dict(self.thread_rates),
            "block_seconds": dict(self.block_seconds),
            "layout_seconds": dict(self.layout_seconds),
            "scheme_seconds": dict(self.scheme_seconds),
        }

    @classmethod
    def from_json(cls, data: Any) -> Preferences | None:
        """The preferences of a remembered entry; None if it has another form."""
        try:
            batches, threads, blocks = (
                {int(key): float(value) for key, value in data[name].items()}
                for name in ("batch_rates", "thread_rates", "block_seconds")
            )
            layouts, schemes = (
                {str(key): float(value) for key, value in data[name].items()}
                for name in ("layout_seconds", "scheme_seconds")
            )
            found = cls(batches, threads, blocks, layouts, schemes)
            found.reasons()
        except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError):
            return None
        return found


def _smallest(rates: Mapping[int, float], share: float) -> int:
    best = max(rates.values())
    return min(number for number, rate in rates.items() if rate >= share * best)


def smallest_within(seconds: Mapping[int, float], slack: float = _SLACK) -> int:
    """The smallest key whose time is at most `slack` times the shortest."""
    best = min(seconds.values())
    return min(key for key, value in seconds.items() if value <= slack * best)


def measure_preferences(threads: int) -> Preferences:
    product = probe("uint8", _SIZE, _SIZE)
    fastest = _runs(product, _BATCHES, threads)
    batches = {n: n / one.minimum for n, one in time_sides(fastest, _SECONDS).items()}
    counts = thread_counts(threads)
    sides = {n: _runs(product, (_ROWS,), n)[_ROWS] for n in counts}
    rates = {
        n: product.operations(_ROWS) / one.minimum for n, one in time_sides(sides, _SECONDS).items()
    }
    return Preferences(
        batches,
        rates,
        measure_blocks("int4", _SIZE, _SIZE, threads),
        _minima(time_sides(_layouts(threads), _SECONDS)),
        _minima(time_sides(_schemes(threads), _SECONDS)),
    )


def thread_counts(threads: int) -> list[int]:
    """1, 2, 4, ... and the number itself."""
    powers = [1 << n for n in range(threads.bit_length())]
    return sorted({n for n in powers if n <= threads} | {threads})


def measure_blocks(
    dtype: str, depth: int, columns: int, threads: int, blocks: Sequence[int] = BLOCKS
) -> dict[int, float]:
    """Seconds of a product of one row by the block size of its weights."""
    sizes = [block for block in blocks if block <= depth] or [depth]
    sides = {block: _runs(probe(dtype, depth, columns, block), (1,), threads)[1] for block in sizes}
    return _minima(time_sides(sides, _SECONDS))


def _minima(found: Mapping[Any, Timing]) -> dict[Any, float]:
    return {key: one.minimum for key, one in found.items()}


def _runs(product: SampleProduct, rows: Sequence[int], threads: int) -> dict[int, Run]:
    exe = compile_graph(product.graph, threads=threads)
    return {n: _run(exe, product.feeds(n)) for n in rows}


def _run(exe: Any, feeds: dict[str, Any]) -> Run:
    return lambda: exe.run(feeds)


def _layouts(threads: int) -> dict[str, Run]:
    """A convolution that reads and writes either layout."""
    rng = np.random.default_rng(0)
    w = rng.normal(size=(_CHANNELS, _CHANNELS, 3, 3)).astype(np.float32)

    def graph(is_last: bool) -> Graph:
        b = Builder("layout")
        if is_last:
            x = b.input("x", f"f32[1, {_PIXELS}, {_PIXELS}, {_CHANNELS}]")
            x = b.transpose(x, perm=(0, 3, 1, 2))
        else:
            x = b.input("x", f"f32[1, {_CHANNELS}, {_PIXELS}, {_PIXELS}]")
        y = b.relu(b.conv(x, b.constant(w), pads=(1, 1, 1, 1)))
        return b.build(y=b.transpose(y, perm=(0, 2, 3, 1)) if is_last else y)

    sides = {}
    for name, is_last in {"channels_first": False, "channels_last": True}.items():
        exe = compile_graph(graph(is_last), threads=threads)
        shape = next(iter(exe.inputs.values())).concrete({})  # type: ignore[union-attr]
        sides[name] = _run(exe, {"x": rng.normal(size=shape).astype(np.float32)})
    return sides


def _schemes(threads: int) -> dict[str, Run]:
    """An 8-bit product with weights without and with zero points."""
    rng = np.random.default_rng(0)
    q = rng.integers(-100, 128, (_SIZE, _SIZE)).astype(np.int8)
    feeds = {"x": rng.integers(0, 256, (_ROWS, _SIZE)).astype(np.uint8)}
    sides = {}
    for name, zero in {"symmetric": 0, "asymmetric": -40}.items():
        b = Builder("scheme")
        x = b.input("x", f"u8[rows, {_SIZE}]")
        points = b.constant(np.full(_SIZE, zero, np.int8)) if zero else None
        sums = b.integer_matmul(x, b.constant(q), None, points)
        y = b.mul(b.cast(sums, to="f32"), b.constant(np.full(_SIZE, 1e-3, np.float32)))
        sides[name] = _run(compile_graph(b.build(y=y), threads=threads), feeds)
    return sides
