"""Counters and histograms in the text form that Prometheus reads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_Labels = tuple[tuple[str, str], ...]


@dataclass
class _Histogram:
    counts: list[int] = field(default_factory=lambda: [0] * (len(_SECONDS) + 1))
    total: float = 0.0


class Metrics:
    """Values by name and labels; gauges are read when they are asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._help: dict[str, tuple[str, str]] = {}
        self._counters: dict[str, dict[_Labels, float]] = {}
        self._histograms: dict[str, _Histogram] = {}
        self._gauges: dict[str, Callable[[], float]] = {}

    def counter(self, name: str, text: str) -> None:
        self._help[name] = ("counter", text)
        self._counters[name] = {}

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        self._help[name] = ("gauge", text)
        self._gauges[name] = read

    def histogram(self, name: str, text: str) -> None:
        self._help[name] = ("histogram", text)
        self._histograms[name] = _Histogram()

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        key = tuple(sorted(labels.items()))
        with self._lock:
            values = self._counters[name]
            values[key] = values.get(key, 0) + amount

    def observe(self, name: str, seconds: float) -> None:
        place = next((i for i, limit in enumerate(_SECONDS) if seconds <= limit), len(_SECONDS))
        with self._lock:
            found = self._histograms[name]
            found.counts[place] += 1
            found.total += seconds

    def text(self) -> str:
        """All of them."""
        lines: list[str] = []
        for name, (kind, text) in self._help.items():
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
            if kind == "gauge":
                lines.append(f"{name} {self._gauges[name]():g}")
            elif kind == "counter":
                with self._lock:
                    values = dict(self._counters[name])
                for labels, value in values.items() or [((), 0.0)]:
                    lines.append(f"{name}{_labels(labels)} {value:.15g}")
            else:
                lines += self._histogram_lines(name)
        return "\n".join(lines) + "\n"

    def _histogram_lines(self, name: str) -> list[str]:
        with self._lock:
            found = self._histograms[name]
            counts, total = list(found.counts), found.total
        lines, below = [], 0
        for limit, count in zip((*map(str, _SECONDS), "+Inf"), counts, strict=True):
            below += count
            lines.append(f'{name}_bucket{{le="{limit}"}} {below}')
        return [*lines, f"{name}_sum {total:.6f}", f"{name}_count {below}"]


def _labels(labels: _Labels) -> str:
    if not labels:
        return ""
    clean = (f'{key}="{value.replace(chr(92), "").replace(chr(34), "")}"' for key, value in labels)
    return "{" + ",".join(clean) + "}"
