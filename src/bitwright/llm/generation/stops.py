"""Finds stop strings in a text that arrives in parts."""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Passes text on as soon as no stop string can begin in it."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def add(self, text: str) -> tuple[str, bool]:
        """The text that is certain now, and whether a stop string was found behind it."""
        if not self._stops:
            return text, False
        held = self._held + text
        places = [at for stop in self._stops if (at := held.find(stop)) >= 0]
        if places:
            self._held = ""
            return held[: min(places)], True
        keep = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False

    def finish(self) -> str:
        """What was held back."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - length :]):
            return length
    return 0
