"""The journal of a search: one JSON object per line, appended and flushed to the disk.

A process that is killed leaves at most one incomplete last line, which reading ignores. The first
line names the problem (model, objective, machine); a journal of another problem is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bitwright.errors import BitwrightError

FILE = "journal.jsonl"
FORMAT = 1


class Journal:
    """Events of all runs of one search, in order."""

    def __init__(self, folder: Path, problem: Mapping[str, Any], resume: bool) -> None:
        self.path = folder / FILE
        self.events: list[dict[str, Any]] = []
        problem = {"event": "problem", "format": FORMAT, **problem}
        if resume and self.path.exists():
            self.events = _read(self.path)
            first = self.events[0] if self.events else problem
            different = [name for name in problem if first.get(name) != problem[name]]
            if different:
                raise BitwrightError(
                    f"the journal {self.path} is of another search: {', '.join(different)} differ",
                    hint="Start again without resume, or use another folder.",
                )
            write = "".join(f"{json.dumps(event)}\n" for event in self.events)
            if self.path.read_text(encoding="utf-8", errors="replace") != write:
                self._replace(write)  # an incomplete last line
        if not self.events:
            self._replace("")
            self.add(**problem)

    def _replace(self, text: str) -> None:
        temporary = self.path.with_suffix(".new")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, self.path)

    def add(self, event: str, **facts: Any) -> None:
        """Append an event and wait until it is on the disk."""
        made = {"event": event, **facts}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(made)}\n")
            file.flush()
            os.fsync(file.fileno())
        self.events.append(made)

    def last(self, event: str, **facts: Any) -> dict[str, Any] | None:
        """The last event of a kind with these facts."""
        one: dict[str, Any]
        for one in reversed(self.events):
            if one["event"] == event and all(one.get(k) == v for k, v in facts.items()):
                return one
        return None

    @property
    def elapsed(self) -> float:
        """Seconds of search in all runs so far."""
        return max((float(one.get("elapsed", 0.0)) for one in self.events), default=0.0)


def _read(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a journal."""
    found: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not line.endswith(b"\n") or not isinstance(event, dict) or "event" not in event:
            if number <= 1:
                return []
            break
        found.append(event)
    return found
