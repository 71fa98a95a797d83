"""What rewriting did and did not do, so that `explain` can tell."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """A rule met a node: it fired, or was refused for a reason."""

    stage: str
    rule: str
    node: str
    fired: bool
    reason: str = ""
    made: tuple[str, ...] = ()
    """Names of the values that took the node's place, when it fired."""

    def __str__(self) -> str:
        outcome = (
            f"fired, giving {', '.join(self.made)}" if self.fired else f"refused: {self.reason}"
        )
        return f"{self.stage}: {self.rule} on %{self.node} {outcome}"


class Trace:
    """Events in order; the same refusal is kept once per stage."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.stage = ""
        self._seen: set[tuple[str, str, str, str]] = set()

    def fired(self, rule: str, node: str, made: Iterable[str], reason: str = "") -> None:
        self.events.append(Event(self.stage, rule, node, True, reason, tuple(made)))

    def refused(self, rule: str, node: str, reason: str) -> None:
        key = (self.stage, rule, node, reason)
        if key not in self._seen:
            self._seen.add(key)
            self.events.append(Event(self.stage, rule, node, False, reason))

    def about(self, name: str) -> Iterator[Event]:
        """Events that touch this node or what took its place."""
        names = {name}
        for event in self.events:
            if event.node in names:
                names.update(event.made)
                yield event
            elif names & set(event.made):
                yield event
